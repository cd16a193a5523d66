// One sample: inputs, labels and outputs, then what debuggers captured; over epochs, and beside another run.
import { getJson, runPath } from "../api.js";
import { imageOf, mixed, scale } from "../canvas/plane.js";
import { tensorView } from "../canvas/tensor.js";
import { canAsk, choose, h, isCopy, panel, replace } from "../dom.js";
import { link } from "../route.js";
import { guessDimensions, plane, readTensor, size } from "../tensors.js";
import { count, short } from "../words.js";

const MOST_SCORES = 12;
const KEPT = [["inputs", "Inputs"], ["labels", "Labels"], ["outputs", "Outputs"]];

export async function show(place, context) {
  const { run, route, signal, query } = context;
  const idx = route.rest[1] ?? "", where = query.getAll("where"), beside = query.get("with");
  let metric = query.get("metric") ?? "", evaluation = route.rest[0] ?? "", sample = null, turn = 0;
  const views = readViews(query.get("view"));
  const everyRun = (await getJson("runs", {}, signal)).runs.filter((each) => !each.problem);
  const top = h("div", { class: "controls" }), scores = h("div", { class: "tiles" }), body = h("div", { class: "stack" });
  place.append(top, scores, body);

  const here = (changes = {}) => link("sample", { run, rest: [changes.evaluation ?? evaluation, changes.idx ?? idx],
    query: { metric, where, with: changes.with === undefined ? beside : changes.with, view: Object.keys(views).length ? JSON.stringify(views) : null } });
  const go = (changes) => { location.hash = here(changes); };

  /** What is asked of a sample; a copy holds each in the order of all of them. */
  const asked = (name, which = idx) => ({ evaluation: name, idx: which, metric, where: isCopy ? [] : where });
  const isHeld = (name, which = idx) => canAsk(runPath(run, "sample"), asked(name, which));

  async function read(name) {
    const mine = ++turn;
    const info = await getJson(runPath(run, "sample"), asked(name), signal);
    const other = beside ? await getJson(runPath(beside, "sample"), { evaluation: info.evaluation, idx, metric }, signal).catch((error) => ({ problem: error.message })) : null;
    if (mine !== turn) return;
    sample = info;
    evaluation = info.evaluation;
    metric ||= info.metric ?? "";
    history.replaceState(null, "", here());
    drawTop(info);
    drawScores(info, other);
    await drawBody(info, other, mine);
  }

  function drawTop(info) {
    info.epochs = info.epochs.filter((each) => isHeld(each.name));
    if (info.next !== null && !isHeld(info.evaluation, info.next)) info.next = null;
    if (info.previous !== null && !isHeld(info.evaluation, info.previous)) info.previous = null;
    const at = Math.max(0, info.epochs.findIndex((each) => each.name === info.evaluation));
    const said = h("output", {}, `${info.words}${info.captured || info.kept ? "" : ", not captured"}`);
    const slider = h("input", { type: "range", min: 0, max: Math.max(info.epochs.length - 1, 0), value: at, "aria-label": "Epoch",
      oninput: () => { said.textContent = info.epochs[slider.value].words; later(() => read(info.epochs[slider.value].name).catch(() => {})); } });
    const nearest = !info.captured && [...info.epochs].reverse().find((each) => each.captured);
    const others = everyRun.filter((each) => each.id !== run).map((each) => [each.id, each.name]);
    const step = (target, text, key) => h("a", { class: "button", href: target === null ? null : here({ idx: target }), "data-off": target === null ? "" : null, title: `${text} (${key})` }, text);
    replace(top, h("h1", {}, `Sample ${info.idx}`),
      step(info.previous, "‹ Worse", "p"), step(info.next, "Better ›", "n"),
      info.position === null ? null : h("span", { class: "note" }, `${count(info.position + 1)} of ${count(info.of)} by ${info.metric}${where.length && !isCopy ? `, where ${where.join(" and ")}` : ""}`),
      info.epochs.length > 1 ? h("label", { class: "field" }, h("span", {}, "Epoch"), slider, said) : said,
      nearest ? h("a", { class: "button", href: here({ evaluation: nearest.name }) }, `Captured in ${nearest.words}`) : null,
      others.length ? choose("Compare with", [["", "no other run"], ...others], beside ?? "", (value) => go({ with: value || null })) : null,
      h("a", { href: link("samples", { run, query: { evaluation: info.evaluation, metric, where } }) }, "All samples"));
  }

  function drawScores(info, other) {
    const against = Object.fromEntries((other?.scores ?? []).map((each) => [each.name, each.value]));
    const first = info.scores.filter((each) => each.name === info.metric), others = info.scores.filter((each) => each.name !== info.metric);
    replace(scores, [...first, ...others].slice(0, MOST_SCORES).map((each) => {
      const history = info.epochs.map((one) => one.scores[each.name]);
      const standing = each.percentile === null ? "no number" : `higher than ${Math.floor(each.percentile)}% of samples`;
      return h("div", { class: "tile wide" }, h("b", {}, each.value === null ? "nan" : short(each.value), against[each.name] === undefined ? null : h("span", { class: "quiet" }, ` beside ${short(against[each.name])}`)),
        h("span", {}, `${each.name} (${each.direction > 0 ? "more" : "less"} is better), ${standing}`), history.length > 1 ? h("span", { class: "trail" }, `by epoch: ${history.map(short).join(" → ")}`) : null);
    }));
  }

  async function drawBody(info, other, mine) {
    const kept = info.kept ?? [], sections = [];
    const tokens = kept.map((each) => textsOf(each.node)).find(Boolean) ?? null;
    const image = await pictureOf(info, kept).catch(() => null);
    if (mine !== turn) return;
    const facts = { label: scalarOf(kept, "labels") ?? info.label, prediction: scalarOf(kept, "prediction") ?? info.prediction };
    const theirs = other?.prediction ?? null;
    const marks = {};
    if (Number.isInteger(facts.prediction)) marks[facts.prediction] = "prediction";
    if (Number.isInteger(facts.label)) marks[facts.label] = facts.label === facts.prediction ? "label and prediction" : "label";
    const make = (part, each, extra = {}) => render(each.node, each.name, { part, debugger: each.name, path: [], info, other, image, tokens, marks, ...extra });
    const three = KEPT.map(([key, title]) => {
      const found = kept.find((each) => each.name === key);
      const content = found ? make("samples", found, { isImage: key === "inputs", image: key === "inputs" ? null : image, bare: true }) : h("p", { class: "quiet" }, "Not kept.");
      const extra = key === "labels" && facts.prediction !== null ? h("p", {}, `Predicted `, h("b", { class: facts.prediction === facts.label ? "good" : "bad" }, facts.prediction),
        theirs === null ? null : [`, ${everyRun.find((each) => each.id === beside)?.name ?? "the other run"} `, h("b", { class: theirs === facts.label ? "good" : "bad" }, theirs), theirs === facts.prediction ? " too" : ""]) : null;
      return panel(title, content, extra);
    });
    const more = kept.filter((each) => !KEPT.some(([key]) => key === each.name) && each.name !== "prediction");
    sections.push(kept.length ? h("div", { class: "thirds" }, three) : h("p", { class: "note" }, facts.label === null ? "" : [`Label ${facts.label}`, facts.prediction === null ? ". " : [", predicted ", h("b", { class: facts.prediction === facts.label ? "good" : "bad" }, facts.prediction), theirs === null ? ". " : [`, ${everyRun.find((each) => each.id === beside)?.name ?? "the other run"} `, h("b", { class: theirs === facts.label ? "good" : "bad" }, theirs), ". "]]], "Its inputs were not kept: save_samples in the config decides which are."));
    sections.push(more.map((each) => panel(each.name, make("samples", each))));
    const ordered = [...(info.captured ?? [])].sort((a, b) => hasPlanes(b.node) - hasPlanes(a.node)); // pictures first
    const captured = ordered.map((each) => h("section", { class: `panel debugger${hasPlanes(each.node) ? "" : " flat"}`, "aria-label": each.name }, h("h2", {}, each.name), make("debugger", each)));
    sections.push(h("section", { class: "stack", "aria-label": "Debug outputs" }, h("h2", {}, "Debug outputs"), captured.length ? h("div", { class: "debuggers" }, captured) : h("p", { class: "quiet" }, "Nothing was captured of this sample here.")));
    replace(body, info.problems.map((text) => h("p", { class: "problem" }, text)), other?.problem ? h("p", { class: "problem" }, other.problem) : null, sections);
  }

  /** Draw a node of the tree: tensors as pictures, numbers as tables, texts as tokens, the rest one below the other. */
  function render(node, name, at) {
    if (node.batch) return h("div", { class: "ofbatch" }, h("p", { class: "note" }, ofBatch(node)), render({ ...node, batch: 0 }, name, at));
    if (node.kind === "tensor") return tensor(node, name, at);
    if (node.kind === "value") return h("p", { class: typeof node.value === "string" && node.value.length > 80 ? "mono pre" : "single small" }, say(node.value));
    const texts = textsOf(node);
    if (texts) return h("div", { class: "tokens", "aria-label": name }, texts.map((word) => h("span", { class: "token" }, word)));
    const plain = node.items.filter(([, item]) => isPlain(item)), rest = node.items.filter(([, item]) => !isPlain(item));
    const inside = (key, item) => ({ ...at, path: [...at.path, key] });
    return h("div", { class: "flow" },
      rest.map(([key, item]) => (item.kind === "tensor" ? render(item, key, inside(key, item)) : h("details", { open: true, class: "nested" }, h("summary", {}, key), render(item, key, inside(key, item))))),
      plain.length ? h("div", { class: "scroll" }, h("table", { class: "plainvalues", "aria-label": `${name}: values` }, h("tbody", {}, plain.map(([key, item]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", { class: "mono" }, words(item), item.batch ? h("span", { class: "quiet" }, ` ${ofBatch(item)}`) : null)))))) : null);
  }

  function tensor(node, name, at) {
    const key = `${at.part}/${at.debugger}/${node.path}`;
    const asked = () => ({ evaluation: at.info.evaluation, idx, part: at.part, debugger: at.debugger, path: node.path });
    if (!canAsk(runPath(run, "tensor"), asked())) return h("p", { class: "note" }, `${node.path || name}: ${node.shape.join(" × ")}, not in this copy`);
    const has = beside && (at.part === "samples" ? at.other?.kept : at.other?.captured)?.some((each) => each.name === at.debugger);
    return tensorView({
      signal, bare: at.bare && !node.path, name: name === at.debugger && !node.path ? name : node.path || name, path: `${at.debugger}/${node.path}`, node, view: views[key],
      isImage: Boolean(at.isImage), image: at.isImage ? null : at.image, tokens: at.tokens, marks: at.part === "samples" ? at.marks : {},
      read: (fix) => readTensor(run, asked(), fix, signal),
      other: has ? { label: everyRun.find((each) => each.id === beside)?.name ?? beside, read: (fix) => readTensor(beside, asked(), fix, signal) } : null,
      onview: (view) => {
        if (Object.keys(view).length) views[key] = view; else delete views[key];
        history.replaceState(null, "", here());
      },
    });
  }

  /** The input as a picture that maps can be laid over; null if it is none. */
  async function pictureOf(info, kept) {
    const node = kept.find((each) => each.name === "inputs")?.node;
    if (node?.kind !== "tensor" || !node.numeric || node.shape.filter((each) => each > 1).length < 2 || size(node.shape) > 1 << 20) return null;
    const { y, x, c } = guessDimensions(node.shape, true);
    if (node.shape[y] < 2 || node.shape[x] < 2 || (c !== null && ![1, 3, 4].includes(node.shape[c]))) return null;
    const read = await readTensor(run, { evaluation: info.evaluation, idx, part: "samples", debugger: "inputs", path: "" }, {}, signal);
    const one = plane(read, y, x, {});
    const colours = c !== null && node.shape[c] >= 3 ? mixed([0, 1, 2].map((at) => plane(read, y, x, { [c]: at }))) : scale(one.values, { map: "grey" }).toColour;
    return { width: one.width, height: one.height, image: imageOf(one, colours) };
  }

  let timer = 0;
  function later(act) {
    clearTimeout(timer);
    timer = setTimeout(act, 80);
  }

  await read(evaluation);
  const step = (by) => {
    const at = sample.epochs.findIndex((each) => each.name === evaluation) + by;
    if (sample.epochs[at]) read(sample.epochs[at].name).catch(() => {});
  };
  /** Take in the epochs that a live run has added. */
  async function refresh() {
    const info = await getJson(runPath(run, "sample"), asked(evaluation), signal);
    if (info.epochs.length === sample.epochs.length || info.evaluation !== evaluation) return;
    sample = info;
    drawTop(info);
  }

  return {
    title: `sample ${idx}`,
    refresh: () => refresh().catch(() => {}),
    keys: [
      { keys: "n", what: "next failure", act: () => sample.next !== null && go({ idx: sample.next }) },
      { keys: "p", what: "failure before", act: () => sample.previous !== null && go({ idx: sample.previous }) },
      { keys: "]", what: "next epoch", act: () => step(1) },
      { keys: "[", what: "epoch before", act: () => step(-1) },
    ],
  };
}

function readViews(text) {
  try {
    const read = JSON.parse(text ?? "{}");
    return read && typeof read === "object" && !Array.isArray(read) ? read : {};
  } catch {
    return {};
  }
}

const isPlain = (item) => (item.kind === "value" && !(typeof item.value === "string" && item.value.length > 200)) || (item.kind === "tensor" && size(item.shape) === 1) || (item.kind === "list" && item.items.length <= 16 && item.items.every(([, each]) => each.kind === "value" && typeof each.value !== "string"));

/** What is said of a value that was computed over a whole batch. */
const ofBatch = (node) => `of the whole batch of ${node.batch} samples, not of this one`;

function words(item) {
  if (item.kind === "tensor") return short(item.stats.min);
  if (item.kind === "list") return `[${item.items.map(([, each]) => say(each.value)).join(", ")}]`;
  return say(item.value);
}

function say(value) {
  if (value === null) return "none";
  return typeof value === "number" ? short(value) : String(value);
}

/** Whether a node holds anything that is drawn as a plane. */
function hasPlanes(node) {
  if (node.kind === "tensor") return node.numeric && node.shape.filter((each) => each > 1).length > 1;
  return (node.items ?? []).some(([, item]) => hasPlanes(item));
}

/** The texts of a list of texts; null if it is anything else. */
function textsOf(node) {
  if (node.kind !== "list" || !node.items.length) return null;
  return node.items.every(([, each]) => each.kind === "value" && typeof each.value === "string") ? node.items.map(([, each]) => each.value) : null;
}

function scalarOf(kept, name) {
  const node = kept.find((each) => each.name === name)?.node;
  if (node?.batch) return null;
  if (node?.kind === "tensor" && node.numeric && size(node.shape) === 1) return node.stats.min;
  return node?.kind === "value" ? node.value : null;
}
