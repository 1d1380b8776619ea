// Completions of rollouts and evaluations: one update of all runs, one prompt through time, or all that match.

const LEAST_LOG_PROB = -4; // where the colour of unlikely tokens is at its full strength
const LARGE_GAP = 0.5; // nats, the same for the difference of trainer and engine
const MOST_CARDS = 24; // of a run, until more are asked for
const MOST_TEXT = 20000; // characters of a text that are shown at once
const IMAGE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/; // nothing else is shown as one
const FILTERS = ["text", "reward-from", "reward-to", "length-from", "length-to", "turns-from", "finish"];

const reward = (sample) => Object.values(sample.rewards).reduce((sum, value) => sum + (value || 0), 0);
const mixed = (colour, share) => `background: color-mix(in srgb, var(--${colour}) ${Math.round(100 * Math.min(1, share))}%, transparent)`;
const sampledHere = (sample, i) => !sample.response_mask || sample.response_mask[i] === 1;
const promptOf = (sample) => `${sample.file || ""}|${sample.row}`;

// What is known of a token: log-probabilities of engine and trainer, their difference, the advantage.
function tokenFacts(sample, i) {
  const both = sample.rollout_log_probs !== undefined;
  const engine = (both ? sample.rollout_log_probs : sample.log_probs)[i], trainer = both ? sample.log_probs[i] : null;
  const difference = engine === null || trainer === null ? null : trainer - engine;
  const advantage = sampledHere(sample, i) ? (sample.token_advantages ? sample.token_advantages[i] : sample.advantage) : null;
  return { engine, trainer, difference, advantage, clipped: sample.clipped?.[i] === 1 };
}

function tokenStyle(facts, kind, largest) {
  if (kind === "engine" || kind === "trainer") return facts[kind] === null ? "" : mixed("surprise", 0.7 * (facts[kind] / LEAST_LOG_PROB));
  if (kind === "difference") return facts.difference === null ? "" : mixed(facts.difference > 0 ? "good" : "bad", Math.abs(facts.difference) / LARGE_GAP);
  if (kind === "advantage") return !facts.advantage ? "" : mixed(facts.advantage > 0 ? "good" : "bad", (0.6 * Math.abs(facts.advantage)) / largest);
  return "";
}

function tokenTip(event) {
  const { sample, at } = event.target;
  if (!sample) { hideTip(); return; }
  const facts = tokenFacts(sample, at), rows = [];
  for (const name of ["engine", "trainer"]) {
    if (facts[name] !== null) rows.push(["", `probability, ${name}`, number(Math.exp(facts[name]))], ["", "log-probability", number(facts[name])]);
  }
  if (facts.difference !== null) rows.push(["", "trainer − engine, nats", number(facts.difference)]);
  if (facts.advantage !== null) rows.push(["", "advantage", number(facts.advantage)]);
  else if (!sampledHere(sample, at)) rows.push(["", "said by the environment", ""]);
  if (facts.clipped) rows.push(["", "weight beyond its bound", "clipped"]);
  showTip(event, `token ${at + 1}: ${JSON.stringify(sample.tokens[at])}`, rows);
}

// A text of any length: the rest of a long one waits until it is asked for.
function longText(text, kind) {
  const node = element("div", { class: `tokens ${kind}` }, text.slice(0, MOST_TEXT));
  if (text.length > MOST_TEXT) {
    const more = button(`… ${(text.length - MOST_TEXT).toLocaleString("en")} more characters`, () => more.replaceWith(text.slice(MOST_TEXT)));
    node.append(more);
  }
  return node;
}

function pictures(sample) {
  const kept = (Array.isArray(sample.images) ? sample.images : []).filter((uri) => typeof uri === "string" && IMAGE.test(uri));
  return kept.length ? [element("div", { class: "pictures" }, ...kept.map((src) => element("img", { src, alt: "image of the prompt", loading: "lazy" })))] : [];
}

