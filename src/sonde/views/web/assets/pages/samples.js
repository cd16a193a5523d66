// All samples of a run: a map of scores, the worst first, failures common to runs, and scores over epochs.
import { getBytes, getJson, runPath } from "../api.js";
import { MAPS } from "../canvas/colours.js";
import { legend, scoreMap } from "../canvas/scoremap.js";
import { changesPanel, classPanels } from "../classes.js";
import { canAsk, choose, filterButton, h, isCopy, panel, replace, search } from "../dom.js";
import { embeddingMap } from "../embedding.js";
import { figure } from "../figure.js";
import { link } from "../route.js";
import { sampleGrid } from "../samplegrid.js";
import { table } from "../table.js";
import { count, plural, short } from "../words.js";

const MOST_ROWS = 200, MOST_METRICS = 6;

export async function show(place, context) {
  const { run, signal, query } = context;
  let info = await getJson(runPath(run, "evaluations"), {}, signal);
  let scored = info.evaluations.filter((each) => each.scored);
  if (!scored.length) {
    const broken = info.evaluations.filter((each) => each.problem).map((each) => h("p", { class: "problem" }, each.problem));
    place.append(h("div", { class: "empty" }, h("h1", {}, "No scores of samples"),
      h("p", {}, "Per-sample scores are recorded by sonde.training: sonde train or sonde eval with a metric. Your own training loop does not record them."), broken));
    return {};
  }
  const everyRun = (await getJson("runs", {}, signal)).runs.filter((each) => !each.problem);
  const known = (name) => scored.some((each) => each.name === name);
  const state = {
    evaluation: known(query.get("evaluation")) ? query.get("evaluation") : scored.at(-1).name,
    metric: info.metrics.some((each) => each.name === query.get("metric")) ? query.get("metric") : info.metrics[0].name,
    where: query.getAll("where"), with: query.getAll("with").filter((each) => each !== run),
    percentile: Number(query.get("percentile")) || 10, overlay: query.get("overlay") ?? "", of: query.get("of") ?? "", method: query.get("method") ?? "",
  };
  const metric = () => info.metrics.find((each) => each.name === state.metric);
  const open = (idx) => { location.hash = link("sample", { run, rest: [state.evaluation, idx], query: { metric: state.metric, where: state.where, with: state.with.slice(0, 1) } }); };
  let ids = null, turn = 0;

  const top = h("div", { class: "controls" }), filters = h("div", { class: "chips" }), problem = h("p", { class: "bad", role: "alert" });
  const maps = h("div", { class: "stack" }), counted = h("p", { class: "note", role: "status" }), common = h("div");
  const rows = table(columns(), { label: "Samples, worst first", key: (row) => row.idx, onopen: (row) => open(row.idx), empty: "No sample matches." });
  const over = figure(runPath(run, "score-figure"), ask(), { signal, height: 250 });
  const notices = h("div");
  const hrefOf = (idx) => link("sample", { run, rest: [state.evaluation, idx], query: { metric: state.metric, where: state.where, with: state.with.slice(0, 1) } });
  const grid = sampleGrid({ run, signal, state, change: (values) => change(values), hrefOf, addFilter: (text) => addFilter(text), metric: () => state.metric });
  const embedding = embeddingMap({ run, signal, state, change: (values) => change(values), open, canOpen: (idx) => canAsk(runPath(run, "sample"), { evaluation: state.evaluation, idx, metric: state.metric }), addFilter: (text) => addFilter(text) });
  const classes = h("div", { class: "stack" }), changed = h("div");
  const worst = panel("Worst first", filters, problem, counted, notices, grid, h("div", { class: "window" }, rows));
  place.append(top, h("div", { class: "split wide" }, h("div", { class: "stack" }, maps, embedding, classes, common, over), h("div", { class: "stack" }, changed, worst)));

  function ask(more = {}) {
    return { evaluation: state.evaluation, metric: state.metric, with: state.with, ...more };
  }

  function columns() {
    const shown = [
      { name: "idx", title: "Sample", sortable: false, cell: (row) => h("a", { href: hrefOf(row.idx) }, row.idx) },
      { name: "label", title: "Label", sortable: false, number: true, cell: (row) => filterable(row, "label") },
      { name: "prediction", title: "Predicted", sortable: false, number: true, cell: (row) => filterable(row, "prediction") },
    ];
    const cell = (row, name) => (row.scores[name] === null ? h("span", { class: "bad" }, "nan") : short(row.scores[name]));
    const listed = info.metrics.slice(0, MOST_METRICS);
    // Of many metrics the chosen one has a column of its own, whose title follows the choice.
    if (listed.length < info.metrics.length) shown.push({ name: "chosen", get title() { return state.metric; }, sortable: false, number: true, cell: (row) => cell(row, state.metric) });
    for (const { name } of listed) shown.push({ name, title: name, sortable: false, number: true, cell: (row) => cell(row, name) });
    shown.push({ name: "captured", title: "Captured", sortable: false, cell: (row) => (row.captured ? "yes" : "") });
    return shown;
  }

  function filterable(row, name) {
    if (row[name] === null || row[name] === undefined) return "";
    const text = typeof row[name] === "number" ? String(row[name]) : JSON.stringify(row[name]);
    return filterButton(String(row[name]), `Only those with ${name} ${text}`, () => addFilter(`${name} == ${text}`));
  }

  function drawTop() {
    const at = scored.findIndex((each) => each.name === state.evaluation);
    const said = h("output", {}, scored[at].words);
    const slider = h("input", { type: "range", min: 0, max: scored.length - 1, step: 1, value: at, "aria-label": "Epoch",
      oninput: () => { said.textContent = scored[slider.value].words; later(() => change({ evaluation: scored[slider.value].name })); } });
    const others = everyRun.filter((each) => each.id !== run && !state.with.includes(each.id));
    const repeats = info.repeats.filter((each) => each !== run);
    replace(top, h("h1", {}, "Samples"),
      h("label", { class: "field" }, h("span", {}, "Epoch"), slider, said),
      choose("Metric", info.metrics.map((each) => [each.name, `${each.name} (${each.direction > 0 ? "more" : "less"} is better${each.guessed ? "?" : ""})`]), state.metric, (value) => change({ metric: value })),
      others.length ? choose("Compare with", [["", "another run…"], ...others.map((each) => [each.id, each.name])], "", (value) => value && change({ with: [...state.with, value] })) : null,
      repeats.length && !repeats.every((each) => state.with.includes(each))
        ? h("button", { type: "button", onclick: () => change({ with: [...new Set([...state.with, ...repeats])] }) }, `Average ${plural(repeats.length + 1, "repeat")}`) : null,
      state.with.map((each) => h("span", { class: "chip" }, nameOf(each), h("button", { type: "button", "aria-label": `Leave out ${nameOf(each)}`, onclick: () => change({ with: state.with.filter((one) => one !== each) }) }, "×"))),
      h("a", { class: "button", href: link("contrast", { run, query: { evaluation: state.evaluation, metric: state.metric } }) }, "Good against failed"));
  }

  const nameOf = (id) => everyRun.find((each) => each.id === id)?.name ?? id;

  function drawFilters() {
    const whole = state.where.map((each) => (state.where.length > 1 ? `(${each})` : each)).join(" and ");
    const command = `sonde query ${nameOf(run)} ${quoted(whole || "True")}${isLast() ? "" : ` --epoch ${state.evaluation}`}`;
    const copied = h("span", { class: "note", role: "status" });
    const copy = h("button", { type: "button", title: command, onclick: async () => {
      try { await navigator.clipboard.writeText(command); copied.textContent = "copied"; } catch { copied.textContent = command; }
    } }, "Copy as sonde query");
    const input = search("Filter", "", `${state.metric} > 0.5 and label in (3, 5)`, () => {});
    const field = input.querySelector("input");
    field.addEventListener("keydown", (event) => { if (event.key === "Enter" && field.value.trim()) addFilter(field.value.trim()); });
    field.title = `Columns: ${info.columns.join(", ")}. ${Object.values(info.functions).join(". ")}`;
    const ready = (text, where) => (isCopy && (state.where.length || !canAsk(runPath(run, "samples"), ask({ where, most: MOST_ROWS }))) ? null : h("button", { type: "button", onclick: () => addFilter(where) }, text));
    replace(filters, isCopy ? null : [input, h("button", { type: "button", onclick: () => field.value.trim() && addFilter(field.value.trim()) }, "Add")],
      ready("Misclassified", "label != prediction"), ready("Worst 20", `rank(${named(state.metric)}) <= 20`), copy, copied,
      h("div", { class: "chips" }, state.where.map((each, at) => h("span", { class: "chip mono" }, h("span", { class: "chiptext", title: each }, each),
        h("button", { type: "button", "aria-label": `Remove the filter ${each}`, onclick: () => change({ where: state.where.filter((_, one) => one !== at) }) }, "×")))));
    filters.dataset.command = command;
  }

  const isLast = () => scored.at(-1).name === state.evaluation;
  const quoted = (text) => `"${text.replace(/(["\\$`])/g, "\\$1")}"`;
  const named = (name) => (/^[A-Za-z_]\w*(\[\d+\])?$/.test(name) ? name : `score('${name}')`);

  function addFilter(text) {
    if (!state.where.includes(text)) change({ where: [...state.where, text] });
  }

  let timer = 0;
  function later(act) {
    clearTimeout(timer);
    timer = setTimeout(act, 80);
  }

  async function change(values) {
    const before = { ...state };
    Object.assign(state, values);
    problem.textContent = "";
    try {
      await draw(values);
    } catch (error) {
      if (error.name === "AbortError") return;
      Object.assign(state, before); // a filter that cannot be read is not kept
      problem.textContent = error.message;
    }
  }

  const keep = () => context.keep({ evaluation: state.evaluation, metric: state.metric, where: state.where, with: state.with, percentile: state.percentile === 10 ? null : state.percentile, overlay: state.overlay, of: state.of, method: state.method });

  async function draw(changed = null) {
    const mine = ++turn;
    const [listed, mask] = await Promise.all([
      getJson(runPath(run, "samples"), ask({ where: state.where, most: MOST_ROWS, with: null }), signal),
      state.where.length ? getBytes(runPath(run, "score-mask"), ask({ where: state.where, with: null }), signal).then((bytes) => new Uint8Array(bytes)) : null,
    ]);
    if (mine !== turn) return;
    if (changed !== null) keep(); // as soon as the list can be shown, so that a link is never behind what is seen
    drawTop();
    drawFilters();
    counted.textContent = listed.total === listed.of ? `${plural(listed.of, "sample")}, worst by ${state.metric} first` : `${count(listed.total)} of ${plural(listed.of, "sample")}, worst by ${state.metric} first`;
    if (listed.total > MOST_ROWS) counted.textContent += `; the first ${MOST_ROWS} are listed`;
    replace(notices, (listed.problems ?? []).map((text) => h("p", { class: "problem" }, text)));
    rows.show(listed.rows);
    await Promise.all([drawMaps(mask), drawCommon(), grid.show(listed.rows, state.evaluation), drawClasses(), drawChanges()]);
    const idOf = (row) => (ids ? ids[row] : String(row));
    embedding.show(state.evaluation, mask ? new Set([...mask.keys()].filter((row) => mask[row]).map(idOf)) : null).catch(() => {});
    if (changed === null || "metric" in changed || "with" in changed) over.update(ask());
  }

  async function drawClasses() {
    const answer = await getJson(runPath(run, "classes"), ask({ where: state.where, with: null }), signal);
    replace(classes, classPanels({ answer, metric: state.metric, named: named(state.metric), addFilter }));
  }

  async function drawChanges() {
    if (!state.with.length) { replace(changed); return; }
    try {
      const answer = await getJson(runPath(run, "changes"), ask({ with: state.with.slice(0, 1) }), signal);
      replace(changed, changesPanel({ answer, other: nameOf(state.with[0]), metric: state.metric, hrefOf }));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      replace(changed, panel("Changed predictions", h("p", { class: "quiet" }, error.message)));
    }
  }

  async function drawMaps(mask) {
    const all = [run, ...state.with], one = metric();
    const read = async (id) => ({
      name: nameOf(id),
      values: new Float32Array(await getBytes(runPath(id, "scores"), { evaluation: state.evaluation, metric: state.metric }, signal)),
      ids: (await getJson(runPath(id, "score-ids"), { evaluation: state.evaluation }, signal)).ids,
    });
    const [own, ...beside] = await Promise.all(all.map((id) => read(id).catch((error) => ({ name: nameOf(id), problem: error.message }))));
    if (own.problem) throw new Error(own.problem);
    ids = own.ids;
    const height = all.length > 1 ? 180 : 260;
    const boxes = [mapPanel(all.length > 1 ? own.name : "Score map", own.values, mask, height)];
    for (const each of beside) {
      boxes.push(each.problem || String(each.ids) !== String(own.ids)
        ? [panel(each.name, h("p", { class: "quiet" }, each.problem ?? "This run has other samples.")), null]
        : mapPanel(each.name, each.values, mask, height));
    }
    const same = beside.filter((each) => !each.problem && String(each.ids) === String(own.ids));
    if (same.length === 1) boxes.push(differencePanel(own, same[0], mask, height));
    if (state.with.length) boxes.unshift(await averaged(mask, own.values.length, height));
    const old = maps.clientHeight;
    maps.style.minHeight = `${old}px`; // the page must not jump while the epoch slider is moved
    replace(maps, boxes.map(([box]) => box));
    for (const [, drawIt] of boxes) drawIt?.();
    maps.style.minHeight = "";
    maps.dataset.low = String(one.low);
  }

  /** How much the score of each sample differs between two runs. */
  function differencePanel(own, other, mask, height) {
    const values = own.values.map((value, row) => value - other.values[row]), title = `${own.name} less ${other.name}`;
    const sizes = values.filter((value) => !Number.isNaN(value)).map(Math.abs).sort(), reach = sizes[Math.ceil(0.98 * (sizes.length - 1))] || 1;
    const map = scoreMap({ label: `${title}: ${state.metric}`, height, onopen: (row) => open(own.ids[row]),
      describe: (row, value) => `sample ${own.ids[row]}: ${Number.isNaN(value) ? "not scored in both" : `${short(own.values[row])} less ${short(other.values[row])} is ${short(value)}`}` });
    const worse = [`${own.name} worse`, `${own.name} better`];
    const box = h("section", { class: "panel", "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title), legend(-reach, reach, metric().direction, worse)), map);
    return [box, () => map.draw({ values, mask, low: -reach, high: reach, direction: metric().direction })];
  }

  async function averaged(mask, length, height) {
    try {
      const both = new Float32Array(await getBytes(runPath(run, "scores"), ask(), signal));
      return mapPanel(`Mean of ${state.with.length + 1} runs`, both.subarray(0, length), mask, height, both.subarray(length));
    } catch (error) {
      return [panel("Mean", h("p", { class: "quiet" }, error.message)), null];
    }
  }

  function mapPanel(title, values, mask, height, spread = null) {
    const one = metric();
    const idOf = (row) => (ids ? ids[row] : String(row));
    const map = scoreMap({ label: `${title}: ${state.metric} of ${values.length} samples`, height, onopen: (row) => open(idOf(row)),
      describe: (row, value) => `sample ${idOf(row)}: ${state.metric} ${Number.isNaN(value) ? "nan" : short(value)}${spread ? ` ± ${short(spread[row])}` : ""}` });
    const box = h("section", { class: "panel", "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title), legend(one.low, one.high, one.direction)), map);
    return [box, () => map.draw({ values, mask, low: one.low, high: one.high, direction: one.direction })];
  }

  async function drawCommon() {
    if (!state.with.length) return replace(common);
    const slider = h("input", { type: "range", min: 1, max: 95, value: state.percentile, "aria-label": "Percentile of failures", oninput: () => { said.textContent = `worst ${slider.value}%`; later(() => change({ percentile: Number(slider.value) })); } });
    const said = h("output", {}, `worst ${state.percentile}%`);
    let found;
    try {
      found = await getJson(runPath(run, "common-failures"), ask({ percentile: state.percentile }), signal);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return replace(common, panel("Common failures", h("p", { class: "quiet" }, error.message)));
    }
    const share = Float32Array.from(found.failed, (failed, row) => failed / Math.max(found.scored[row], 1));
    const map = scoreMap({ label: "Common failures", height: 180, onopen: (row) => open(found.ids[row]),
      describe: (row) => `sample ${found.ids[row]} fails in ${found.failed[row]} of ${plural(found.scored[row], "run")}` });
    const line = (row) => h("a", { class: "chip", href: link("sample", { run, rest: [state.evaluation, found.ids[row]], query: { metric: state.metric, with: state.with.slice(0, 1) } }) }, `${found.ids[row]} (${found.failed[row]}/${found.scored[row]})`);
    replace(common, h("section", { class: "panel", "aria-label": "Common failures" },
      h("div", { class: "head" }, h("h2", {}, "Common failures"), h("div", { class: "tools" }, legend(0, 1, -1, ["fails in all runs", "in none"]), h("label", { class: "field" }, slider, said))),
      h("p", { class: "note" }, `${plural(found.failures, "sample")} with ${found.metric} ${found.direction > 0 ? "at most" : "at least"} ${short(found.threshold)} in some of ${plural(found.runs, "run")}`),
      map, h("div", { class: "chips" }, found.worst.slice(0, 16).map(line))));
    map.draw({ values: share, mask: null, low: 0, high: 1, direction: -1, table: MAPS.score });
    return common;
  }

  try {
    await draw();
  } catch (error) {
    if (error.name === "AbortError" || !state.where.length) throw error;
    problem.textContent = error.message; // a link with a filter that cannot be read still shows the rest
    const asked = state.where;
    state.where = [];
    await draw();
    counted.textContent += `; not read: ${asked.join(", ")}`;
  }
  const step = (by) => {
    const at = scored.findIndex((each) => each.name === state.evaluation) + by;
    if (scored[at]) change({ evaluation: scored[at].name });
  };
  /** Take in what a live run added; a reader of the last epoch stays at the last epoch. */
  async function refresh() {
    const followed = isLast(), before = JSON.stringify(info);
    info = await getJson(runPath(run, "evaluations"), {}, signal);
    if (JSON.stringify(info) === before) return; // steps were added, but no scores
    scored = info.evaluations.filter((each) => each.scored);
    await change(followed ? { evaluation: scored.at(-1).name } : {});
    over.update(ask());
  }

  return {
    refresh: () => refresh().catch(() => {}),
    keys: [
      { keys: "j", what: "next sample", act: () => rows.move(1) },
      { keys: "k", what: "sample before", act: () => rows.move(-1) },
      { keys: "]", what: "next epoch", act: () => step(1) },
      { keys: "[", what: "epoch before", act: () => step(-1) },
    ],
  };
}
