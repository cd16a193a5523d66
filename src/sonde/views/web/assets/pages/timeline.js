// What happened when: findings, events, checkpoints along the steps, and all events in words.
import { getJson, runPath } from "../api.js";
import { changes, choose, h, replace, search } from "../dom.js";
import { figure } from "../figure.js";
import { findingCard, keepOpen, openFindings } from "../finding.js";
import { table } from "../table.js";
import { timeAxis } from "../timeaxis.js";
import { clock, count, plural } from "../words.js";
import { unescaped } from "./overview.js";

export async function show(place, context) {
  const { run, signal } = context, axis = timeAxis(context);
  const counted = h("p", { class: "note", role: "status" }), found = h("div", { class: "findings" }), controls = h("div", { class: "controls" });
  const drawing = figure(runPath(run, "figure/timeline"), {}, { signal, onpoint: toWords });
  const grid = table([
    { name: "step", title: "Step", number: true, cell: (row) => (row.step === null ? "–" : h("button", { type: "button", class: "step", title: "Move the cursor of all pages to this step", "aria-pressed": String(row.step === axis.pinned), onclick: () => axis.pin(row.step) }, count(row.step))) },
    { name: "time", title: "Time (UTC)", cell: (row) => h("span", { class: "mono quiet" }, clock(row.time)) },
    { name: "type", title: "Event", cell: (row) => h("span", { class: `level-${row.level}` }, row.type.replaceAll("_", " ")) },
    { name: "message", title: "What happened", cell: (row) => details(row) },
  ], { label: "Events", sort: context.query.get("sort") ?? "-time", onsort: (sort) => context.keep({ sort }), key: (row) => row.id, onopen: () => {}, empty: "No event." });
  let rows = [], types = {};
  axis.subscribe(() => draw());

  function details(row) {
    if (!row.data || !Object.keys(row.data).length) return row.message;
    return h("details", {}, h("summary", {}, row.message || "data"), h("pre", {}, JSON.stringify(row.data, null, 2)));
  }

  /** Show in words what was clicked in the picture: a finding opened, or the events of a type with the one of that step. */
  function toWords({ x, y }) {
    const lane = unescaped(String(y));
    const card = [...found.children].find((each) => each.dataset.kind.replaceAll("_", " ") === lane);
    if (card && !(lane in types)) {
      card.open = true;
      keepOpen(context, found);
      card.querySelector("summary").focus();
      return;
    }
    context.keep({ type: lane });
    controls.querySelector("select").value = lane;
    draw();
    const row = rows.find((each) => each.type === lane && each.step === x);
    [...grid.querySelectorAll("tr[data-key]")].find((each) => each.dataset.key === row?.id)?.focus();
  }

  function draw() {
    const type = context.query.get("type") ?? "", words = (context.query.get("filter") ?? "").toLowerCase();
    const matching = rows.filter((row) => (!type || row.type === type) && `${row.type} ${row.message} ${row.step}`.toLowerCase().includes(words));
    counted.textContent = matching.length === rows.length ? plural(rows.length, "event") : `${count(matching.length)} of ${plural(rows.length, "event")}`;
    grid.show(matching);
  }

  async function read() {
    const [answer, overview] = await Promise.all([getJson(runPath(run, "events"), {}, signal), getJson(runPath(run), {}, signal)]);
    types = answer.types;
    rows = answer.events.map((each, id) => ({ ...each, id: String(id) }));
    if (!changes(found, overview.findings)) return overview;
    const open = openFindings(context, overview.findings, false);
    replace(found, overview.findings.map((each) => findingCard(each, run, { open: open.includes(each.kind), ontoggle: () => keepOpen(context, found) })));
    return overview;
  }

  const overview = await read();
  replace(controls, h("h1", {}, "Timeline"),
    search("Filter", context.query.get("filter") ?? "", "words of an event, or a step", (filter) => { context.keep({ filter }); draw(); }),
    choose("Event", [["", "all"], ...Object.entries(types).map(([type, number]) => [type, `${type.replaceAll("_", " ")} (${number})`])], context.query.get("type") ?? "", (type) => { context.keep({ type }); draw(); }));
  replace(place, controls, drawing, found, counted, grid);
  draw();
  return {
    title: overview.name,
    refresh: async () => { await Promise.all([read(), drawing.update()]); draw(); },
    keys: [
      { keys: "j", what: "next event", act: () => grid.move(1) },
      { keys: "k", what: "previous event", act: () => grid.move(-1) },
    ],
  };
}
