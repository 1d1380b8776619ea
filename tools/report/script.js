// The page: takes what #data holds, and of a live page what its server adds; controls, and their state in the address.

const content = JSON.parse(byId("data").textContent);
const { live, titles } = content;
const SETTINGS = ["smooth", "y-axis", "x-axis", "table", "mode", "order", "colour", "prompt", ...FILTERS]; // in the address
const limits = { kept: 1e8 }; // characters of completions and their images in a live page
const EVERY = 1000; // ms between two questions of a live page

// Drop the completions that came first, with their images: a live page stays open for days, and its server has them.
const size = ({ prompt, completion, images = [] }) => 15000 + prompt.length + completion.length + images.reduce((sum, { length }) => sum + length, 0);
function forget(samples) {
  let all = 0;
  for (const sample of samples.values()) all += size(sample);
  for (const [id, sample] of samples) {
    if (all <= limits.kept) return;
    all -= size(sample);
    samples.delete(id);
    fetched.clear();
  }
}

// Add what a part of a run tells to the run. Names are keys of maps only: one may be "__proto__".
function take(index, part) {
  if (part.whole) {
    const table = () => ({ iterations: [], samples: new Map(), prompts: [] });
    runs[index] = { x: { iteration: [], tokens: [], minutes: [] }, metrics: new Map(), guide: new Map(), cache: new Map(), completions: table(), held_out: table() };
  }
  const run = runs[index], before = run.x.iteration.length, added = part.x.iteration.length;
  Object.assign(run, { label: part.label, total: part.total, status: part.status, damaged: part.damaged, cursor: part.cursor });
  if (part.findings) run.findings = part.findings;
  for (const name of ["iteration", "tokens", "minutes"]) run.x[name].push(...part.x[name]);
  for (const row of part.guide) if (!run.guide.has(row[0])) run.guide.set(row[0], row);
  const values = new Map(Object.entries(part.metrics));
  for (const name of values.keys()) if (!run.metrics.has(name)) run.metrics.set(name, new Array(before).fill(null));
  for (const [name, column] of run.metrics) column.push(...(values.get(name) || new Array(added).fill(null)));
  let samples = 0;
  for (const name of ["completions", "held_out"]) {
    const { iterations, prompts } = run[name];
    for (const at of part[name].iterations) if (at !== iterations.at(-1)) iterations.push(at);
    for (const prompt of part[name].prompts) if (!prompts.some(([file, row]) => file === prompt[0] && row === prompt[1])) prompts.push(prompt);
    for (const sample of part[name].samples) run[name].samples.set(sample.id, sample);
    if (live && part[name].samples.length) forget(run[name].samples);
    samples += part[name].iterations.length;
  }
  return { rows: added, samples };
}

// ---- what each run came to

function ends(run, name, share) {
  const values = (run.metrics.get(name) || []).filter((value) => value !== null);
  if (!values.length) return null;
  const count = Math.max(1, Math.round(values.length * share));
  const mean = (part) => part.reduce((a, b) => a + b, 0) / part.length;
  return { first: mean(values.slice(0, count)), last: mean(values.slice(-count)), best: Math.max(...values), values };
}

const FIGURES = [["Training reward", "reward/mean", 0.1], ["Held-out greedy", "eval/greedy_accuracy", 0], ["Held-out sampled", "eval/sampled_accuracy", 0],
  ["Entropy, nats", "entropy", 0.1], ["Length, tokens", "completion/length_mean", 0.1]];
const short = (value) => number(Number(value.toPrecision(3)));
const duration = (minutes) => (minutes < 2 ? `${Math.round(60 * minutes)} s` : minutes < 120 ? `${Math.round(minutes)} min` : `${(minutes / 60).toFixed(1)} h`);