// The tokens of a completion in its turns: those of the policy open, what the environment said folded.
function tokenView(sample, largest) {
  const kind = byId("colour").value, turns = [];
  if (!sample.tokens) return [longText(sample.completion, "")];
  sample.tokens.forEach((text, at) => {
    const policy = sampledHere(sample, at);
    if (!turns.length || turns.at(-1).policy !== policy) turns.push({ policy, spans: [], text: "" });
    const facts = tokenFacts(sample, at), turn = turns.at(-1);
    const token = element("span", { style: policy ? tokenStyle(facts, kind, largest) : "" }, text);
    token.className = (/^<[^<>]+>$/.test(text.trim()) ? "special " : "") + (facts.clipped ? "clipped" : "");
    Object.assign(token, { sample, at });
    turn.spans.push(token);
    turn.text += text;
  });
  const several = turns.length > 1;
  const nodes = turns.map(({ policy, spans, text }, i) => {
    const part = element("div", { class: "tokens" }, ...spans);
    if (!several) return part;
    const call = /<tool_call>|<function|```tool/.test(text) ? ", a tool call" : "";
    const start = text.replace(/\s+/g, " ").trim().slice(0, 90);
    const head = element("summary", {}, element("b", {}, policy ? `turn ${Math.floor(i / 2) + 1}` : "environment"), ` ${spans.length} tokens${policy ? call : ""} `, element("q", {}, start));
    const folded = element("details", { class: policy ? "turn" : "turn said" }, head, part);
    folded.open = policy && (turns.length <= 5 || i >= turns.length - 2);
    return folded;
  });
  if (sample.tokens.length < sample.length) {
    const rest = element("details", {}, element("summary", {}, `… ${(sample.length - sample.tokens.length).toLocaleString("en")} more tokens: the whole text`));
    rest.addEventListener("toggle", () => { if (rest.children.length === 1) rest.append(longText(sample.completion, "")); });
    nodes.push(rest);
  }
  return nodes;
}

function facts(sample, count = 1) {
  const fact = (label, value) => element("span", {}, label + " ", element("b", {}, value));
  const rewards = Object.entries(sample.rewards).map(([name, value]) => fact(name, value === null ? "not scored" : number(value)));
  return element("div", { class: "facts" },
    ...(count > 1 ? [element("span", { class: "count" }, `${count} equal`)] : []),
    ...(sample.advantage === undefined ? [] : [fact("advantage", number(sample.advantage))]), ...rewards,
    element("span", {}, `${sample.length.toLocaleString("en")} tokens, ${sample.finish_reason}`),
    ...(sample.turns > 1 ? [element("span", {}, `${sample.turns} turns`)] : []),
    element("span", {}, [`update ${sample.iteration}`, `row ${sample.row}`, sample.picked || sample.kind].join(", ")));
}

const tone = (sample) => (sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "line");

function sampleCard(sample, largest, count) {
  return element("article", { class: "sample", style: `--own: var(--${tone(sample)})` }, facts(sample, count), ...tokenView(sample, largest));
}

// A completion as one line, which opens.
function sampleLine(sample, largest, withPrompt) {
  const text = sample.completion.slice(0, 2000).replace(/\s+/g, " ").trim().slice(0, 160);
  const head = element("summary", {}, element("b", {}, `update ${sample.iteration}`), ...(sample.kind ? [` ${sample.kind}`] : []),
    element("span", { class: "figure" }, number(reward(sample))), element("span", {}, `${sample.length.toLocaleString("en")} tokens, ${sample.finish_reason}`), element("q", {}, text));
  const line = element("details", { class: "sample line", style: `--own: var(--${tone(sample)})` }, head);
  line.addEventListener("toggle", () => {
    if (line.children.length > 1) return;
    line.append(facts(sample), ...(withPrompt ? [longText(sample.prompt, "prompt"), ...pictures(sample)] : []), ...tokenView(sample, largest));
  });
  return line;
}

function promptHead(sample, more) {
  const many = runs.some((run) => [...run[byId("table").value].samples.values()].some((other) => promptOf(other) === promptOf(sample) && other.iteration !== sample.iteration));
  const time = button("through time", () => showPrompt(promptOf(sample)), { title: "The completions of this prompt at every update" });
  return element("header", {}, element("div", { class: "facts" }, ...more, ...(many || live ? [time] : [])), longText(sample.prompt, "prompt"), ...pictures(sample));
}

function showPrompt(prompt) {
  byId("mode").value = "prompt";
  fillPrompts(prompt);
  buildCompletions();
  saveState();
}

// ---- choice

const limit = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
function matches(sample) {
  const text = byId("text").value.toLowerCase(), finish = byId("finish").value;
  const within = (value, id) => (limit(`${id}-from`) === null || value >= limit(`${id}-from`)) && (!byId(`${id}-to`) || limit(`${id}-to`) === null || value <= limit(`${id}-to`));
  return within(reward(sample), "reward") && within(sample.length, "length") && within(sample.turns || 1, "turns")
    && (!finish || sample.finish_reason === finish)
    && (!text || sample.prompt.toLowerCase().includes(text) || sample.completion.toLowerCase().includes(text));
}

const allIterations = () => [...new Set(visible().flatMap(({ run }) => run[byId("table").value].iterations))].sort((a, b) => a - b);

// Ask the server of a live page for completions that the page lacks: those of an update once, others again when there
// are new ones; a search then reads only the new ones.
const fetched = new Map(), typing = [];
async function fetchSamples(index, query) {
  const table = byId("table").value, address = `samples?${new URLSearchParams({ run: index, table, ...query })}`;
  const [generation, , ...counts] = runs[index].cursor, key = `${address} ${generation}`;
  const count = query.iteration === undefined ? counts[["completions", "held_out"].indexOf(table)] : 1, from = fetched.get(key) || 0;
  if (!live || from >= count) return;
  fetched.set(key, count);
  const answer = await fetch(query.text === undefined ? address : `${address}&from=${from}`).catch(() => ({ ok: false }));
  if (!answer.ok) return void fetched.set(key, from); // again when the completions are built next
  for (const sample of await answer.json()) runs[index][table].samples.set(sample.id, sample);
  buildCompletions();
}

function fillPrompts(chosen = byId("prompt").value) {
  const table = byId("table").value, found = new Map();
  for (const { run } of visible()) {
    for (const [file, row] of run[table].prompts) found.set(`${file}|${row}`, `${file}, row ${row}`);
    for (const sample of run[table].samples.values()) {
      const start = `${sample.file ? `${sample.file}, ` : ""}row ${sample.row}`;
      found.set(promptOf(sample), `${start}: ${sample.prompt.slice(-300).replace(/\s+/g, " ").trim().slice(-60)}`);
    }
  }
  if (chosen && !found.has(chosen)) found.set(chosen, chosen.replace("|", " row "));
  const options = [...found].slice(0, 500);
  if (chosen && !options.some(([value]) => value === chosen)) options.push([chosen, found.get(chosen)]);
  byId("prompt").replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (chosen) byId("prompt").value = chosen;
}

function fillFinish() {
  const reasons = new Set(runs.flatMap((run) => [...run[byId("table").value].samples.values()].map((sample) => sample.finish_reason)));
  const chosen = byId("finish").value;
  byId("finish").replaceChildren(element("option", { value: "" }, "any"), ...[...reasons].sort().map((value) => element("option", { value }, value)));
  byId("finish").value = chosen;
}

const sorted = (samples) => {
  const order = byId("order").value;
  if (order === "logged") return samples;
  const found = [...samples].sort((a, b) => (b.advantage || 0) - (a.advantage || 0) || reward(b) - reward(a));
  return order === "worst" ? found.reverse() : found;
};

// Nodes, and a button for those above MOST_CARDS.
function limited(list, node) {
  const nodes = list.slice(0, MOST_CARDS).map(node);
  if (list.length > MOST_CARDS) {
    const more = button(`${list.length - MOST_CARDS} more`, () => more.replaceWith(...list.slice(MOST_CARDS).map(node)));
    nodes.push(more);
  }
  return nodes;
}

function sparkline(points, style) {
  const low = Math.min(...points.map(([, y]) => y)), high = Math.max(...points.map(([, y]) => y)), last = points.at(-1)[0] || 1, first = points[0][0];
  const place = ([x, y]) => `${(2 + (96 * (x - first)) / (last - first || 1)).toFixed(1)},${(22 - (20 * (y - low)) / (high - low || 1)).toFixed(1)}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  for (const [name, value] of Object.entries({ class: "sparkline", viewBox: "0 0 100 24", style, role: "img", "aria-label": `from ${number(low)} to ${number(high)}` })) svg.setAttribute(name, value);
  line.setAttribute("points", points.map(place).join(" "));
  svg.append(line);
  return svg;
}

// What the run has logged of an update as a whole: of single tokens the log has only what was known before the update.
const OF_UPDATE = ["mismatch/mean_abs", "mismatch/clipped", "clip/low", "clip/high", "clip/masked", "entropy", "teacher/kl", "teacher/divergence"];
function updateFacts(run, at) {
  const row = run.x.iteration.findIndex((iteration) => iteration >= at && iteration > 0);
  const known = row < 0 ? [] : OF_UPDATE.map((name) => [name, run.metrics.get(name)?.[row] ?? null]).filter(([, value]) => value !== null);
  if (!known.length) return [];
  return [element("div", { class: "facts update" }, element("span", {}, "all tokens of ", element("b", {}, `update ${run.x.iteration[row]}`), ":"),
    ...known.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, number(value)))))];
}

