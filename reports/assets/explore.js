"use strict";
(() => {
  const form = document.getElementById("controls"), start = JSON.parse(form.dataset.start);
  const byId = (id) => document.getElementById(id), field = (name) => form.elements[name];
  const texts = ["input_len", "output_len", "kv_tier", "goodput", "price_per_gpu_hour", "more"];
  const plain = ["model", "gpu", "engine", "policy", "workload", "tensor_parallel_size", ...texts];

  const rents = JSON.parse(form.dataset.rents);
  let gpu = "";  // of which the price may be the rent

  // The rate's slider is logarithmic: ten of its steps are a factor of two.
  const rateOf = (at) => Number((2 ** (at / 10)).toPrecision(2));
  const read = () => {
    const state = Object.fromEntries(plain.map((name) => [name, field(name).value.trim()]));
    const d = field("d").value;
    state.topology = field("kind").value === "pd" ? `${field("p").value}P${d}D` : `${d}C`;
    state.request_rate = exactRate ?? String(rateOf(Number(field("rate").value)));
    return state;
  };
  let exactRate = null;  // of a link or the command line, until the slider moves
  const write = (state) => {
    for (const name of plain) if (state[name] !== undefined) {
      const control = field(name);
      if (control.tagName === "SELECT" && ![...control.options].some((o) => o.value === state[name])) {
        control.add(new Option(state[name], state[name]));
      }
      control.value = state[name];
    }
    const pd = /^(\d+)P(\d+)D$/i.exec(state.topology ?? ""), c = /^(\d+)C$/i.exec(state.topology ?? "");
    field("kind").value = c ? "c" : "pd";
    if (pd) { setRange("p", pd[1]); setRange("d", pd[2]); }
    if (c) setRange("d", c[1]);
    gpu = field("gpu").value;
    exactRate = state.request_rate || start.request_rate;
    field("rate").value = String(Math.round(10 * Math.log2(Number(exactRate) || 1)));
    label();
  };
  const setRange = (name, value) => {
    const control = field(name);
    control.max = String(Math.max(Number(control.max), Number(value)));
    control.value = value;
  };
  const label = () => {
    const together = field("kind").value === "c";
    byId("for-p").hidden = together;
    byId("for-d").firstChild.data = together ? "Workers " : "Decode workers ";
    for (const name of ["p", "d"]) field(name).parentElement.querySelector("output").value = field(name).value;
    const rate = exactRate ?? rateOf(Number(field("rate").value));
    field("rate").parentElement.querySelector("output").value = rate;
    field("rate").setAttribute("aria-valuetext", `${rate} requests a second`);
  };

  // What the page shows is in its address: a link gives the same page, its pins too.
  let pins = [];
  const changed = (state) => Object.fromEntries(Object.entries(state).filter(([k, v]) => v !== (start[k] ?? "")));
  const encode = (state) => new URLSearchParams(changed(state)).toString();
  const keep = () => {
    const own = new URLSearchParams(changed(read()));
    for (const pin of pins) own.append("pin", pin.text);
    history.replaceState(null, "", "#" + own.toString());
  };
  const arrive = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const wanted = given.getAll("pin").slice(0, 6);
    given.delete("pin");
    write({ ...start, ...Object.fromEntries(given) });
    pins = wanted.map((text) => ({ text, state: { ...start, ...Object.fromEntries(new URLSearchParams(text)) }, curve: [] }));
    byId("unpin").hidden = !pins.length;
    for (const pin of pins) stream({ ...pin.state, parts: "curve" }, (found) => {
      if (found.kind === "curve" && !found.error) { pin.curve.push(found); draw(); }
    });
    ask();
  };

  const stream = async (state, take, signal) => {
    const answer = await fetch("/points", { method: "POST", signal, body: JSON.stringify(state),
      headers: { "Content-Type": "application/json" } });
    if (!answer.ok) { take({ kind: "error", error: await answer.text() }); return; }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) take(JSON.parse(line));
      if (done) return;
    }
  };

  const fill = (name, ...content) => { byId(name).replaceChildren(...content); byId(name).classList.remove("waiting"); };
  let current = null, shown = { point: null, curve: [], plane: [], pictures: [] };
  const say = (text, wrong = false) => { byId("status").textContent = text; byId("status").classList.toggle("wrong", wrong); };
  const ask = async () => {
    current?.abort();
    const mine = current = new AbortController(), fresh = { point: null, curve: [], plane: [], pictures: [] };
    label(); keep();
    say("Simulating … (the first run of a model draws its routing, which takes a minute)");
    for (const old of document.querySelectorAll(".plot, #figures, #command, #answer, #limits, #band")) old.classList.add("waiting");
    const take = (found) => {
      if (mine !== current) return;
      if (found.error && found.kind !== "plane" && found.kind !== "curve") { say(found.error, true); return; }
      if (found.kind === "command") fill("command", found.command);
      else if (found.kind === "point") { fresh.point = found; shown = fresh; verdict(found); tiles(found); say("Drawing the curve …"); }
      else if (found.kind === "pictures") { fresh.pictures = found.pictures; notes(found); }
      else if (found.kind === "end") say("");
      else if (!found.error) fresh[found.kind].push(found);
      later({ point: "rates", curve: "rates", plane: "plane", pictures: "pictures" }[found.kind]);
    };
    try { await stream(read(), take, mine.signal); } catch (error) {
      if (error.name !== "AbortError") say("The explorer does not answer: " + error.message, true);
    }
  };
  let waiting = 0, drawing = 0, stale = new Set();
  const soon = () => { clearTimeout(waiting); label(); waiting = setTimeout(ask, 120); };
  const later = (part) => {  // drawing takes longer than what comes meanwhile
    if (part) stale.add(part);
    if (stale.size) drawing ||= setTimeout(() => { drawing = 0; const parts = stale; stale = new Set(); draw(parts); }, 80);
  };

  const made = (kind, ...inside) => { const of = document.createElement(kind); of.append(...inside); return of; };
  // The answer in a sentence: who is served in time, or how fast where nothing bounds it.
  const verdict = (p) => {
    const cost = p.cost_per_million_output_tokens ? `, $${p.cost_per_million_output_tokens.toPrecision(3)} a million output tokens` : "";
    const share = p.slo_attainment === null ? "" : `${(100 * p.slo_attainment).toFixed(0)}% of requests are within the service level`;
    const speed = p.p50_tpot_ms === null ? "" : `median TTFT ${p.p50_ttft_ms.toPrecision(3)} ms, TPOT ${p.p50_tpot_ms.toPrecision(3)} ms`;
    byId("answer").classList.remove("waiting");
    byId("answer").textContent = `${p.gpus} GPUs at ${p.rate} requests/s: ${[share, speed].filter(Boolean).join("; ")}${cost}.`;
  };
  const tiles = (p) => fill("figures", ...p.headline.map(([name, value]) => made("div", made("b", value), made("span", name))));
  const notes = (found) => {
    for (const name of ["limits", "band"]) byId(name).classList.remove("waiting");
    byId("limits").textContent = found.limits ? `What limits it: ${found.limits.bottleneck}: ${found.limits.because}.` : "";
    byId("band").textContent = found.band ?? "";
    const warned = (found.warnings ?? []).map((text) => `Warning: ${text}. `).join("");
    fill("parts", ...(found.parts ?? []).map(([title, rows]) => made("table", made("caption", title),
      made("tbody", ...rows.map(([name, value]) => { const of = made("th", name); of.scope = "row";
        if (value === undefined) of.colSpan = 2;
        return made("tr", of, ...(value === undefined ? [] : [made("td", value)])); })))));
    byId("notes").textContent = `Step times are ${found.weakest_provenance} or better. ${found.completed} requests measured. ${warned}`;
  };

  // Pictures, in the colours of the style sheet.
  const probe = document.body.appendChild(document.createElement("i"));
  const resolve = (name) => { probe.style.color = name; return getComputedStyle(probe).color; };
  const painted = (value) => {
    if (typeof value === "string") return value.startsWith("var(") ? resolve(value) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
  };
  const axis = { gridcolor: "var(--grid)", zerolinecolor: "var(--soft)", linecolor: "var(--soft)", automargin: true,
    rangemode: "tozero", exponentformat: "none", separatethousands: true };
  const plot = (id, title, x, y, data, more = {}) => {
    const layout = { title: { text: title, font: { size: 14, color: "var(--text)" } }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 50, r: 14, t: 34, b: 40 }, font: { color: "var(--soft)", size: 11 },
      legend: { orientation: "h", y: -0.4, font: { color: "var(--text)" } }, hovermode: "closest", ...more,
      xaxis: { ...axis, ...more.xaxis, title: { text: x, standoff: 4 } }, yaxis: { ...axis, ...more.yaxis, title: { text: y } } };
    const box = byId(id);
    box.classList.remove("waiting");
    box.setAttribute("aria-label", `${title}: ${y} by ${x}`);
    Plotly.react(box, painted(data), painted(layout), { responsive: true, displayModeBar: false });
  };
  const sorted = (curve) => [...curve].sort((a, b) => a.rate - b.rate);
  const line = (curve, y, name, colour, dash = "solid") => ({ type: "scatter", mode: "lines+markers", name,
    x: sorted(curve).map((p) => p.rate), y: sorted(curve).map(y), line: { color: `var(--c${colour})`, dash },
    marker: { color: `var(--c${colour})`, size: 5 }, hovertemplate: "%{x:.3~g}/s: %{y:.4~g}<extra>%{fullData.name}</extra>" });
  const bound = (metric) => Number(/^[\d.]+/.exec((field("goodput").value.split(`${metric}:`)[1] ?? ""))?.[0] ?? NaN);
  const level = (value) => Number.isFinite(value) ? { shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value,
    line: { color: "var(--warn-rule)", dash: "dot", width: 2 } }] } : {};
  const here = (y) => shown.point ? [{ type: "scatter", mode: "markers", name: "here", x: [shown.point.rate], y: [y(shown.point)],
    showlegend: false, marker: { color: "var(--text)", size: 11, symbol: "circle-open", line: { width: 2 } } }] : [];
  const draw = (parts = new Set(["rates", "plane", "pictures"])) => {
    if (!window.Plotly) { setTimeout(() => { for (const part of parts) later(part); }, 50); return; }
    if (parts.has("rates")) drawRates();
    if (parts.has("plane") || !shown.plane.length) drawPlane();
    if (parts.has("pictures")) drawPictures();
  };
  const drawRates = () => {
    const curve = shown.point ? [...shown.curve.filter((p) => p.rate !== shown.point.rate), shown.point] : shown.curve;
    for (const [id, name] of [["ttft", "TTFT"], ["tpot", "TPOT"]]) {
      const own = [50, 90, 99].map((q, n) => line(curve, (p) => p[`p${q}_${id}_ms`], `p${q}`, 0, ["solid", "dash", "dot"][n]));
      const theirs = pins.map((pin, n) => line(pin.curve, (p) => p[`p99_${id}_ms`], `p99, ${pin.text || "start"}`, n + 1, "dot"));
      plot(id, `${name} by rate`, "requests/s", "ms", [...own, ...theirs, ...here((p) => p[`p99_${id}_ms`])], level(bound(id)));
    }
    // Without a service level no request is good: output tokens stand in the place of goodput.
    const judged = curve.some((p) => p.request_goodput !== null);
    const good = judged ? (p) => p.request_goodput === null ? null : p.request_goodput / p.gpus : (p) => p.output_throughput / p.gpus;
    const named = judged ? "good requests/s a GPU" : "output tokens/s a GPU";
    const cost = curve.some((p) => p.cost_per_million_output_tokens) ? [{ ...line(curve,
      (p) => p.cost_per_million_output_tokens, "$ a million output tokens", 3), yaxis: "y2" }] : [];
    plot("goodput", `${judged ? "Goodput" : "Output"} of a GPU by rate`, "requests/s", named,
      [line(curve, good, named, 0), ...pins.map((pin, n) => line(pin.curve, good, pin.text || "start", n + 1)), ...cost],
      cost.length ? { yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, automargin: true, title: { text: "$" } } } : {});
  };
  const drawPlane = () => {
    const cells = shown.plane, ps = [...new Set(cells.map((c) => c.p))].sort((a, b) => a - b),
      ds = [...new Set(cells.map((c) => c.d))].sort((a, b) => a - b), at = (p, d) => cells.find((c) => c.p === p && c.d === d);
    const z = ps.map((p) => ds.map((d) => { const c = at(p, d); return c && c.slo_attainment !== null ? 100 * c.slo_attainment : null; }));
    const none = cells.every((c) => c.slo_attainment === null);
    plot("plane", cells.length ? none ? "Requests within the service level: none is given" : "Requests within the service level, %" : "P and D: for clusters whose prefill is apart", "decode workers", "prefill workers",
      cells.length ? [{ type: "heatmap", x: ds, y: ps, z, zmin: 0, zmax: 100, showscale: false, colorscale: [[0, "var(--card)"], [1, "var(--c0)"]],
        text: z.map((row) => row.map((v) => v === null ? "" : v.toFixed(0))), texttemplate: "%{text}",
        hovertemplate: "%{y}P%{x}D: %{z:.1f}%<extra></extra>" }] : [],
      { xaxis: { type: "category" }, yaxis: { type: "category" } });
  };
  const drawPictures = () => {
    for (let n = 0; n < 4; n++) {
      const picture = shown.pictures[n], figure = byId(`more${n}`).parentElement;
      figure.hidden = !picture;
      if (!picture) continue;
      const { xaxis, yaxis, ...rest } = picture.layout, bars = rest.barmode === "stack";
      plot(`more${n}`, picture.title, bars ? "" : xaxis.title.text, bars ? "ms" : yaxis.title.text, picture.data, { ...rest,
        height: 270, showlegend: bars, xaxis: { type: bars ? "category" : "linear" }, yaxis: {},
        legend: { orientation: "v", x: 1.02, y: 1, traceorder: "reversed", font: { color: "var(--text)", size: 10 } } });
    }
  };

  // A price that is a GPU's published rent follows the GPU; one that was typed stays.
  form.addEventListener("input", (event) => {
    if (event.target.name === "rate") exactRate = null;
    const price = field("price_per_gpu_hour"), now = field("gpu").value;
    if (event.target.name === "gpu" && price.value === (rents[gpu] ?? "")) price.value = rents[now] ?? "";
    gpu = now;
    soon();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  const copied = async (button, text) => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { button.textContent = "Select it and copy"; }
    setTimeout(() => { button.textContent = button.dataset.text; }, 1500);
  };
  for (const id of ["copy", "share"]) byId(id).dataset.text = byId(id).textContent;
  byId("copy").addEventListener("click", (event) => copied(event.target, byId("command").textContent));
  byId("share").addEventListener("click", (event) => copied(event.target, location.href));
  byId("pin").addEventListener("click", () => {
    const state = read();
    pins = [...pins, { text: encode(state), state, curve: [...shown.curve, shown.point].filter(Boolean) }].slice(-6);
    byId("unpin").hidden = false;
    keep(); draw();
  });
  byId("unpin").addEventListener("click", () => { pins = []; byId("unpin").hidden = true; keep(); draw(); });
  addEventListener("hashchange", arrive);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  arrive();
})();
