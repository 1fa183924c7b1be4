"use strict";
(() => {
  // Theme: automatic, light or dark; kept where the browser lets a page keep anything.
  const root = document.documentElement, themes = ["automatic", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = "automatic";
  try { theme = localStorage.getItem("eldr-sim-theme") || theme; } catch { /* not kept */ }
  const show = () => {
    if (theme === "automatic") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % 3];
    try { localStorage.setItem("eldr-sim-theme", theme); } catch { /* not kept */ }
    show();
  });
  if (!themes.includes(theme)) theme = "automatic";
  show();

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
      const first = body.rows[0] && body.rows[0].cells[column];
      if (first && first.classList.contains("n")) head.classList.add("r");
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

  // Pictures: the mark under the pointer, else the nearest one, says its values.
  const tip = document.getElementById("tip");
  let told = null;
  const hide = () => {
    told = null;
    tip.hidden = true;
    for (const halo of document.querySelectorAll(".halo")) halo.remove();
  };
  const tell = (svg, mark) => {
    hide();
    const halo = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    const x = Number(mark.dataset.x), y = Number(mark.dataset.y);
    for (const [name, value] of [["cx", x], ["cy", y], ["r", 7], ["class", "halo"]]) halo.setAttribute(name, value);
    svg.append(halo);
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    told = () => {
      const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
      const wide = tip.offsetWidth, left = at.x + 14 + wide > innerWidth ? at.x - 14 - wide : at.x + 14;
      const top = Math.min(at.y - tip.offsetHeight - 10, innerHeight - tip.offsetHeight - 6);
      tip.style.left = Math.max(6, Math.min(left, innerWidth - wide - 6)) + "px";
      tip.style.top = Math.max(6, top) + "px";
    };
    told();
  };
  for (const svg of document.querySelectorAll(".chart > svg")) {
    const marks = [...svg.querySelectorAll("[data-tip]")];
    if (!marks.length) continue;
    let current = -1;
    const near = (event) => {
      const under = marks.indexOf(event.target);
      if (under >= 0) return under;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = -1, least = 60 * 60;
      marks.forEach((mark, index) => {
        const distance = (mark.dataset.x - at.x) ** 2 + (mark.dataset.y - at.y) ** 2;
        if (distance < least) [best, least] = [index, distance];
      });
      return best;
    };
    const point = (event) => {
      const index = near(event);
      if (index < 0) hide(); else { current = index; tell(svg, marks[index]); }
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("focus", () => {
      if (svg.matches(":focus-visible")) { current = Math.max(current, 0); tell(svg, marks[current]); }
    });
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!move) return;
      event.preventDefault();
      current = (current + move + marks.length) % marks.length;
      tell(svg, marks[current]);
    });
  }
  for (const change of ["scroll", "resize"]) addEventListener(change, () => told && told(), { passive: true });
})();