// What the colours and marks of tokens show, and what is not in the log.
function tokensInWords(kind, samples) {
  const said = [];
  if ((kind === "trainer" || kind === "difference") && !samples.some((sample) => sample.rollout_log_probs)) {
    said.push("The trainer's probabilities of single tokens are not logged: this run computes them within its updates, and not before.");
  }
  if (samples.some((sample) => sample.clipped?.includes(1))) said.push("Underlined: the rollout importance weight exceeds its bound.");
  else if (!samples.some((sample) => sample.clipped)) said.push("Clipped tokens are not marked: which ones are is known only within an update.");
  return said.join(" ");
}

// ---- the three views

function ofRollout(run, index, wanted, largest) {
  const { iterations, samples } = run[byId("table").value];
  if (!iterations.length) return [];
  const at = iterations.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
  const own = [...samples.values()].filter((sample) => sample.iteration === at);
  if (!own.length) fetchSamples(index, { iteration: at });
  const groups = Map.groupBy(sorted(own.filter(matches)), (sample) => `${promptOf(sample)}|${sample.prompt}`);
  const nodes = limited([...groups.values()], (group) => {
    const equal = [...Map.groupBy(group, (sample) => `${sample.kind || ""}|${sample.completion}`).values()];
    const said = [element("span", {}, element("b", {}, `update ${at}`), at === wanted ? "" : `, the nearest to ${wanted}`)];
    if (group.length > 1) said.push(element("span", {}, `${group.length} completions, ${equal.length === 1 ? "all equal" : `${equal.length} different`}, mean reward `, element("b", {}, number(group.reduce((sum, one) => sum + reward(one), 0) / group.length))));
    return element("section", { class: "group" }, promptHead(group[0], said), ...equal.map((same) => sampleCard(same[0], largest, same.length)));
  });
  if (nodes.length && byId("table").value === "completions") nodes.unshift(...updateFacts(run, at));
  if (!own.length) nodes.push(element("p", { class: "note" }, live ? "Reading …" : `The completions of update ${at} are not in this file: --serve, or more --rollouts.`));
  return nodes;
}

