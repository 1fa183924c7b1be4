"use strict";
(() => {
  // Theme: automatic, light or dark; kept where the browser lets a page keep anything.
  const root = document.documentElement, themes = ["automatic", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = "automatic";
  try { theme = localStorage.getItem("eldr-sim-theme") || theme; } catch { /* not kept */ }
  if (!themes.includes(theme)) theme = "automatic";
  const show = (shown) => {
    if (shown === "automatic") delete root.dataset.theme; else root.dataset.theme = shown;
    button.textContent = "Theme: " + theme;
    draw();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % 3];
    try { localStorage.setItem("eldr-sim-theme", theme); } catch { /* not kept */ }
    show(theme);
  });

  // Tables: a click on a heading sorts, a second one turns the order; missing values stay last.
  const collator = new Intl.Collator("en", { numeric: true });
  const key = (cell) => {
    if ("value" in cell.dataset) return cell.dataset.value === "" ? null : Number(cell.dataset.value);
    return cell.textContent.trim();
  };
  const order = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return collator.compare(String(a), String(b));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return down ? order(b, a) : order(a, b);
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // Pictures: what the page says of them, the common look, and the colours of the theme.
  const pictures = [...document.querySelectorAll(".plot")].map((box) => ({
    box, ...JSON.parse(box.nextElementSibling.textContent),
  }));
  const probe = document.body.appendChild(document.createElement("i"));
  const resolve = (name) => { probe.style.color = name; return getComputedStyle(probe).color; };
  const painted = (value) => {
    if (Array.isArray(value)) return value.map(painted);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, inner]) =>
      [name, name.endsWith("color") ? resolve(inner) : painted(inner)]));
  };
  const axis = { gridcolor: "var(--grid)", zerolinecolor: "var(--soft)", linecolor: "var(--soft)",
    automargin: true, exponentformat: "none", separatethousands: true, title: { standoff: 8 } };
  const template = { layout: {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", height: 300,
    margin: { l: 48, r: 12, t: 12, b: 40 }, hovermode: "closest", hoverdistance: 60,
    font: { family: "system-ui, sans-serif", size: 12, color: "var(--soft)" },
    modebar: { bgcolor: "transparent", color: "var(--soft)", activecolor: "var(--text)" },
    legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: "var(--text)" } },
    hoverlabel: { align: "left", bgcolor: "var(--text)", bordercolor: "var(--text)", font: { color: "var(--page)" } },
    // A finger scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: axis, yaxis: axis, colorway: [],
  } };
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
  const draw = (width) => window.Plotly && pictures.forEach(({ box, data, layout }) =>
    Plotly.react(box, painted(data), painted({ ...layout, template, width }), config));

  // With the keyboard: arrows go from mark to mark, and a reader of the screen is told the values.
  const told = document.getElementById("told");
  for (const { box, data } of pictures) {
    const marks = data.flatMap((trace, curveNumber) => trace.hoverinfo === "skip" ? [] :
      trace.x.map((_, pointNumber) => ({ curveNumber, pointNumber })));
    let current = -1;
    box.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Escape") Plotly.Fx.unhover(box);
      if (!move) return;
      event.preventDefault();
      current = (Math.max(current, move < 0 ? 0 : -1) + move + marks.length) % marks.length;
      Plotly.Fx.hover(box, [marks[current]]);
      told.textContent = [...box.querySelectorAll(".hoverlayer tspan")].map((line) => line.textContent).join("; ");
    });
    box.addEventListener("blur", () => Plotly.Fx.unhover(box));
  }

  // plotly.js lies in the page deflated, in base 85 with "," for "<"; its hash is in the policy.
  const unpack = async () => {
    const held = document.getElementById("plotly"), text = held.textContent;
    const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
    const values = new Uint8Array(128).fill(84);
    for (let i = 0; i < 85; i++) values[digits.charCodeAt(i)] = i;
    const bytes = new Uint8Array(4 * Math.ceil(text.length / 5)), view = new DataView(bytes.buffer);
    for (let i = 0, at = 0; i < text.length; i += 5, at += 4) {
      let word = 0;
      for (let k = 0; k < 5; k++) word = word * 85 + (i + k < text.length ? values[text.charCodeAt(i + k)] : 84);
      view.setUint32(at, word);
    }
    const packed = new Blob([bytes.subarray(0, Number(held.dataset.bytes))]);
    const code = await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).text();
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  };

  show(theme);
  if (pictures.length) unpack().then(() => show(theme), () => {
    for (const { box } of pictures) box.textContent = "This browser cannot unpack the pictures; a newer one can.";
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  // On paper: light, and two pictures beside each other.
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; draw(320); });
  addEventListener("afterprint", () => show(theme));
})();
