// Curves and phases, drawn by uPlot. All text goes in by textContent, never as HTML.
// Shared by the scripts: helpers, the tip, and the state of the display.

const COLOURS = 8; // --colour-0 to --colour-7; --colour-8 is the phases' "rest"
const FEW_POINTS = 30; // up to this many points, as of evaluations, are marked and not smoothed
const MOST_BARS = 90;
const STEPS = Array.from({ length: 19 }, (_, i) => i - 6).flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`))); // between ticks
const WHOLE_STEPS = STEPS.filter((step) => step >= 1); // there is no update 2.5
const PHASES = ["rollout", "update", "scoring", "logprobs", "sync", "offload", "eval", "save"]; // from the bottom up
const state = { hidden: new Set(), zoom: null };
const runs = []; // {label, x, metrics: Map, completions, held_out, status, findings, ...}: script.js fills it
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function button(text, action, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", action);
  return node;
}

function number(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const tickLabel = (value) => (value === null ? "" : Math.abs(value) >= 1e4 ? compact.format(value) : number(Number(value.toPrecision(6))));
const runColour = (index) => `--own: var(--colour-${index % COLOURS})`;
const visible = () => runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));
const dot = (style) => element("span", { class: "dot", style });

// A colour of the style sheet as the canvas needs it, for the theme in use.
const resolved = new Map();
function paint(name, alpha = 1) {
  if (!resolved.has(name)) {
    const probe = element("span", { style: `color: var(--${name})` });
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

function showTip(event, head, rows) {
  const tip = byId("tip");
  tip.replaceChildren(element("div", { class: "head" }, head));
  for (const [style, label, value] of rows) {
    const line = element("div", {}, label, element("b", {}, value));
    if (style) line.prepend(dot(style));
    tip.append(line);
  }
  (document.querySelector("dialog[open]") || document.body).append(tip); // above a dialog
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY - height / 2))}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

// Index of the value nearest to `wanted` in an ascending list.
function nearest(list, wanted) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(list[high] - wanted) < Math.abs(list[low] - wanted) ? high : low;
}

// ---- series

// The points of a metric where it was logged, and the mean over the window around each; a curve does not lag.
function series(run, name) {
  const key = `${name} ${byId("x-axis").value} ${byId("smooth").value} ${run.x.iteration.length}`;
  if (run.cache.get(name)?.key === key) return run.cache.get(name);
  const values = run.metrics.get(name) || [], all = run.x[byId("x-axis").value];
  const x = [], raw = [];
  for (let i = 0; i < values.length; i++) if (values[i] !== null && all[i] !== null) { x.push(all[i]); raw.push(values[i]); }
  const wanted = byId("smooth").value;
  const window = raw.length <= FEW_POINTS ? 1 : wanted === "auto" ? 2 * Math.floor(raw.length / 60) + 1 : Number(wanted);
  const half = (window - 1) / 2, sums = [0];
  for (const value of raw) sums.push(sums[sums.length - 1] + value);
  const y = window === 1 ? raw : raw.map((_, i) => {
    const from = Math.max(0, i - half), to = Math.min(raw.length, i + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
  const found = { key, x, raw, y, window };
  run.cache.set(name, found);
  return found;
}

// uPlot's columns of several lines within [low, high]: x, and of each line the least and the largest value and the
// smoothed one. Where points are more than pixels, a column is a bin of them.
function columns(lines, [low, high], bins) {
  const parts = lines.map((line) => ({ line, from: Math.max(0, nearest(line.x, low) - 1), to: Math.min(line.x.length, nearest(line.x, high) + 2) }));
  const points = parts.reduce((sum, { from, to }) => Math.max(sum, to - from), 0);
  const width = (high - low) / bins || 1;
  const place = points <= bins ? (v) => v : (v) => low + (Math.floor((v - low) / width) + 0.5) * width;
  const xs = new Set();
  for (const { line, from, to } of parts) for (let i = from; i < to; i++) xs.add(place(line.x[i]));
  const x = [...xs].sort((a, b) => a - b), index = new Map(x.map((v, i) => [v, i]));
  const found = [x];
  for (const { line, from, to } of parts) {
    const least = new Array(x.length).fill(null), most = [...least], sum = new Array(x.length).fill(0), count = [...sum];
    for (let i = from; i < to; i++) {
      const at = index.get(place(line.x[i])), value = line.raw[i];
      if (least[at] === null || value < least[at]) least[at] = value;
      if (most[at] === null || value > most[at]) most[at] = value;
      sum[at] += line.y[i];
      count[at]++;
    }
    found.push(least, most, sum.map((value, at) => (count[at] ? value / count[at] : null)));
  }
  return found;
}

// Low and high of the y axis. Without outliers: from the 1st to the 99th percentile, if all values need three
// times as much.
function yRange(lines, [low, high], kind) {
  const found = [];
  for (const { x, raw } of lines) for (let i = 0; i < x.length; i++) if (x[i] >= low && x[i] <= high && (kind !== "log" || raw[i] > 0)) found.push(raw[i]);
  if (!found.length) return kind === "log" ? [0.1, 1] : [0, 1];
  const values = Float64Array.from(found).sort(); // by number
  let least = values[0], most = values[values.length - 1];
  if (kind === "log") return least === most ? [least / 2, most * 2] : [least / 1.1, most * 1.1];
  if (kind === "robust" && values.length >= 20) {
    const from = values[Math.floor(values.length / 100)], to = values[Math.ceil((values.length - 1) * 0.99)];
    if (from < to && most - least > 3 * (to - from)) [least, most] = [from, to];
  }
  if (least === most) return [least - (Math.abs(least) || 1) * 0.5, most + (Math.abs(most) || 1) * 0.5];
  const margin = (most - least) * 0.06;
  return [least >= 0 && least < (most - least) * 0.5 ? 0 : least - margin, most + margin];
}

// ---- panels

const panels = new Set();
const watched = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.panel.seen = isIntersecting;
    if (isIntersecting) target.panel.redraw();
  }
}, { rootMargin: "250px" });

const cursorHead = (at) => {
  const axis = byId("x-axis");
  return `${axis.selectedOptions[0].text} ${number(Math.max(0, axis.value === "minutes" ? Math.round(at * 100) / 100 : Math.round(at)))}`;
};

// A chart in `figure` that is drawn when it is seen. `content(width)` returns uPlot's data, series, bands, the ranges and
// the kind; `rows(x)` the lines of the tip, `head(x)` its heading, `tick(x)` a label of the x axis. `synced`: it has the
// cursor and the zoom of all others.
class Panel {
  constructor(figure, height, content, rows, head = cursorHead, tick = tickLabel, synced = true) {
    Object.assign(this, { figure, height, content, rows, head, tick, synced, seen: false, plot: null, key: "" });
    figure.panel = this;
    panels.add(this);
    watched.observe(figure);
  }

  redraw() {
    if (!this.seen) return;
    const width = Math.max(220, this.figure.clientWidth - 24);
    const { data, series, bands, y, x, kind } = this.content(width);
    this.ranges = { x, y };
    const key = JSON.stringify([width, this.height(), series.map((one) => [one.id, String(one.stroke)]), kind, paint("line")]);
    if (this.plot && key === this.key) { this.plot.setData(data); return; }
    this.plot?.destroy();
    this.key = key;
    const axis = { stroke: paint("muted"), font: "11px system-ui, sans-serif", grid: { stroke: paint("grid"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width, height: this.height(), series: [{}, ...series], bands, legend: { show: false }, padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: () => this.ranges.x }, y: { range: () => this.ranges.y, distr: kind === "log" ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, splits) => splits.map(this.tick), size: 26, gap: 6, incrs: () => (this.synced && byId("x-axis").value === "minutes" ? STEPS : WHOLE_STEPS) },
        { ...axis, values: (_, splits) => splits.map(tickLabel), size: 48, gap: 3, space: 32 },
      ],
      cursor: {
        y: false, points: { show: false }, drag: { setScale: false, x: this.synced },
        sync: !this.synced ? undefined : { key: "all", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { setZoom(null); return null; } },
      },
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((v) => plot.posToVal(v, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          setZoom(ends);
        }],
        setCursor: [(plot) => this.readOut(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
      },
    }, data, this.figure);
    this.plot.over.addEventListener("pointermove", (event) => {
      const at = this.plot.posToVal(event.offsetX, "x");
      showTip(event, this.head(at), this.rows(at));
    });
    this.plot.over.addEventListener("pointerleave", hideTip);
  }

  // The values at the cursor, which all panels share, in the heading.
  readOut(at) {
    const place = this.figure.querySelector(".read-out");
    if (place) place.replaceChildren(...(at === null ? [] : this.rows(at).slice(0, 4).map(([style, , value]) => element("span", { style }, value))));
  }

  close() {
    this.plot?.destroy();
    panels.delete(this);
    watched.unobserve(this.figure);
  }
}

const redraw = () => { for (const panel of panels) panel.redraw(); };

function setZoom(ends) {
  state.zoom = ends;
  byId("zoom").hidden = !ends;
  saveState();
  redraw();
}

// ---- curves

const linesOf = (name) => visible().map(({ run, index }) => ({ label: run.label, index, ...series(run, name) })).filter(({ x }) => x.length);

function curves(name, width) {
  const lines = linesOf(name);
  let last = 0;
  for (const { run } of visible()) last = Math.max(last, run.x[byId("x-axis").value].at(-1) || 0);
  const x = state.zoom || [0, last || 1];
  let kind = byId("y-axis").value;
  if (kind === "log" && !lines.some((line) => line.raw.some((value) => value > 0))) kind = "full";
  const data = columns(lines, x, Math.max(50, width - 60));
  if (kind === "log") for (let i = 1; i < data.length; i++) data[i] = data[i].map((value) => (value > 0 ? value : null));
  const series = [], bands = [];
  for (const line of lines) {
    const colour = `colour-${line.index % COLOURS}`, dash = line.index >= COLOURS ? [5, 3] : undefined;
    const binned = line.x.length > data[0].length; // then the band between least and largest is enough
    const faint = { stroke: paint(colour, binned ? 0 : 0.35), width: 1, spanGaps: true, points: { show: false } };
    const pixels = ((line.x.at(-1) - line.x[0]) / (x[1] - x[0])) * width;
    const few = line.x.length <= FEW_POINTS && pixels >= 9 * (line.x.length - 1); // or the marks touch
    bands.push({ series: [series.length + 2, series.length + 1], fill: paint(colour, 0.16) });
    series.push({ id: line.index, ...faint }, { id: line.index, ...faint });
    series.push({ id: `${line.index}${few}`, stroke: paint(colour), width: 2, dash, spanGaps: true, points: { show: few, size: 5, fill: paint(colour) } });
  }
  return { data, series, bands, x, y: yRange(lines, x, kind), kind };
}

// What the runs have at x; a run that has ended before says so.
function curveRows(name, at) {
  return linesOf(name).map((line) => {
    const end = line.x.at(-1), step = line.x.length > 1 ? (end - line.x[0]) / (line.x.length - 1) : 1;
    if (at > end + step) return [runColour(line.index), line.label, `ended at ${number(end)}`];
    const i = nearest(line.x, at);
    const text = line.window > 1 ? `${number(line.y[i])} (${number(line.raw[i])})` : number(line.raw[i]);
    return [runColour(line.index), line.label, text];
  });
}

function curveFigure([name, , meaning, remedy], height = () => 170) {
  const text = element("p", { class: "meaning" }, meaning.charAt(0).toUpperCase() + meaning.slice(1) + ". ");
  if (remedy) text.append(element("b", {}, "When it goes wrong: "), remedy);
  text.hidden = true;
  const caption = element("figcaption", {}, element("span", { class: "name" }, name), element("span", { class: "read-out" }));
  if (meaning) caption.append(button("?", () => { text.hidden = !text.hidden; }, { title: meaning, "aria-label": `What ${name} tells` }));
  const figure = element("figure", {}, caption, text);
  figure.dataset.metric = name;
  figure.close = () => figure.panel.close();
  new Panel(figure, height, (width) => curves(name, width), (at) => curveRows(name, at));
  return figure;
}

function enlarge(row) {
  const [name] = row, dialog = byId("enlarged");
  const figure = curveFigure(row, () => Math.max(240, innerHeight * 0.6));
  figure.querySelector(".meaning").hidden = false;
  const close = () => dialog.close();
  figure.querySelector("figcaption").append(
    button("PNG", () => savePng(figure, name)), button("CSV", () => saveCsv(name)), button("✕", close, { "aria-label": "Close" }));
  dialog.replaceChildren(figure);
  dialog.onclose = () => { hideTip(); document.body.append(byId("tip")); figure.close(); };
  dialog.showModal();
}

function save(name, blob) {
  const link = element("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (name, ending) => `${name.replace(/[^\w.-]+/g, "_")}.${ending}`;

function savePng(figure, name) {
  const source = figure.panel.plot.ctx.canvas, room = 34 * devicePixelRatio;
  const canvas = element("canvas", { width: source.width, height: source.height + room }), pen = canvas.getContext("2d");
  pen.fillStyle = paint("panel");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, room);
  pen.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
  let x = 12 * devicePixelRatio;
  for (const [text, colour] of [[name, "text"], ...linesOf(name).map(({ label, index }) => [label, `colour-${index % COLOURS}`])]) {
    pen.fillStyle = paint(colour);
    pen.fillText(text, x, 22 * devicePixelRatio);
    x += pen.measureText(text).width + 16 * devicePixelRatio;
  }
  canvas.toBlob((blob) => save(fileName(name, "png"), blob));
}

function saveCsv(name) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const rows = ["run,update,tokens,minutes," + quoted(name)];
  for (const { run } of visible()) {
    (run.metrics.get(name) || []).forEach((value, i) => {
      if (value !== null) rows.push([quoted(run.label), run.x.iteration[i], run.x.tokens[i], run.x.minutes[i], value].join(","));
    });
  }
  save(fileName(name, "csv"), new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
}

// Sections by heading: metrics with a curve, and those with one value in all runs. Built anew when one becomes the other.
let layout = "";
function buildCurves() {
  const guide = new Map(runs.flatMap((run) => [...run.guide]));
  const sections = new Map(titles.map((title) => [title, { drawn: [], same: [] }]));
  for (const row of guide.values()) {
    const values = runs.flatMap((run) => run.metrics.get(row[0]) || []);
    const first = values.find((value) => value !== null);
    if (first === undefined) continue;
    const varies = values.some((value) => value !== null && value !== first);
    sections.get(row[1])[varies ? "drawn" : "same"].push(varies ? row : [row[0], first]);
  }
  const wanted = JSON.stringify([...sections]);
  if (wanted === layout) return;
  layout = wanted;
  for (const figure of byId("curves").querySelectorAll("figure")) figure.close();
  const open = new Set([...byId("curves").querySelectorAll("details[open]")].map(({ id }) => id));
  byId("curves").replaceChildren(...[...sections].filter(([, { drawn, same }]) => drawn.length || same.length).map(([title, { drawn, same }]) => {
    const folded = title === "Amounts"; // straight lines
    const section = element(folded ? "details" : "section", { id: `section-${title}` }, element(folded ? "summary" : "h2", {}, title));
    section.open = open.has(section.id);
    const figures = drawn.map((row) => {
      const figure = curveFigure(row);
      figure.querySelector("figcaption").append(button("⤢", () => enlarge(row), { title: "Enlarge, PNG, CSV", "aria-label": `Enlarge ${row[0]}` }));
      return figure;
    });
    if (figures.length) section.append(element("div", { class: "grid" }, ...figures));
    if (same.length) {
      const values = same.map(([name, value]) => element("code", {}, `${name} ${number(value)}`));
      section.append(element("p", { class: "constants" }, "Always the same: ", ...values));
    }
    return section;
  }));
}

// ---- phases

// The seconds of each phase from the bottom up; what is in no phase is "rest". Rows are joined into at most MOST_BARS bars.
function bars(run) {
  const steps = run.metrics.get("time/step") || [];
  const rows = steps.map((_, i) => i).filter((i) => steps[i] !== null && run.x.iteration[i] > 0);
  const others = [...run.metrics.keys()].filter((name) => name.startsWith("time/")).map((name) => name.slice(5));
  const names = [...PHASES, ...others.filter((name) => name !== "step" && !PHASES.includes(name)).sort()].filter((name) => others.includes(name));
  const perBar = Math.max(1, Math.ceil(rows.length / MOST_BARS));
  const list = [];
  for (let start = 0; start < rows.length; start += perBar) {
    const part = rows.slice(start, start + perBar);
    const mean = (values) => part.reduce((sum, i) => sum + (values[i] || 0), 0) / part.length;
    const seconds = names.map((name) => [name, mean(run.metrics.get(`time/${name}`))]);
    const step = mean(steps);
    seconds.push(["rest", Math.max(0, step - seconds.reduce((sum, [, value]) => sum + value, 0))]);
    list.push({ first: run.x.iteration[part[0]], last: run.x.iteration[part.at(-1)], rows: part.length, seconds });
  }
  return { names: [...names, "rest"], list };
}

const phaseNumber = (names, name) => (name === "rest" ? 8 : (PHASES.includes(name) ? PHASES.indexOf(name) : names.indexOf(name)) % COLOURS);

function drawPhases(run) {
  const { names, list } = bars(run);
  const sums = list.map(({ seconds }) => { let sum = 0; return seconds.map(([, value]) => (sum += value)); });
  const totals = visible().flatMap((other) => bars(other.run).list.map(({ seconds }) => seconds.reduce((sum, [, value]) => sum + value, 0))).sort((a, b) => a - b);
  const usual = totals[Math.floor((totals.length - 1) * 0.95)], most = totals.at(-1) || 1; // one scale, to compare by eye
  const data = [list.map((_, i) => i), ...names.map((_, k) => sums.map((sum) => sum[k])).reverse()];
  const series = names.map((name, k) => {
    const colour = paint(`colour-${phaseNumber(names, name)}`);
    return { id: `${name}${k}`, stroke: colour, fill: colour, width: 0, paths: uPlot.paths.bars({ size: [0.88, 60] }), points: { show: false } };
  }).reverse();
  return { data, series, bands: [], x: [-0.5, (list.length || 1) - 0.5], y: [0, (byId("y-axis").value === "robust" && most > 3 * usual ? 1.5 * usual : most) * 1.04], kind: "bars" };
}

function buildPhases() {
  for (const figure of byId("phases").children) figure.panel.close();
  byId("phases").replaceChildren(...visible().filter(({ run }) => bars(run).list.length).map(({ run }) => {
    const figure = element("figure", {}, element("figcaption", {}, run.label), element("div", { class: "shares" }));
    const barAt = (at) => { const { list } = bars(run); return list[Math.max(0, Math.min(list.length - 1, Math.round(at)))]; };
    const rows = (at) => {
      const { names } = bars(run), bar = barAt(at);
      return [...bar.seconds].reverse().filter(([, value]) => value > 0).map(([name, value]) => [`--own: var(--colour-${phaseNumber(names, name)})`, name, `${number(value)} s`]);
    };
    new Panel(figure, () => 210, () => {
      const { names, list } = bars(run), sums = new Map(names.map((name) => [name, 0]));
      for (const { seconds, rows } of list) for (const [name, value] of seconds) sums.set(name, sums.get(name) + value * rows);
      const all = [...sums.values()].reduce((a, b) => a + b, 0) || 1;
      figure.querySelector(".shares").replaceChildren(...[...sums].sort((a, b) => b[1] - a[1]).map(([name, value]) => element(
        "span", {}, dot(`--own: var(--colour-${phaseNumber(names, name)})`), name,
        element("b", {}, `${((100 * value) / all).toFixed(value / all < 0.1 ? 1 : 0)}%`))));
      return drawPhases(run);
    }, rows, (at) => {
      const { first, last } = barAt(at);
      return first === last ? `update ${first}` : `updates ${first} to ${last}, mean`;
    }, (at) => (at >= 0 && at < bars(run).list.length ? tickLabel(barAt(at).first) : ""), false);
    return figure;
  }));
}