function ofPrompt(run, index, prompt, largest) {
  const [file, row] = [prompt.slice(0, prompt.lastIndexOf("|")), prompt.slice(prompt.lastIndexOf("|") + 1)];
  if (row) fetchSamples(index, { file, row });
  const own = [...run[byId("table").value].samples.values()].filter((sample) => promptOf(sample) === prompt && matches(sample));
  if (!own.length) return [];
  own.sort((a, b) => a.iteration - b.iteration || a.id - b.id);
  const means = [...Map.groupBy(own, (sample) => sample.iteration)].map(([at, list]) => [at, list.reduce((sum, one) => sum + reward(one), 0) / list.length]);
  const said = [element("span", {}, `${own.length} completions at ${means.length} updates, reward `, element("b", {}, `${number(means[0][1])} → ${number(means.at(-1)[1])}`))];
  const head = promptHead(own[0], said);
  head.querySelector("button")?.remove();
  if (means.length > 1) head.querySelector(".facts").append(sparkline(means, runColour(index)));
  return [element("section", { class: "group" }, head, ...limited(own, (sample) => sampleLine(sample, largest, sample.prompt !== own[0].prompt)))];
}

function ofAll(run, index, largest) {
  const text = byId("text").value;
  if (text.length > 2) {
    clearTimeout(typing[index]); // a search of a long log takes seconds: not at each key
    typing[index] = setTimeout(() => fetchSamples(index, { text }), 300);
  }
  const own = sorted([...run[byId("table").value].samples.values()].sort((a, b) => a.id - b.id).filter(matches));
  const some = live && text.length > 2 && own.length >= 100; // the most that a search returns
  const note = some ? [element("p", { class: "note" }, "Of many hits a search brings the newest 100: narrow the text, or choose an update.")] : [];
  return own.length ? [element("section", { class: "group" }, ...note, ...limited(own, (sample) => sampleLine(sample, largest, true)))] : [];
}

