// Scores by class, the confusion matrix, the histogram of scores: each a filter when clicked.
import { filterButton, h, isCopy, panel, svg } from "./dom.js";
import { table } from "./table.js";
import { count, percent, plural, short } from "./words.js";

const literal = (value) => (typeof value === "number" ? String(value) : JSON.stringify(value));

/** @param {Object} options `answer` of the server, `metric`, `named` the metric in a filter, `addFilter(text)` */
export function classPanels({ answer, metric, named, addFilter }) {
  return [histogramPanel(answer.histogram, metric, named, addFilter), answer.classes ? confusionPanel(answer.classes, addFilter) : null, answer.classes ? tablePanel(answer.classes, metric, addFilter) : null];
}

function histogramPanel({ edges, all, selected, not_finite: odd }, metric, named, addFilter) {
  const wide = 520, tall = 120, foot = 16, most = Math.max(...all, 1), bar = wide / all.length;
  const says = h("p", { class: "note", role: "status" }, `${short(edges[0])} to ${short(edges.at(-1))}${odd ? `; ${plural(odd, "score")} not finite` : ""}${isCopy ? "" : ". Click a bar to select its samples"}.`);
  const bars = all.map((number, at) => {
    const words = `${short(edges[at])} to ${short(edges[at + 1])}: ${plural(number, "sample")}${selected[at] === number ? "" : `, ${count(selected[at])} selected`}`;
    const high = (times) => (times ? Math.max(1, (times / most) * (tall - foot)) : 0);
    const pick = () => number && !isCopy && addFilter(`${named} >= ${edges[at]} and ${named} ${at === all.length - 1 ? "<=" : "<"} ${edges[at + 1]}`);
    return svg("g", { class: "histbar", tabindex: "0", role: "button", "aria-label": words, onclick: pick, onkeydown: (event) => { if (event.key === "Enter") pick(); }, onpointerenter: () => { says.textContent = words; }, onfocus: () => { says.textContent = words; } },
      svg("rect", { x: at * bar, y: 0, width: bar, height: tall - foot, class: "histhit" }),
      svg("rect", { x: at * bar + 1, y: tall - foot - high(number), width: bar - 2, height: high(number), class: "histall" }),
      svg("rect", { x: at * bar + 1, y: tall - foot - high(selected[at]), width: bar - 2, height: high(selected[at]), class: "histpart" }));
  });
  return panel(`Histogram of ${metric}`, svg("svg", { class: "sweep histogram", viewBox: `0 0 ${wide} ${tall}`, role: "group", "aria-label": `Histogram of ${metric}` }, bars,
    [0, 0.5, 1].map((share) => svg("text", { x: share * wide, y: tall - 3, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, short(edges[0] + share * (edges.at(-1) - edges[0]))))), says);
}

function confusionPanel({ rows, confusion, known, of }, addFilter) {
  const most = Math.max(1, ...confusion.flatMap((line, at) => line.filter((_, other) => other !== at)));
  const cell = (number, at, other) => {
    const right = at === other, share = right ? 0 : number / most, words = `label ${rows[at].label} predicted as ${rows[other].label}: ${plural(number, "sample")}`;
    return h("td", { class: `confused${right ? " right" : ""}`, style: { "--share": `${Math.round(100 * share)}%` } },
      number ? filterButton(count(number), words, () => addFilter(`label == ${literal(rows[at].label)} and prediction == ${literal(rows[other].label)}`)) : "");
  };
  const worst = confusion.flatMap((line, at) => line.map((number, other) => ({ number, at, other }))).filter((each) => each.at !== each.other && each.number).sort((a, b) => b.number - a.number).slice(0, 3);
  return panel("Confusion", h("p", { class: "note" }, `rows: label, columns: prediction${known < of ? `; ${count(known)} of ${plural(of, "sample")} have both` : ""}`),
    worst.length ? h("p", {}, "Most confused: ", worst.map((each, at) => [at ? ", " : "", h("b", {}, `${rows[each.at].label} as ${rows[each.other].label}`), ` (${each.number})`])) : h("p", {}, "Nothing is confused."),
    h("div", { class: "scroll" }, h("table", { class: "confusion", "aria-label": "Confusion" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), rows.map((row) => h("th", { scope: "col", class: "number" }, String(row.label))))),
      h("tbody", {}, confusion.map((line, at) => h("tr", {}, h("th", { scope: "row" }, String(rows[at].label)), line.map((number, other) => cell(number, at, other))))))));
}

function tablePanel({ rows }, metric, addFilter) {
  const grid = table([
    { name: "label", title: "Class", cell: (row) => filterButton(String(row.label), `Only those with label ${row.label}`, () => addFilter(`label == ${literal(row.label)}`)) },
    { name: "count", title: "Samples", number: true },
    { name: "recall", title: "Recall", hint: "share of samples with this label that were predicted as it", number: true, cell: (row) => percent(row.recall) },
    { name: "precision", title: "Precision", hint: "share of samples predicted as this that have the label", number: true, cell: (row) => percent(row.precision) },
    { name: "mean", title: `Mean ${metric}`, number: true, cell: (row) => short(row.mean) },
  ], { label: "By class", sort: "recall", key: (row) => String(row.label) });
  grid.show(rows);
  return panel("By class, worst recall first", grid);
}

/** What changed between two runs, sample by sample. */
export function changesPanel({ answer, other, metric, hrefOf }) {
  const better = (row) => row.difference * answer.direction > 0;
  const grid = table([
    { name: "idx", title: "Sample", cell: (row) => h("a", { href: hrefOf(row.idx) }, row.idx) },
    { name: "label", title: "Label", number: true, cell: (row) => String(row.label ?? "–") },
    { name: "before", title: other, number: true, cell: (row) => answerCell(row.before, row.label) },
    { name: "after", title: "this run", number: true, cell: (row) => answerCell(row.after, row.label) },
    { name: "other", title: `${metric}, ${other}`, number: true, cell: (row) => short(row.other) },
    { name: "score", title: `${metric}, this run`, number: true, cell: (row) => short(row.score) },
    { name: "difference", title: "Difference", number: true, value: (row) => (row.difference === null ? null : Math.abs(row.difference)), cell: (row) => h("span", { class: row.difference === 0 ? "quiet" : better(row) ? "good" : "bad" }, `${row.difference > 0 ? "+" : ""}${short(row.difference)}`) },
  ], { label: "Changed predictions", key: (row) => row.idx, empty: "The runs share no sample." });
  grid.show(answer.rows);
  const words = answer.known ? `${plural(answer.changed, "prediction")} of ${count(answer.known)} changed: ${count(answer.fixed)} became right, ${count(answer.broken)} became wrong.` : `${plural(answer.shared, "sample")} in both runs; predictions are not known.`;
  return panel(`Against ${other}`, h("p", {}, words), h("p", { class: "note" }, "changed predictions first, then by the difference of scores"), h("div", { class: "tall" }, grid));
}

const answerCell = (value, label) => h("span", { class: value === null || value === undefined || label === null || label === undefined ? "quiet" : value === label ? "good" : "bad" }, String(value ?? "–"));