function buildCards() {
  byId("cards").replaceChildren(...runs.map((run, index) => {
    const figures = FIGURES.map(([label, name, share]) => [label, ends(run, name, share)]).filter(([, found]) => found);
    const terms = figures.map(([label, { first, last }]) => [label, `${short(first)} → ${short(last)}`]);
    const rates = ends(run, "perf/tokens_per_second", 0)?.values.toSorted((a, b) => a - b);
    if (rates) terms.push(["Tokens per second", Math.round(rates[rates.length >> 1]).toLocaleString("en")]);
    const gap = ends(run, "mismatch/mean_abs", 0);
    if (gap) terms.push(["Largest engine gap", gap.best.toExponential(1)]);
    const state = element("p", { class: `status ${run.status.state}` }, element("i"), run.status.text);
    const spent = run.x.minutes.at(-1);
    if (spent) state.append(` · ${duration(spent)}`);
    const bad = run.damaged.length ? [element("p", { class: "status silent" }, `left out: ${run.damaged[0]}${run.damaged.length > 1 ? ` and ${run.damaged.length - 1} more` : ""}`)] : [];
    return element("article", { class: "card", style: runColour(index) }, element("h3", {}, run.label), state, ...bad,
      element("dl", {}, ...terms.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  }));
}

function buildFindings() {
  const all = runs.flatMap((run, index) => (run.findings || []).map((finding) => ({ ...finding, run, index }))).sort((a, b) => a.update - b.update);
  if (!all.length) { byId("findings").replaceChildren(); return; }
  const lines = all.map(({ update, metric, text, cure, run, index }) => {
    const name = button(metric, () => {
      const figure = [...document.querySelectorAll("figure")].find((one) => one.dataset.metric === metric);
      if (figure?.closest("details")) figure.closest("details").open = true;
      figure?.scrollIntoView({ block: "center" });
    }, { title: "Show the curve" });
    const head = element("summary", {}, ...(runs.length > 1 ? [dot(runColour(index))] : []), element("span", { class: "since" }, `since update ${update}`), name, ` ${text}`);
    if (runs.length > 1) head.title = run.label;
    return element("details", {}, head, element("p", {}, cure));
  });
  const open = new Set([...byId("findings").querySelectorAll("details")].map((node, i) => (node.open ? i : -1)));
  byId("findings").replaceChildren(element("h2", {}, "What went wrong, first"), ...lines);
  lines.forEach((line, i) => { line.open = open.has(i) || (!i && !open.size); });
}

const ordering = { column: 0, down: false };
function buildComparison() {
  if (runs.length < 2) return;
  const metrics = FIGURES.slice(0, 3).filter(([, name]) => runs.some((run) => run.metrics.has(name)));
  const differing = [...document.querySelectorAll("tr.differs")].filter((row) => row.closest("section")?.querySelector("h2")?.textContent === "Configuration").slice(0, 12);
  const heads = ["run", "state", "updates", "time", ...metrics.flatMap(([label]) => [`${label}, end`, "best"]), "reward", ...differing.map((row) => row.querySelector("th").textContent)];
  const rows = runs.map((run, index) => {
    const cells = [[run.label], [run.status.state], [run.x.iteration.at(-1) ?? 0], [run.x.minutes.at(-1) ?? 0, duration(run.x.minutes.at(-1) ?? 0)]];
    for (const [, name, share] of metrics) {
      const found = ends(run, name, share);
      cells.push(...(found ? [[found.last, short(found.last)], [found.best, short(found.best)]] : [[-Infinity, "–"], [-Infinity, "–"]]));
    }
    const curve = series(run, "reward/mean");
    const every = Math.max(1, Math.floor(curve.x.length / 100));
    const points = curve.x.map((x, i) => [x, curve.y[i]]).filter((_, i) => i % every === 0);
    cells.push([ends(run, "reward/mean", 0.1)?.last ?? -Infinity, points.length ? sparkline(points, runColour(index)) : "–"]);
    for (const row of differing) cells.push([row.children[index + 1].textContent]);
    return { index, cells };
  });
  const { column, down } = ordering;
  const value = (cells) => { const text = cells[column][0]; return typeof text === "string" && text !== "" && !isNaN(text) ? Number(text) : text; };
  rows.sort((a, b) => { const [x, y] = [value(a.cells), value(b.cells)]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
  const head = element("tr", {}, ...heads.map((text, i) => element("th", { "aria-sort": i === column ? (down ? "descending" : "ascending") : "none" },
    button(text, () => { Object.assign(ordering, { down: ordering.column === i ? !ordering.down : i > 1, column: i }); buildComparison(); }))));
  const body = rows.map(({ index, cells }) => element("tr", {}, ...cells.map(([raw, shown], i) => element(i ? "td" : "th", {}, ...(i ? [] : [dot(runColour(index)), " "]), shown ?? String(raw)))));
  byId("comparison").replaceChildren(element("h2", {}, "Runs"), element("div", { class: "table" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
}

// ---- controls

function buildLegend() {
  if (runs.length === 1) return;
  byId("legend").replaceChildren(...runs.map((run, index) => button("", () => {
    if (!state.hidden.delete(index)) state.hidden.add(index);
    saveState();
    buildLegend();
    rebuild();
  }, { "aria-pressed": String(!state.hidden.has(index)), title: "Show or hide" })));
  [...byId("legend").children].forEach((node, index) => node.append(dot(runColour(index)), runs[index].label));
}

function rebuild() {
  buildCurves();
  buildPhases();
  buildCompletions();
  redraw();
}

// The state in the address, after #: what differs from the defaults.
const defaults = new Map(SETTINGS.map((id) => [id, byId(id).value]));
function saveState() {
  const found = new URLSearchParams();
  for (const id of SETTINGS) if (byId(id).value !== defaults.get(id) && (id !== "prompt" || byId("mode").value === "prompt")) found.set(id, byId(id).value);
  if (state.theme) found.set("theme", state.theme);
  if (state.hidden.size) found.set("hidden", [...state.hidden].join());
  if (state.zoom) found.set("zoom", state.zoom.map((end) => Number(end.toPrecision(6))).join());
  if (state.at !== undefined) found.set("at", state.at);
  history.replaceState(null, "", `#${found}`);
}

function readState() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const id of SETTINGS) {
    if (!found.has(id)) continue;
    if (id === "finish") fillFinish();
    if (id === "prompt") fillPrompts(found.get(id));
    else byId(id).value = found.get(id);
    if (!byId(id).value) byId(id).value = defaults.get(id);
  }
  state.theme = ["light", "dark"].find((name) => name === found.get("theme") || location.hash === `#${name}`);
  state.hidden = new Set((found.get("hidden") || "").split(",").filter(Boolean).map(Number));
  const zoom = (found.get("zoom") || "").split(",").map(Number);
  state.zoom = zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null;
  byId("zoom").hidden = !state.zoom;
  const at = Number(found.get("at"));
  state.at = found.has("at") && Number.isFinite(at) ? at : undefined;
  document.documentElement.style.colorScheme = state.theme || "";
  resolved.clear();
}

byId("theme").addEventListener("click", () => {
  const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  state.theme = dark ? "light" : "dark";
  document.documentElement.style.colorScheme = state.theme;
  resolved.clear();
  saveState();
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { resolved.clear(); redraw(); });
addEventListener("hashchange", () => { readState(); buildLegend(); rebuild(); });
for (const id of ["smooth", "y-axis"]) byId(id).addEventListener("change", () => { saveState(); redraw(); });
byId("x-axis").addEventListener("change", () => setZoom(null));
byId("zoom").addEventListener("click", () => setZoom(null));
byId("at").addEventListener("input", () => {
  const at = byId("at");
  state.at = Number(at.value) === Number(at.max) ? undefined : allIterations()[at.value]; // at the end it follows
  buildCompletions();
  saveState();
});
byId("table").addEventListener("change", () => { state.at = undefined; byId("at").value = byId("at").max; byId("prompt").replaceChildren(); fillFinish(); });
byId("mode").addEventListener("change", () => { if (byId("mode").value === "prompt") fillPrompts(); });
for (const id of ["table", "mode", "prompt", "order", "colour", ...FILTERS]) byId(id).addEventListener("input", () => { buildCompletions(); saveState(); });
byId("completions").addEventListener("pointermove", tokenTip);
byId("completions").addEventListener("pointerleave", hideTip);
for (const search of document.querySelectorAll("main section input[type=search]:not(#text)")) {
  search.addEventListener("input", () => {
    for (const row of search.parentElement.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase());
    if (search.value) search.parentElement.querySelector("details").open = true;
  });
}
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; redraw(); } });

// ---- start, and what follows

function show(changes) {
  buildCards();
  if (!changes.some(({ rows }) => rows) && !changes.some(({ samples }) => samples)) return;
  if (changes.some(({ rows }) => rows)) {
    buildFindings();
    buildComparison();
    buildCurves();
    if (byId("phases").childElementCount !== visible().filter(({ run }) => bars(run).list.length).length) buildPhases();
    redraw();
  }
  // A view of older completions, and one that is read or marked, stays as it is.
  if (changes.some(({ samples }) => samples) && state.at === undefined && byId("mode").value === "rollout" && !byId("completions").matches(":hover")) {
    fillFinish();
    buildCompletions();
  }
}

async function follow() {
  const said = byId("live");
  try {
    const answer = await fetch(`poll?cursors=${runs.map((run) => run.cursor.join()).join(";")}`);
    if (!answer.ok) throw new Error(await answer.text());
    const parts = await answer.json();
    said.className = "live";
    said.textContent = "live";
    show(parts.map((part, index) => take(index, part)));
  } catch (error) {
    said.className = "lost";
    said.textContent = "report.py does not answer";
    console.warn(error);
  }
  setTimeout(follow, document.hidden ? 5 * EVERY : EVERY);
}

content.runs.forEach((part, index) => take(index, part));
fillFinish();
readState();
buildLegend();
buildCards();
buildFindings();
buildComparison();
rebuild();
if (live) follow();
document.documentElement.dataset.ready = Math.round(performance.now());
