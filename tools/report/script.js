"use strict";
// Draws what #data holds: curves, phases and completions. All text goes in by textContent, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const WINDOWS = [1, 3, 5, 9, 17, 33, 65, 129]; // of the smoothing slider, in rows
const COLOURS = 8; // --colour-0 to --colour-7; --colour-8 is the phases' "rest"
const FEW_POINTS = 30; // so many or fewer, as of evaluations, are marked one by one and not smoothed
const MOST_BARS = 90;
const MOST_SAMPLES = 12; // of a run, at either end, when the whole run is shown
const state = { hidden: new Set(), window: 1, x: "iteration" };
const byId = (id) => document.getElementById(id);

// ---- small helpers

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function number(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// Round values from low to high, some `count` of them: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) values.push(i * step);
  return values;
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const tickLabel = (value) => (Math.abs(value) >= 1e4 ? compact.format(value) : number(Number(value.toPrecision(6))));

// Mean over the `window` points around each one, fewer at the ends, so that a curve does not lag.
function smoothed(values, window) {
  const half = (window - 1) / 2;
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

const runColour = (index) => `--own: var(--colour-${index % COLOURS})`;
const visible = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));

// ---- the tip that follows the pointer

function showTip(event, head, rows) {
  const tip = byId("tip");
  tip.replaceChildren(element("div", { class: "head" }, head));
  for (const [style, label, value] of rows) {
    const line = element("div", {}, label, element("b", {}, value));
    if (style) line.prepend(element("span", { class: "dot", style }));
    tip.append(line);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY - height / 2))}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

// ---- axes that lines and bars share

