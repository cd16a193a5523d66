// The ranks of a run: which one the others wait for, what each is doing, their times over the steps, and how far they lie apart.
import { getJson, runPath } from "../api.js";
import { choose, h, panel, replace } from "../dom.js";
import { figure } from "../figure.js";
import { table } from "../table.js";
import { bytes, count, kindWords, lasting, plural, short } from "../words.js";

const EVERY_MS = 2000;
const LEVELS = { died: "bad", stuck: "bad", silent: "bad", waiting: "odd" };

export async function show(place, context) {
  const { run, signal } = context;
  const at = (name) => runPath(run, `figure/${name}`);
  let answer = await getJson(runPath(run, "ranks"), {}, signal);
  const [info, { statistics }] = await Promise.all([getJson(runPath(run), {}, signal), getJson("statistics", {}, signal)]);
  const stats = statistics.filter((each) => each.shown === "always").map((each) => [each.name, each.title]);
  if (!answer.total) {
    replace(place, h("div", { class: "controls" }, h("h1", {}, "Ranks")), panel("One process", h("p", { class: "quiet" },
      "This run has no heartbeats. They are written when several ranks train together, with no option to set.")));
    return { title: info.name, refresh: async () => {} };
  }

  const found = h("div", { class: "findings" }), counted = h("p", { class: "note", role: "status" }), stack = h("div", { class: "stack" });
  const grid = table([
    { name: "rank", title: "Rank", number: true, cell: (row) => count(row.rank) },
    { name: "condition", title: "State", cell: (row) => h("span", { class: `level-${LEVELS[row.condition] ?? "fine"}` }, row.condition ?? "–") },
    { name: "step", title: "Step", number: true, cell: (row) => count(row.step) },
    { name: "phase", title: "Phase", cell: (row) => phase(row) },
    { name: "still_s", title: "No progress for", number: true, cell: (row) => (row.condition === "ended" ? "–" : lasting(row.still_s)) },
    { name: "own_s", title: "Own time", number: true, cell: (row) => lasting(row.own_s) },
    { name: "wait_s", title: "Waits", number: true, cell: (row) => lasting(row.wait_s) },
    { name: "relative", title: "Score", number: true, cell: (row) => short(row.relative === null ? null : Number(row.relative.toFixed(2))) },
    { name: "memory", title: "Memory", number: true, cell: (row) => bytes(row.memory) },
    { name: "device", title: "Device", cell: (row) => h("span", { class: "mono" }, row.device) },
    { name: "host", title: "Host", cell: (row) => h("span", { class: "mono" }, row.host) },
    { name: "where", title: "Line", cell: (row) => h("span", { class: "mono quiet", title: row.where, style: { "white-space": "nowrap" } }, row.where.split("/").pop()) },
    { name: "stacks", title: "", sortable: false, cell: (row) => (row.stacks ? h("button", { type: "button", onclick: () => showStack(row.rank) }, "Stacks") : "") },
  ], { label: "Ranks", key: (row) => String(row.rank), onopen: (row) => showStack(row.rank), empty: "No rank." });

  const phase = (row) => (row.condition === "waiting" && row.collective ? `${row.phase} (${row.collective})` : (row.phase ?? "–").replace("_", " "));

  async function showStack(rank) {
    const ofRank = await getJson(runPath(run, `rank/${rank}`), {}, signal);
    const entries = ofRank.collectives.slice(-8).map((each) => h("li", { class: "mono" }, `${each.profiling_name} ${each.collective_seq_id ?? ""} ${each.state ?? ""}`));
    replace(stack, panel(`Rank ${rank}`, ofRank.stacks ? h("pre", {}, ofRank.stacks) : h("p", { class: "quiet" }, "It has written no stacks: it never stood still."),
      entries.length ? h("p", { class: "note" }, "The last collectives that torch's flight recorder knew of:") : null, entries.length ? h("ol", {}, entries) : null));
    stack.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    const states = {};
    for (const row of answer.ranks) states[row.condition ?? "unknown"] = (states[row.condition ?? "unknown"] ?? 0) + 1;
    counted.textContent = `${plural(answer.total, "rank")}: ${Object.entries(states).map(([name, number]) => `${count(number)} ${name}`).join(", ")}`;
    replace(found, answer.findings.map((each) => h("section", { class: `panel finding ${each.severity}`, style: { "padding-bottom": "8px" } }, h("p", {}, h("span", { class: `severity ${each.severity}` }, each.severity), " ", h("b", {}, kindWords(each.kind))), h("p", {}, each.cause), h("p", { class: "note" }, each.fix))));
    grid.show(answer.ranks);
  }

  const heat = figure(at("ranks"), what(), { signal, tools: [choose("Show", answer.shown, context.query.get("what") ?? "own", (next) => { context.keep({ what: next === "own" ? "" : next }); heat.update(what()); })] });
  function what() {
    const chosen = context.query.get("what");
    return chosen ? { what: chosen } : {};
  }
  const bars = figure(at("rank-phases"), {}, { signal, height: 360 });
  const apart = figure(at("rank-spread"), spread(), { signal, height: 360, tools: answer.sites.length ? [choose("Site", answer.sites, context.query.get("site") ?? answer.sites[0], (next) => pick({ site: next })), choose("Statistic", [["", "usual"], ...stats], context.query.get("stat") ?? "", (next) => pick({ stat: next }))] : [] });
  function pick(next) {
    context.keep(next);
    apart.update(spread());
  }
  function spread() {
    return Object.fromEntries(["site", "stat"].map((name) => [name, context.query.get(name)]).filter(([, value]) => value));
  }

  async function read() {
    answer = await getJson(runPath(run, "ranks"), {}, signal);
    draw();
  }

  draw();
  replace(place, h("div", { class: "controls" }, h("h1", {}, "Ranks"), counted), found, heat, h("div", { class: "columns" }, bars, apart), panel("What each rank does", grid), stack);
  // A rank that stands still writes nothing but its heartbeat, so this page asks by itself while the run is live.
  if (info.status === "live") {
    const timer = setInterval(() => read().catch(() => {}), EVERY_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
  }
  return { title: info.name, refresh: async () => { await read(); [heat, bars, apart].forEach((each) => each.update()); } };
}