function buildCompletions() {
  const table = byId("table").value, mode = byId("mode").value, at = byId("at"), iterations = allIterations();
  const follows = Number(at.value) === Number(at.max); // at the newest
  at.max = Math.max(0, iterations.length - 1);
  if (state.at !== undefined) at.value = nearest(iterations, state.at);
  else if (follows) at.value = at.max;
  const wanted = iterations[at.value];
  byId("at-label").hidden = mode !== "rollout";
  byId("prompt").hidden = mode !== "prompt";
  byId("at-value").textContent = wanted === undefined ? "none logged" : `update ${wanted}`;
  if (mode === "prompt" && !byId("prompt").options.length) fillPrompts();
  const samples = visible().flatMap(({ run }) => [...run[table].samples.values()]);
  const largest = samples.reduce((most, sample) => Math.max(most, Math.abs(sample.advantage || 0)), 1e-9);
  const opened = document.activeElement?.id;
  byId("completions").replaceChildren(...visible().map(({ run, index }) => {
    const head = element("h3", {}, dot(runColour(index)), run.label);
    head.hidden = runs.length === 1;
    const nodes = mode === "rollout" ? ofRollout(run, index, wanted, largest) : mode === "prompt" ? ofPrompt(run, index, byId("prompt").value, largest) : ofAll(run, index, largest);
    return element("div", {}, head, ...(nodes.length ? nodes : [element("p", { class: "note" }, run[table].iterations.length ? "Nothing matches." : "No completions were logged.")]));
  }));
  if (opened) byId(opened)?.focus();
  const kind = byId("colour").value;
  const missing = (kind === "trainer" || kind === "difference") && !samples.some((sample) => sample.rollout_log_probs);
  byId("completions-note").textContent = table === "completions" && samples.length ? tokensInWords(kind, samples) : "";
  const scales = {
    engine: ["certain", "linear-gradient(to right, transparent, color-mix(in srgb, var(--surprise) 70%, transparent))", `p ≤ ${Math.exp(LEAST_LOG_PROB).toFixed(2)}`],
    difference: [`trainer less likely, ${LARGE_GAP} nats`, "linear-gradient(to right, var(--bad), transparent, var(--good))", "more likely"],
    advantage: [number(-largest), "linear-gradient(to right, var(--bad), transparent, var(--good))", number(largest)],
  };
  const [low, gradient, high] = scales[kind === "trainer" ? "engine" : kind] || ["", "", ""];
  byId("scale").replaceChildren(...(gradient && !missing && table === "completions" ? [low, element("i", { style: `background: ${gradient}` }), high] : []));
}
