// Good against failed: which statistic of which layer and channel separates the two most.
import { getJson, runPath } from "../api.js";
import { imageOf, planeCanvas, scale } from "../canvas/plane.js";
import { changes, choose, h, isCopy, panel, replace, svg } from "../dom.js";
import { link } from "../route.js";
import { table } from "../table.js";
import { guessDimensions, plane, readTensor } from "../tensors.js";
import { count, plural, short } from "../words.js";

const SIDE = 50;

export async function show(place, context) {
  const { run, signal, query } = context;
  const info = await getJson(runPath(run, "evaluations"), {}, signal);
  let usable = info.evaluations.filter((each) => each.scored && each.captured);
  if (!usable.length) {
    place.append(h("div", { class: "empty" }, h("h1", {}, "Nothing to compare"), h("p", {}, "This needs scores and captures of the same samples: a config with a metric and a debugger.")));
    return {};
  }
  const state = {
    evaluation: usable.some((each) => each.name === query.get("evaluation")) ? query.get("evaluation") : usable.at(-1).name,
    metric: info.metrics.some((each) => each.name === query.get("metric")) ? query.get("metric") : info.metrics[0].name,
    percentile: Number(query.get("percentile")) || 10, where: query.get("where") ?? "", at: Number(query.get("at")) || 0,
  };
  const top = h("div", { class: "controls" }), problem = h("p", { class: "bad", role: "alert" }), said = h("p", { class: "note", role: "status" });
  const picture = h("div"), examples = h("div", { class: "columns" });
  let found = null, turn = 0;
  const rows = table([
    { name: "words", title: "Statistic", sortable: false, cell: (row) => h("button", { type: "button", class: "plain left", onclick: () => pick(row.rank) }, row.words.replace(/\//g, "\u200b/"), row.also?.length ? h("span", { class: "quiet", title: row.also.join("\n") }, ` and ${plural(row.also.length, "other")} alike`) : null) },
    { name: "effect", title: "Effect", hint: "rank-biserial correlation: 1 if every failed sample has more of it than any good one, -1 if less, 0 if alike", number: true, value: (row) => Math.abs(row.effect), cell: (row) => short(row.effect) },
    { name: "d", title: "Cohen's d", hint: "difference of means in standard deviations", number: true, value: (row) => Math.abs(row.d), cell: (row) => short(row.d) },
    { name: "q", title: "p, corrected", hint: "Mann-Whitney p-value, corrected for the number of statistics tried", number: true, cell: (row) => h("span", { class: row.q < 0.05 ? "good" : "quiet" }, short(row.q)) },
    { name: "failed_median", title: "Failed (median)", number: true, cell: (row) => short(row.failed_median) },
    { name: "good_median", title: "Good (median)", number: true, cell: (row) => short(row.good_median) },
  ], { label: "What separates failed from good samples", key: (row) => row.words, onopen: (row) => pick(row.rank), empty: "No statistic differs." });
  const separating = panel("What separates them, clearest first", h("div", { class: "window" }, rows));
  place.append(top, problem, said, h("div", { class: "split wide table" }, separating, h("div", { class: "stack" }, picture, examples)));

  function drawTop() {
    const percent = h("output", {}, `worst ${state.percentile}%`);
    const slider = h("input", { type: "range", min: 1, max: 50, value: state.percentile, "aria-label": "Percentile of failures", oninput: () => { percent.textContent = `worst ${slider.value}%`; }, onchange: () => change({ percentile: Number(slider.value), where: "" }) });
    const field = h("input", { type: "text", value: state.where, placeholder: "label != prediction", "aria-label": "Failed where", spellcheck: "false", onchange: () => change({ where: field.value.trim() }) });
    replace(top, h("h1", {}, "Good against failed"),
      isCopy ? null : choose("Epoch", usable.map((each) => [each.name, each.words]), state.evaluation, (value) => change({ evaluation: value })),
      choose("Metric", info.metrics.map((each) => each.name), state.metric, (value) => change({ metric: value })),
      isCopy ? percent : [h("label", { class: "field" }, h("span", {}, "Failed are the"), slider, percent),
        h("label", { class: "field" }, h("span", {}, "or those where"), field)]);
  }

  async function change(values) {
    const before = { ...state };
    Object.assign(state, values, { at: 0 });
    try {
      await draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      Object.assign(state, before);
      problem.textContent = error.message;
      return;
    }
    keep();
  }

  const keep = () => context.keep({ ...state, percentile: state.percentile === 10 ? null : state.percentile, where: state.where || null, at: state.at || null });

  async function draw() {
    const mine = ++turn;
    said.textContent = "Reading captures…";
    const answer = await getJson(runPath(run, "contrast"), { evaluation: state.evaluation, metric: state.metric, percentile: state.percentile, where: state.where }, signal)
      .catch((error) => { said.textContent = ""; throw error; });
    if (mine !== turn) return;
    problem.textContent = "";
    found = answer;
    found.separations.forEach((each, rank) => { each.rank = rank; });
    drawTop();
    const clear = found.separations.filter((each) => each.q < 0.05).length;
    separating.querySelector("h2").textContent = clear ? "What separates them, clearest first" : "Nothing separates them beyond chance; largest differences first";
    said.textContent = `${count(found.failed)} failed against ${plural(found.good, "good sample")}; ${count(found.features)} statistics tried, ${clear >= found.separations.length && clear ? `${clear} or more` : clear} differ beyond chance (p < 0.05 after correction for all of them).${found.rough ? " A group is small: p-values are rough." : ""}`;
    if (found.of_batches.length) said.textContent += ` Left out: ${found.of_batches.join(", ")}, computed over whole batches and not for each sample.`;
    if (/\b(label|prediction)\b/.test(state.where)) said.textContent += " Samples whose label was not kept count as good.";
    rows.show(found.separations);
    pick(Math.min(state.at, found.separations.length - 1), false);
  }

  function pick(rank, keeps = true) {
    const each = found.separations[rank];
    if (!each) return replace(picture);
    drawExamples(each);
    state.at = rank;
    if (keeps) keep();
    const body = each.failed_values ? strips(each) : h("p", { class: "quiet" }, "Only the clearest are drawn value by value.");
    replace(picture, panel(each.words, body, h("p", { class: "note" }, `Effect ${short(each.effect)}: a failed sample has ${each.effect > 0 ? "more" : "less"} of it than a good one in ${Math.floor(50 + 50 * Math.abs(each.effect))}% of pairs.`)));
    return picture;
  }

  /** Draw examples of both groups by what the chosen statistic was measured on. */
  function drawExamples(each) {
    const list = (title, ids, kind) => panel(title, h("div", { class: "examples" }, ids.map((idx) => {
      const picture = h("span", { class: "none" });
      thumbnail(idx, each).then((drawn) => drawn && picture.replaceWith(drawn)).catch(() => {});
      return h("a", { class: `example ${kind}`, href: link("sample", { run, rest: [state.evaluation, idx], query: { metric: state.metric } }) }, picture, idx);
    })));
    replace(examples, list("Failed, worst first", found.examples.failed, "failed"), list("Good, best first", found.examples.good, "fine"));
  }

  async function thumbnail(idx, each) {
    if (each.statistic === "value" && each.channel === null) return small(idx, each.debugger);
    const tensor = await readTensor(run, { evaluation: state.evaluation, idx, part: "debugger", debugger: each.debugger, path: each.path }, {}, signal);
    if (tensor.shape.filter((length) => length > 1).length < 2) return small(idx, each.debugger);
    const { y, x, c } = guessDimensions(tensor.shape);
    const one = plane(tensor, y, x, c === null || each.channel === null ? {} : { [c]: each.channel });
    const canvas = planeCanvas({ label: `sample ${idx}` });
    canvas.drawLayers([{ image: imageOf(one, scale(one.values).toColour) }], one.width, one.height, SIDE / Math.max(one.width, one.height));
    return canvas;
  }

  /** The thumbnail of a sample: of what the same debugger captured, else another; never of its input, which is kept of some samples only. */
  async function small(idx, debuggerName) {
    const sample = await getJson(runPath(run, "sample"), { evaluation: state.evaluation, idx }, signal);
    const captured = sample.captured ?? [], same = captured.filter((one) => one.name === debuggerName);
    const levels = [...same, ...captured].map((one) => levelsOf(one.node)).find(Boolean);
    if (!levels) return null;
    const values = Float32Array.from(atob(levels.levels), (sign) => (sign.charCodeAt(0) === 255 ? NaN : sign.charCodeAt(0)));
    const canvas = planeCanvas({ label: `sample ${idx}` });
    canvas.drawLayers([{ image: imageOf({ values, width: levels.width, height: levels.height }, scale(values, { range: { low: 0, high: 254 } }).toColour) }], levels.width, levels.height, SIDE / Math.max(levels.width, levels.height));
    return canvas;
  }

  changes(top, usable.map((each) => each.name));
  drawTop();
  try {
    await draw();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    problem.textContent = error.message;
  }
  /** Offer the epochs that a live run has added. */
  async function refresh() {
    const now = await getJson(runPath(run, "evaluations"), {}, signal);
    usable = now.evaluations.filter((each) => each.scored && each.captured);
    if (changes(top, usable.map((each) => each.name))) drawTop();
  }

  return { refresh: () => refresh().catch(() => {}), keys: [{ keys: "j", what: "next statistic", act: () => rows.move(1) }, { keys: "k", what: "statistic before", act: () => rows.move(-1) }] };
}

/** The first thumbnail in a tree. */
function levelsOf(node) {
  return node.batch ? null : node.thumbnail ?? (node.items ?? []).map(([, item]) => levelsOf(item)).find(Boolean) ?? null;
}

/** Both groups as dots on one scale; spread upwards by their order, so that equals do not hide each other. */
function strips({ failed_values: failed, good_values: good, words }) {
  const all = [...failed, ...good].filter((each) => each !== null);
  const low = Math.min(...all), high = Math.max(...all), wide = 520, tall = 150;
  const x = (value) => 60 + ((value - low) / (high - low || 1)) * (wide - 80);
  const dots = (values, top, kind) => values.map((value, at) => (value === null ? null : svg("circle", { cx: x(value).toFixed(1), cy: top + ((at * 7919) % 40), r: 2.6, class: kind })));
  const middle = (values) => [...values].filter((each) => each !== null).sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const line = (values, top) => svg("line", { x1: x(middle(values)), x2: x(middle(values)), y1: top - 6, y2: top + 46, class: "median" });
  return svg("svg", { class: "strips", viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${words}: values of failed and good samples` },
    svg("text", { x: 4, y: 34 }, "failed"), dots(failed, 12, "failed"), line(failed, 12),
    svg("text", { x: 4, y: 100 }, "good"), dots(good, 78, "fine"), line(good, 78),
    svg("text", { x: 60, y: tall - 4 }, short(low)), svg("text", { x: wide - 20, y: tall - 4, "text-anchor": "end" }, short(high)));
}
