// Settings of many runs against a metric: parallel coordinates and a scatter, drawn as SVG from the rows of the runs.
import { h, replace, svg } from "./dom.js";
import { short } from "./words.js";

const WIDE = 900, TALL = 260, TOP = 34, FOOT = 22, SIDE = 60;

/** A scale from the values of some runs to 0…1: numbers by size (by magnitude where they span decades), words by order. */
export function axisOf(values) {
  const known = values.filter((each) => each !== null && each !== undefined);
  const numbers = known.length && known.every((each) => typeof each === "number" && Number.isFinite(each));
  if (!numbers) {
    const words = [...new Set(known.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    return { at: (value) => (value === null || value === undefined ? null : words.length > 1 ? words.indexOf(String(value)) / (words.length - 1) : 0.5), ticks: words.slice(0, 12), log: false };
  }
  const low = Math.min(...known), high = Math.max(...known), log = low > 0 && high / low > 20;
  const turn = log ? Math.log10 : (value) => value;
  const span = turn(high) - turn(low);
  const distinct = [...new Set(known)].sort((a, b) => a - b);
  const few = distinct.length <= 6 ? distinct : log ? decades(low, high) : [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
  return { at: (value) => (typeof value !== "number" || !Number.isFinite(value) ? null : span ? (turn(value) - turn(low)) / span : 0.5), ticks: few, log };
}

function decades(low, high) {
  const found = [low, high];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power < high; power += 1) if (10 ** power > low) found.push(10 ** power);
  return found.sort((a, b) => a - b);
}

/** The ticks that have room: none closer than `room` to the one before it, and the last one always. */
function apart(ticks, at, room) {
  const kept = [];
  for (const tick of [...ticks].reverse()) if (!kept.length || Math.abs(at(tick) - at(kept.at(-1))) >= room) kept.push(tick);
  return kept.reverse();
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const say = (value) => (typeof value === "number" ? short(value) : String(value));

/** Blue for the best, red for the worst, grey where the metric is not a number. */
function shade(share, direction) {
  if (share === null) return "var(--quiet)";
  const good = direction > 0 ? share : 1 - share;
  return `color-mix(in oklab, var(--spark) ${Math.round(100 * good)}%, var(--critical))`;
}

/**
 * Parallel coordinates: a line for each run through its settings to its metric.
 * @param {Object[]} runs  `{id, name, settings, value}`, where value is the metric or null
 * @param {string[]} names settings, an axis each
 * @param {{name: string, direction: number}} metric
 * @param {{open: (id: string) => void, says: HTMLElement}} to
 */
export function parallel(runs, names, metric, { open, says }) {
  const columns = [...names.map((name) => ({ name, of: (run) => run.settings[name] })), { name: metric.name, of: (run) => run.value }];
  const axes = columns.map(({ of }) => axisOf(runs.map(of)));
  const x = (at) => SIDE + (columns.length > 1 ? at / (columns.length - 1) : 0.5) * (WIDE - 2 * SIDE), y = (share) => TOP + (1 - share) * (TALL - TOP - FOOT);
  const last = axes.at(-1);
  const lines = runs.map((run) => {
    const points = columns.map(({ of }, at) => [x(at), axes[at].at(of(run))]);
    const path = points.map(([left, share], at) => (share === null ? "" : `${at && points[at - 1][1] !== null ? "L" : "M"}${left.toFixed(1)} ${y(share).toFixed(1)}`)).join("");
    const words = `${run.name}: ${columns.map(({ name, of }) => `${name} ${say(of(run) ?? "–")}`).join(", ")}`;
    return svg("path", { d: path, class: "sweepline", "data-run": run.id, style: { stroke: shade(last.at(run.value), metric.direction) }, tabindex: "0", role: "link", "aria-label": words,
      onpointerenter: () => { says.textContent = words; }, onfocus: () => { says.textContent = words; }, onclick: () => open(run.id), onkeydown: (event) => { if (event.key === "Enter") open(run.id); } });
  });
  const frame = columns.map(({ name }, at) => svg("g", { class: "axis" },
    svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: TALL - FOOT }),
    svg("text", { x: x(at), y: 14, "text-anchor": "middle", class: "axisname" }, trimmed(name, columns.length), svg("title", {}, name)),
    apart(axes[at].ticks, (tick) => y(axes[at].at(tick) ?? 0.5), 12).map((tick) => svg("text", { x: x(at) + 6, y: y(axes[at].at(tick) ?? 0.5) + 4 }, say(tick))),
    axes[at].log ? svg("text", { x: x(at), y: TALL - 4, "text-anchor": "middle" }, "log") : null));
  return svg("svg", { class: "sweep", viewBox: `0 0 ${WIDE} ${TALL}`, role: "group", "aria-label": `Parallel coordinates: ${columns.map((each) => each.name).join(", ")}` }, lines, frame);
}

const trimmed = (name, count, all = 110) => { const room = Math.max(Math.floor(all / count), 4); return name.length > room ? `…${name.slice(1 - room)}` : name; };

/** A setting against the metric: a dot for each run, and the mean of runs with the same value. */
export function scatter(runs, name, metric, { open, says }) {
  const across = axisOf(runs.map((run) => run.settings[name])), up = axisOf(runs.map((run) => run.value));
  const x = (share) => SIDE + share * (WIDE / 2 - 2 * SIDE), y = (share) => TOP + (1 - share) * (TALL - TOP - FOOT);
  const drawn = runs.filter((run) => across.at(run.settings[name]) !== null && up.at(run.value) !== null);
  const means = new Map();
  for (const run of drawn) means.set(run.settings[name], [...(means.get(run.settings[name]) ?? []), run.value]);
  const average = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
  const dots = drawn.map((run) => {
    const words = `${run.name}: ${name} ${say(run.settings[name])}, ${metric.name} ${say(run.value)}`;
    return svg("circle", { cx: x(across.at(run.settings[name])).toFixed(1), cy: y(up.at(run.value)).toFixed(1), r: 4.5, class: "sweepdot", tabindex: "0", role: "link", "aria-label": words,
      onpointerenter: () => { says.textContent = words; }, onfocus: () => { says.textContent = words; }, onclick: () => open(run.id), onkeydown: (event) => { if (event.key === "Enter") open(run.id); } });
  });
  const bars = [...means].filter(([, values]) => values.length > 1).map(([value, values]) => svg("line", { x1: x(across.at(value)) - 14, x2: x(across.at(value)) + 14, y1: y(up.at(average(values))), y2: y(up.at(average(values))), class: "sweepmean" }, svg("title", {}, `mean of ${values.length} runs: ${say(average(values))}`)));
  return svg("svg", { class: "sweep half", viewBox: `0 0 ${WIDE / 2} ${TALL}`, role: "group", "aria-label": `${metric.name} against ${name}` },
    svg("g", { class: "axis" }, svg("line", { x1: SIDE - 12, x2: SIDE - 12, y1: TOP, y2: TALL - FOOT }), svg("line", { x1: SIDE - 12, x2: WIDE / 2 - SIDE + 12, y1: TALL - FOOT, y2: TALL - FOOT }),
      apart(up.ticks, (tick) => y(up.at(tick) ?? 0.5), 12).map((tick) => svg("text", { x: SIDE - 16, y: y(up.at(tick) ?? 0.5) + 4, "text-anchor": "end" }, say(tick))),
      apart(across.ticks, (tick) => x(across.at(tick) ?? 0.5), 44).map((tick) => svg("text", { x: x(across.at(tick) ?? 0.5), y: TALL - 8, "text-anchor": "middle" }, trimmed(say(tick), across.ticks.length, 48), svg("title", {}, say(tick)))),
      svg("text", { x: SIDE - 12, y: 14, class: "axisname" }, `${metric.name} against ${name}${across.log ? " (log)" : ""}`)), bars, dots);
}

/**
 * Both pictures, with the choice of metric and setting.
 * @param {Object} options `runs` rows with `settings` and `metrics`; `names` settings that differ; `state` `{metric, which, x}`;
 *   `change(values)`; `open(id)`
 */
export function sweepPanel({ runs, names, metrics, state, change, open, choose }) {
  const says = h("p", { class: "note", role: "status" }, "Point at a line or dot; click to open its run.");
  const which = state.which === "last" ? "last" : "best";
  const listed = runs.map((run) => ({ ...run, value: isNumber(run.metrics[state.metric]?.[which]) ? run.metrics[state.metric][which] : null }));
  const direction = runs.map((run) => run.metrics[state.metric]?.direction).find(Boolean) ?? 1;
  const metric = { name: `${state.metric} (${which})`, direction };
  const missing = listed.filter((run) => run.value === null).map((run) => run.name);
  const shown = names.slice(0, 8), x = shown.includes(state.x) ? state.x : shown[0];
  const body = h("div", { class: "sweeps" });
  replace(body, parallel(listed, shown, metric, { open, says }), scatter(listed, x, metric, { open, says }));
  return h("section", { class: "panel", "aria-label": "Settings against a metric" },
    h("div", { class: "head" }, h("h2", {}, "Settings against a metric"), h("div", { class: "tools" },
      choose("Metric", metrics, state.metric, (value) => change({ metric: value })), choose("Value", [["best", "best"], ["last", "last"]], which, (value) => change({ which: value })),
      choose("Scatter over", shown, x, (value) => change({ x: value })))),
    body, says, missing.length ? h("p", { class: "note" }, `Not finite or not logged in: ${missing.join(", ")}`) : null);
}