function axes(figure, height, xRange, yRange) {
  const width = Math.max(220, figure.clientWidth - 24);
  const area = { left: 46, right: width - 8, top: 8, bottom: height - 22 };
  const x = (v) => area.left + ((v - xRange[0]) / (xRange[1] - xRange[0])) * (area.right - area.left);
  const y = (v) => area.bottom - ((v - yRange[0]) / (yRange[1] - yRange[0])) * (area.bottom - area.top);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  for (const value of ticks(...yRange, 4)) {
    svg.append(shape("line", { class: "grid-line", x1: area.left, x2: area.right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, tickLabel(value)));
  }
  for (const value of ticks(...xRange, Math.max(2, Math.round(width / 90)))) {
    const anchor = x(value) > area.right - 14 ? "end" : "middle";
    svg.append(shape("text", { class: "x-label", x: x(value), y: height - 6, "text-anchor": anchor }, tickLabel(value)));
  }
  svg.append(shape("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  const toX = (event) => {
    const box = svg.getBoundingClientRect();
    const pixels = ((event.clientX - box.left) / box.width) * width;
    return xRange[0] + ((pixels - area.left) / (area.right - area.left)) * (xRange[1] - xRange[0]);
  };
  return { svg, x, y, toX, area };
}

function padded(low, high) {
  if (low === high) return [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const margin = (high - low) * 0.06;
  return [low >= 0 && low < (high - low) * 0.5 ? 0 : low - margin, high + margin];
}

// ---- curves

// The points of a metric where it was logged: x as chosen, y as logged, and the smoothed line.
function series(run, name) {
  const values = run.metrics[name] || [];
  const at = values.map((_, i) => i).filter((i) => values[i] !== null && run.x[state.x][i] !== null);
  const y = at.map((i) => values[i]);
  const window = y.length <= FEW_POINTS ? 1 : state.window;
  return { x: at.map((i) => run.x[state.x][i]), raw: y, y: smoothed(y, window), window };
}

const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("");

function drawCurves(figure, name) {
  const lines = visible()
    .map(({ run, index }) => ({ label: run.label, index, ...series(run, name) }))
    .filter((line) => line.x.length);
  figure.querySelector("svg")?.remove();
  if (!lines.length) return;
  const all = lines.flatMap((line) => line.raw);
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  const lastX = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
  const { svg, x, y, toX, area } = axes(figure, 170, [0, lastX || 1], padded(low, high));
  svg.setAttribute("aria-label", `${name}, from ${number(low)} to ${number(high)}`);
  const stale = [];
  for (const line of lines) {
    const own = { style: runColour(line.index) + (line.index >= COLOURS ? "; stroke-dasharray: 5 3" : "") };
    const xs = line.x.map(x);
    if (line.window > 1) svg.append(shape("path", { class: "curve raw", d: path(xs, line.raw.map(y)), ...own }));
    svg.append(shape("path", { class: "curve", d: path(xs, line.y.map(y)), ...own }));
    if (line.x.length <= FEW_POINTS) xs.forEach((cx, i) => svg.append(shape("circle", { cx, cy: y(line.y[i]), r: 2.6, ...own })));
  }
  svg.addEventListener("pointermove", (event) => {
    const wanted = toX(event);
    stale.splice(0).forEach((node) => node.remove());
    const rows = lines.map((line) => {
      const i = line.x.reduce((best, v, j) => (Math.abs(v - wanted) < Math.abs(line.x[best] - wanted) ? j : best), 0);
      stale.push(shape("circle", { cx: x(line.x[i]), cy: y(line.y[i]), r: 4, style: runColour(line.index) }));
      const raw = line.window > 1 ? `${number(line.y[i])} (${number(line.raw[i])})` : number(line.raw[i]);
      return { at: line.x[i], row: [runColour(line.index), line.label, raw] };
    });
    const nearest = rows.reduce((a, b) => (Math.abs(b.at - wanted) < Math.abs(a.at - wanted) ? b : a)).at;
    stale.push(shape("line", { class: "cursor", x1: x(nearest), x2: x(nearest), y1: area.top, y2: area.bottom }));
    svg.append(...stale);
    showTip(event, `${byId("x-axis").selectedOptions[0].text} ${number(nearest)}`, rows.map(({ row }) => row));
  });
  svg.addEventListener("pointerleave", () => { stale.splice(0).forEach((node) => node.remove()); hideTip(); });
  figure.append(svg);
}

function curveFigure(name) {
  const [meaning, remedy] = data.meanings[name] || ["", ""];
  const text = element("p", { class: "meaning" }, meaning.charAt(0).toUpperCase() + meaning.slice(1) + ". ");
  if (remedy) text.append(element("b", {}, "When it goes wrong: "), remedy);
  text.hidden = true;
  const button = element("button", { type: "button", title: meaning, "aria-label": `What ${name} tells` }, "?");
  button.addEventListener("click", () => { text.hidden = !text.hidden; });
  const figure = element("figure", {}, element("figcaption", {}, name), text);
  if (meaning) figure.querySelector("figcaption").append(button);
  figure.redraw = () => drawCurves(figure, name);
  return figure;
}

function buildCurves() {
  for (const { title, names, constants } of data.sections) {
    const folded = title === "Amounts"; // straight lines
    const section = element(folded ? "details" : "section", {}, element(folded ? "summary" : "h2", {}, title));
    if (folded) section.addEventListener("toggle", redraw); // what is folded has no width
    if (names.length) section.append(element("div", { class: "grid" }, ...names.map(curveFigure)));
    if (constants.length) {
      const same = constants.map(([name, value]) => element("code", {}, `${name} ${number(value)}`));
      section.append(element("p", { class: "constants" }, "Always the same: ", ...same));
    }
    byId("curves").append(section);
  }
}

// ---- phases

// Rows are joined into at most MOST_BARS bars; a bar holds the mean seconds of each phase.
function bars(run) {
  const rows = run.phases.iteration.length;
  const perBar = Math.max(1, Math.ceil(rows / MOST_BARS));
  const result = [];
  for (let start = 0; start < rows; start += perBar) {
    const end = Math.min(rows, start + perBar);
    const mean = (values) => values.slice(start, end).reduce((a, b) => a + b, 0) / (end - start);
    const seconds = Object.fromEntries(Object.entries(run.phases.seconds).map(([name, v]) => [name, mean(v)]));
    result.push({ first: run.phases.iteration[start], last: run.phases.iteration[end - 1], seconds });
  }
  return result;
}

const phaseColour = (name) => `--own: var(--colour-${name === "rest" ? 8 : data.phases.indexOf(name) % COLOURS})`;

function drawPhases(figure, run) {
  const list = bars(run);
  const total = (bar) => Object.values(bar.seconds).reduce((a, b) => a + b, 0);
  figure.querySelector("svg")?.remove();
  const high = Math.max(...visible().flatMap((other) => bars(other.run).map(total))); // one scale, to compare by eye
  const { svg, x, y } = axes(figure, 210, [0, list.length], [0, (high || 1) * 1.04]);
  svg.setAttribute("aria-label", `Seconds by phase of ${run.label}`);
  // The axis counts bars; what it shows are the updates at which they begin.
  for (const label of svg.querySelectorAll(".x-label")) label.remove();
  list.forEach((bar, i) => {
    if (i % Math.max(1, Math.ceil(list.length / 6)) === 0) {
      svg.append(shape("text", { x: x(i + 0.5), y: 204, "text-anchor": "middle" }, tickLabel(bar.first)));
    }
    let below = 0;
    const group = shape("g");
    for (const [name, seconds] of Object.entries(bar.seconds)) {
      const box = { x: x(i + 0.06), y: y(below + seconds), width: x(0.88) - x(0), height: y(below) - y(below + seconds) };
      group.append(shape("rect", { class: "bar", style: phaseColour(name), ...box }));
      below += seconds;
    }
    const head = bar.first === bar.last ? `update ${bar.first}` : `updates ${bar.first} to ${bar.last}, mean`;
    const rows = Object.entries(bar.seconds).reverse().filter(([, seconds]) => seconds > 0);
    const lines = rows.map(([name, seconds]) => [phaseColour(name), name, `${number(seconds)} s`]);
    group.addEventListener("pointermove", (event) => showTip(event, `${head}: ${number(below)} s`, lines));
    group.addEventListener("pointerleave", hideTip);
    svg.append(group);
  });
  figure.append(svg);
}

function buildPhases() {
  byId("phases").replaceChildren();
  for (const { run } of visible()) {
    if (!run.phases.iteration.length) continue;
    const sums = Object.entries(run.phases.seconds).map(([name, v]) => [name, v.reduce((a, b) => a + b, 0)]);
    const all = sums.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const shares = sums.sort((a, b) => b[1] - a[1]).map(([name, seconds]) => element(
      "span", {}, element("span", { class: "dot", style: phaseColour(name) }), name,
      element("b", {}, `${((100 * seconds) / all).toFixed(seconds / all < 0.1 ? 1 : 0)}%`),
    ));
    const caption = element("figcaption", {}, run.label);
    const figure = element("figure", {}, caption, element("div", { class: "shares" }, ...shares));
    figure.redraw = () => drawPhases(figure, run);
    byId("phases").append(figure);
  }
}

// ---- completions

const LEAST_LOG_PROB = -4; // where the colour of unlikely tokens is at its full strength
const mixed = (colour, share) => `background: color-mix(in srgb, var(--${colour}) ${Math.round(share)}%, transparent)`;

const sampledHere = (sample, i) => !sample.response_mask || sample.response_mask[i] === 1;
const advantageOf = (sample, i) => (sample.token_advantages ? sample.token_advantages[i] : sample.advantage);

function tokenStyle(sample, i, largest) {
  const advantage = advantageOf(sample, i);
  const logProb = sample.log_probs[i];
  if (!sampledHere(sample, i)) return "";
  if (byId("colour").value === "advantage" && advantage) {
    return mixed(advantage > 0 ? "good" : "bad", 8 + (52 * Math.abs(advantage)) / largest);
  }
  if (byId("colour").value === "probability" && logProb !== null) {
    return mixed("surprise", 70 * Math.min(1, logProb / LEAST_LOG_PROB));
  }
  return "";
}

function sampleCard(sample, largest) {
  const tone = sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "line";
  const tokens = element("div", { class: "tokens" });
  let part = tokens; // of an episode: a turn of the policy, or what the environment said, which is folded
  let turns = 0;
  sample.tokens.forEach((text, i) => {
    if (sample.response_mask && (i === 0 || sample.response_mask[i] !== sample.response_mask[i - 1])) {
      part = sampledHere(sample, i) ? element("div", {}, element("b", { class: "turn" }, `turn ${++turns}`))
        : element("details", {}, element("summary", {}, "environment"));
      tokens.append(part);
    }
    const token = element("span", { style: tokenStyle(sample, i, largest) }, text);
    if (/^<.+>$/s.test(text.trim())) token.className = "special";
    token.addEventListener("pointermove", (event) => {
      const advantage = advantageOf(sample, i);
      const logProb = sample.log_probs[i];
      const rows = sampledHere(sample, i) ? [["", "advantage", advantage === null ? "none" : number(advantage)]] : [];
      if (logProb !== null) {
        rows.unshift(["", "probability", number(Math.exp(logProb))], ["", "log-probability", number(logProb)]);
      }
      showTip(event, `token ${i + 1}: ${JSON.stringify(text)}`, rows);
    });
    token.addEventListener("pointerleave", hideTip);
    part.append(token);
  });
  const fact = (label, value) => element("span", {}, label + " ", element("b", {}, value));
  const rewards = Object.entries(sample.rewards).map(([name, r]) => fact(name, r === null ? "not scored" : number(r)));
  const facts = element("div", { class: "facts" }, fact("advantage", number(sample.advantage)), ...rewards,
    element("span", {}, `${sample.length} tokens, ${sample.finish_reason}`),
    element("span", {}, `update ${sample.iteration}, row ${sample.row}, ${sample.picked}`));
  const card = element("article", { class: "sample", style: `--own: var(--${tone})` }, facts,
    element("div", { class: "tokens prompt" }, sample.prompt), tokens);
  if (sample.tokens.length < sample.length) {
    const more = `… ${sample.length - sample.tokens.length} more tokens: the whole text`;
    card.append(element("details", {}, element("summary", {}, more), element("div", { class: "tokens" }, sample.completion)));
  }
  return card;
}

// What is shown of a run: one rollout, or the two ends of all that were logged.
function chosenSamples(run, iteration) {
  const order = byId("order").value;
  const whole = byId("whole-run").checked;
  let samples = run.completions.filter((sample) => whole || sample.iteration === iteration);
  const reward = (sample) => Object.values(sample.rewards).reduce((sum, value) => sum + (value || 0), 0);
  const better = (a, b) => b.advantage - a.advantage || reward(b) - reward(a);
  if (whole || order !== "logged") samples = [...samples].sort(better);
  if (whole && samples.length > 2 * MOST_SAMPLES) {
    samples = [...samples.slice(0, MOST_SAMPLES), ...samples.slice(-MOST_SAMPLES)];
  }
  return order === "worst" ? samples.reverse() : samples;
}

function buildCompletions() {
  const slider = byId("rollout");
  const iteration = data.rollouts[slider.value];
  const whole = byId("whole-run").checked;
  slider.disabled = whole || data.rollouts.length < 2;
  byId("rollout-value").textContent = iteration === undefined ? "none logged" : whole ? "all" : `of update ${iteration}`;
  const shown = visible().map(({ run, index }) => ({ run, index, samples: chosenSamples(run, iteration) }));
  const sizes = shown.flatMap(({ samples }) => samples).flatMap((s) => s.token_advantages || [s.advantage]).map(Math.abs);
  const largest = sizes.reduce((a, b) => Math.max(a, b), 1e-9);
  byId("completions").replaceChildren(...shown.map(({ run, index, samples }) => {
    const head = element("h3", {}, element("span", { class: "dot", style: runColour(index) }), run.label);
    const cards = samples.map((sample) => sampleCard(sample, largest));
    const none = element("p", { class: "note" }, "No completions were logged here.");
    if (data.runs.length === 1) head.hidden = true;
    return element("div", {}, head, element("div", { class: "samples" }, ...(cards.length ? cards : [none])));
  }));
  const scales = {
    probability: ["certain", "linear-gradient(to right, transparent, color-mix(in srgb, var(--surprise) 70%, transparent))",
      `p ≤ ${Math.exp(LEAST_LOG_PROB).toFixed(2)}`],
    advantage: [number(-largest), "linear-gradient(to right, var(--bad), transparent, var(--good))", number(largest)],
  };
  const [low, gradient, high] = scales[byId("colour").value] || ["", "", ""];
  byId("scale").replaceChildren(...(gradient ? [low, element("i", { style: `background: ${gradient}` }), high] : []));
}

// ---- controls

function redraw() {
  for (const figure of document.querySelectorAll("figure")) figure.redraw();
}

function rebuild() {
  buildPhases();
  buildCompletions();
  redraw();
}

function buildLegend() {
  if (data.runs.length === 1) return;
  data.runs.forEach((run, index) => {
    const dot = element("span", { class: "dot", style: runColour(index) });
    const button = element("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, dot, run.label);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      rebuild();
    });
    byId("legend").append(button);
  });
}

function setTheme() {
  const wanted = location.hash.slice(1);
  document.documentElement.style.colorScheme = ["light", "dark"].includes(wanted) ? wanted : "";
}

byId("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? location.hash !== "#light" : location.hash === "#dark";
  location.hash = dark ? "light" : "dark";
});
addEventListener("hashchange", setTheme);
byId("smooth").addEventListener("input", (event) => {
  state.window = WINDOWS[event.target.value];
  byId("smooth-value").textContent = state.window;
  redraw();
});
byId("x-axis").addEventListener("change", (event) => { state.x = event.target.value; redraw(); });
for (const id of ["rollout", "whole-run", "order", "colour"]) byId(id).addEventListener("input", buildCompletions);
for (const search of document.querySelectorAll("input[type=search]")) {
  search.addEventListener("input", () => {
    for (const row of search.parentElement.querySelectorAll("tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase());
    }
    if (search.value) search.parentElement.querySelector("details").open = true;
  });
}
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; redraw(); } });

setTheme();
buildLegend();
buildCurves();
byId("rollout").max = Math.max(0, data.rollouts.length - 1);
byId("rollout").value = byId("rollout").max;
if (Math.max(...data.runs.map((run) => run.x.iteration.length)) > 60) { // many rows: noise hides what happens
  byId("smooth").value = 2;
  byId("smooth").dispatchEvent(new Event("input"));
}
rebuild();
