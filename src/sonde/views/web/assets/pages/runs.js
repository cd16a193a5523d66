// All runs: what was set, how it went, what is wrong; filter, sort, group by settings, and choose some to compare.
import { getJson } from "../api.js";
import { spark } from "../canvas/spark.js";
import { choose, h, replace, search } from "../dom.js";
import { link } from "../route.js";
import { sweepPanel } from "../sweep.js";
import { table } from "../table.js";
import { ago, clock, count, kindWords, plural, short } from "../words.js";

const EVERY_MS = 3000, AT_ONCE = 12, MOST_SETTINGS = 5;
const CALM = { finished: true, live: true, interrupted: true };

export async function show(place, context) {
  const known = new Map(), chosen = new Set(context.query.getAll("run")), opened = new Set(context.query.getAll("open"));
  let rows = [], groups = null, lastAnswer = "", reading = false, differing = [], usual = [];
  const counted = h("p", { class: "note", role: "status" }), compare = h("a", { class: "button", href: "#" });
  const controls = h("div", { class: "controls" }), sweep = h("div");
  const grid = table([], {
    label: "Runs", sort: context.query.get("sort") ?? "-created", empty: "No run matches.",
    onsort: (sort) => context.keep({ sort }),
    onopen: (row) => { if (row.children) fold(row); else location.hash = link("overview", { run: row.id }); },
  });
  const asked = (name) => context.query.get(name) ?? "";
  const of = (row) => known.get(row.id) ?? {};

  // Columns ---------------------------------------------------------------------------------------------------------

  /** The metrics of the runs that match, those of most runs first. */
  function metricNames() {
    const times = new Map();
    for (const row of matching()) for (const name of Object.keys(of(row).metrics ?? {})) times.set(name, (times.get(name) ?? 0) + 1);
    return [...times].sort((a, b) => b[1] - a[1]).map(([name, runs]) => ({ name, runs }));
  }

  /** The metrics that say most: those of at least half of the runs that are not a training loss. */
  function usualMetrics() {
    const losses = new Set(rows.map((row) => of(row).loss)), half = matching().length / 2;
    return metricNames().filter(({ name, runs }) => !losses.has(name) && runs >= half).map(({ name }) => name);
  }

  /** The metrics with a column: those the address names, else the first two that say most, as their best. */
  function shownMetrics() {
    if (context.query.has("show")) return context.query.getAll("show").filter((each) => each !== "-");
    return usualMetrics().slice(0, 2).map((name) => `best ${name}`);
  }

  const number = (value) => (typeof value === "string" ? NaN : value);
  const inWords = (value) => (typeof value === "string" ? h("span", { class: "bad" }, value) : short(value));

  function metricColumn(text) {
    const [which, ...rest] = text.split(" "), name = rest.join(" ");
    const value = (row) => (row.children ? row.group[which][name]?.mean : of(row).metrics?.[name]?.[which]) ?? null;
    const cell = (row) => {
      if (!row.children) return inWords(value(row));
      const spread = row.group[which][name];
      return spread ? h("span", {}, inWords(spread.mean), spread.deviation === null ? "" : h("span", { class: "quiet" }, " ± ", inWords(spread.deviation))) : "–";
    };
    return { name: `${which} ${name}`, title: `${name}, ${which}`, number: true, hint: which === "best" ? "the best value at any step" : "the last value",
      value: (row) => (Number.isNaN(number(value(row))) ? Infinity : value(row)), cell };
  }

  function columns() {
    const settings = differing.filter((name) => name !== "model" && name !== "parameters").slice(0, MOST_SETTINGS).map((name) => ({ name: `set ${name}`, title: name, number: true,
      value: (row) => (row.children ? row.group.settings?.[name] : of(row).settings?.[name]) ?? null, cell: (row) => (row.children ? "" : say(of(row).settings?.[name])) }));
    const models = new Set(rows.map((row) => row.model));
    return [
      { name: "pick", title: "", sortable: false, cell: (row) => h("input", { type: "checkbox", "aria-label": `Compare ${row.name}`,
        checked: row.children ? row.children.every((each) => chosen.has(each.id)) : chosen.has(row.id), onchange: (event) => pick(row.children ?? [row], event.target.checked) }) },
      { name: "name", title: "Run", cell: nameCell },
      { name: "status", title: "Status", cell: (row) => (row.children ? statuses(row.children) : h("span", { class: `status ${row.status}` }, row.status)) },
      { name: "worst", title: "Findings", value: rank, cell: troubleCell },
      ...settings,
      { name: "last_loss", title: "Loss", number: true, hint: "the last training loss", value: (row) => (typeof lossOf(row) === "string" ? Infinity : lossOf(row)), cell: (row) => inWords(lossOf(row)) },
      ...shownMetrics().map(metricColumn),
      { name: "spark", title: "Loss over steps", sortable: false, cell: sparkCell },
      { name: "last_step", title: "Step", number: true, cell: (row) => (row.children ? "" : count(row.last_step)) },
      models.size > 1 ? { name: "model", title: "Model" } : null,
      { name: "created", title: "Started", number: true, value: (row) => (row.children ? Math.max(...row.children.map((each) => each.created ?? 0)) : row.created), cell: (row) => (row.children ? "" : h("span", { title: row.created ? clock(row.created) : "" }, ago(row.created))) },
    ].filter(Boolean);
  }

  const say = (value) => (value === null || value === undefined ? h("span", { class: "quiet" }, "–") : typeof value === "number" ? short(value) : String(value));
  const lossOf = (row) => (row.children ? Object.entries(row.group.last).find(([name]) => row.children.some((each) => of(each).loss === name))?.[1].mean ?? null : row.last_loss);

  function nameCell(row) {
    if (row.children) return h("button", { type: "button", class: "plain left", "aria-expanded": String(Boolean(row.open)), onclick: () => fold(row) }, `${row.open ? "▾" : "▸"} ${row.name} `, h("span", { class: "quiet" }, plural(row.children.length, "run")));
    const name = row.problem ? h("span", { class: "name" }, row.name) : h("a", { class: "name", href: link("overview", { run: row.id }) }, row.name);
    const { tags = [], note = "" } = of(row).labels ?? {};
    const chips = tags.map((tag) => h("button", { type: "button", class: "chip tag", title: `Only runs with the tag ${tag}`, onclick: () => filterBy(`tag:${tag}`) }, tag));
    return [name, chips.length || note ? h("span", { class: "labels" }, chips, note ? h("span", { class: "quiet", title: note }, note.split("\n")[0].slice(0, 80)) : null) : null];
  }

  function statuses(runs) {
    const seen = new Map();
    for (const { status } of runs) seen.set(status, (seen.get(status) ?? 0) + 1);
    return [...seen].map(([status, times], at) => [at ? ", " : "", h("span", { class: `status ${status}` }, runs.length > 1 ? `${times} ${status}` : status)]);
  }

  const ranks = { info: 1, warning: 2, critical: 3 };
  function rank(row) {
    if (row.children) return Math.max(...row.children.map(rank));
    return row.problem ? 4 : ranks[of(row).severity] ?? (CALM[row.status] ? 0 : 3);
  }

  function troubleCell(row) {
    if (row.children) {
      const found = Object.entries(row.group.troubles);
      return found.length ? found.slice(0, 3).map(([kind, times], at) => [at ? ", " : "", h("span", { class: "severity warning" }, `${kindWords(kind)} in ${times}`)]) : row.children.every((each) => of(each).judged) ? h("span", { class: "quiet" }, "none") : "";
    }
    if (row.problem) return h("span", { class: "bad" }, row.problem);
    const read = known.get(row.id);
    if (!read) return h("span", { class: "quiet" }, "reading…");
    if (read.problem) return h("span", { class: "bad" }, read.problem);
    const [worst, ...more] = read.troubles;
    if (!worst) return h("span", { class: "quiet" }, read.judged ? "none" : "not judged");
    return [h("a", { class: `severity ${worst.severity}`, title: worst.cause, href: link("overview", { run: row.id, query: { open: worst.kind } }) }, kindWords(worst.kind)),
      more.length ? h("span", { class: "quiet", title: more.map((each) => kindWords(each.kind)).join(", ") }, ` and ${more.length} more`) : ""];
  }


  function sparkCell(row) {
    const curve = of(row).spark;
    return !row.children && curve ? spark(curve.values, { label: `${curve.name}, from ${short(curve.values[0])} to ${short(curve.values.at(-1))}` }) : "";
  }

  // Choosing, filtering, grouping -----------------------------------------------------------------------------------

  function pick(some, wanted) {
    for (const { id } of some) if (wanted) chosen.add(id); else chosen.delete(id);
    context.keep({ run: [...chosen] });
    draw();
  }

  function fold(row) {
    if (opened.has(row.name)) opened.delete(row.name); else opened.add(row.name);
    context.keep({ open: [...opened] });
    draw();
  }

  function filterBy(text) {
    const before = asked("filter");
    context.keep({ filter: before.includes(text) ? before : `${before} ${text}`.trim() });
    drawControls();
    draw();
  }

  /** Whether a run matches one word: `lr=0.03`, `val_acc>0.9`, `tag:good`, or a text in its name, model, status, findings or note. */
  function matches(row, word) {
    const read = of(row), found = word.match(/^(.+?)(>=|<=|!=|=|>|<)(.*)$/);
    if (word.startsWith("tag:")) return (read.labels?.tags ?? []).some((each) => each.toLowerCase() === word.slice(4));
    if (found) {
      const [, name, relation, wanted] = found;
      const lookUp = (from) => Object.entries(from ?? {}).find(([key]) => key.toLowerCase() === name)?.[1];
      const value = lookUp(read.settings) ?? lookUp(read.metrics)?.best ?? lookUp(row);
      if (value === undefined || value === null) return false;
      const [left, right] = Number.isFinite(Number(wanted)) && typeof value === "number" ? [value, Number(wanted)] : [String(value).toLowerCase(), wanted];
      return { ">=": left >= right, "<=": left <= right, "!=": left !== right, "=": left === right, ">": left > right, "<": left < right }[relation];
    }
    const text = `${row.name} ${row.model} ${row.status} ${(read.troubles ?? []).map((each) => `${each.kind} ${kindWords(each.kind)}`).join(" ")} ${read.labels?.note ?? ""} ${(read.labels?.tags ?? []).join(" ")}`;
    return text.toLowerCase().includes(word);
  }

  function matching() {
    const wanted = asked("filter").toLowerCase().split(/\s+/).filter(Boolean), status = asked("status");
    return rows.filter((row) => (!status || row.status === status) && wanted.every((word) => matches(row, word)));
  }

  const grouping = () => (asked("group") === "usual" ? usual : context.query.getAll("group"));

  /** Ask which settings differ among the runs that match, and for their groups. */
  async function readGroups() {
    const some = matching().filter((row) => !row.problem), by = grouping();
    const answer = await getJson("rows", { by, run: some.length === rows.length ? [] : some.map((row) => row.id) }, context.signal);
    differing = answer.differing.filter((name) => !/^(watch|helpers)\./.test(name));
    usual = answer.grouping.filter((name) => differing.includes(name));
    if (asked("group") === "usual" && String(by) !== String(usual)) { await readGroups(); return; }
    groups = by.length ? answer.groups : null;
    if (!controls.querySelector("input:focus")) drawControls();
    draw();
  }

  function grouped(some) {
    if (!groups) return some;
    const byId = new Map(some.map((row) => [row.id, row]));
    const made = groups.map((group) => {
      const children = group.runs.map((id) => byId.get(id)).filter(Boolean);
      const settings = Object.fromEntries(grouping().map((name) => [name, of(children[0] ?? {}).settings?.[name]]));
      return { id: `group ${group.name}`, name: group.name, children, group: { ...group, settings }, open: opened.has(group.name) };
    }).filter((row) => row.children.length);
    const inside = new Set(groups.flatMap((group) => group.runs));
    return [...made, ...some.filter((row) => !inside.has(row.id))];
  }

  // Drawing ---------------------------------------------------------------------------------------------------------

  function draw() {
    const some = matching();
    counted.textContent = some.length === rows.length ? plural(rows.length, "run") : `${some.length} of ${plural(rows.length, "run")}`;
    const troubled = some.filter((row) => rank(row) >= 3).length;
    const unread = some.filter((row) => !known.has(row.id) && !row.problem).length;
    if (unread) counted.append(` · reading ${unread}…`);
    if (troubled) counted.append(" · ", h("span", { class: "bad" }, `${troubled} with a critical finding or a bad end`));
    grid.show(grouped(some), columns());
    drawCompare(some);
    drawSweep(some);
  }

  function drawCompare(some) {
    const ids = chosen.size ? [...chosen] : some.filter((row) => !row.problem).map((row) => row.id);
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : `Compare all ${ids.length}`;
    compare.setAttribute("href", link("compare", { query: { run: ids, by: grouping() } }));
    compare.toggleAttribute("data-off", ids.length < 2);
    compare.setAttribute("aria-disabled", String(ids.length < 2));
  }

  function drawSweep(some) {
    const runs = some.filter((row) => of(row).settings).map((row) => ({ id: row.id, name: row.name, settings: of(row).settings, metrics: of(row).metrics }));
    const values = (name) => runs.map((run) => run.settings[name]).filter((each) => each !== null && each !== undefined);
    const names = differing.filter((name) => new Set(values(name)).size > 1 && !(typeof values(name)[0] === "string" && new Set(values(name)).size === values(name).length)), metrics = metricNames().map(({ name }) => name);
    if (runs.length < 3 || !names.length || !metrics.length) { replace(sweep); return; }
    const metric = metrics.includes(asked("metric")) ? asked("metric") : usualMetrics()[0] ?? metrics[0];
    replace(sweep, sweepPanel({ runs, names, metrics, choose, state: { metric, which: asked("which"), x: asked("x") },
      change: (values) => { context.keep(values); drawSweep(some); }, open: (run) => { location.hash = link("overview", { run }); } }));
  }

  function drawControls() {
    const statusNames = ["live", "finished", "interrupted", "failed", "crashed", "damaged"];
    const group = asked("group"), options = [["", "nothing"], ...(usual.length ? [["usual", `${usual.join(", ")} (repeats together)`]] : []), ...differing];
    const offered = metricNames().flatMap(({ name }) => [`last ${name}`, `best ${name}`]);
    const shown = new Set(shownMetrics());
    const toggle = (text, wanted) => {
      if (wanted) shown.add(text); else shown.delete(text);
      context.keep({ show: shown.size ? [...shown] : ["-"] });
      draw();
    };
    replace(controls, h("h1", {}, "Runs"),
      search("Filter", asked("filter"), "name, finding, lr=0.03, val_acc>0.9, tag:best", (filter) => { context.keep({ filter }); regroup(); }),
      choose("Status", [["", "all"], ...statusNames], asked("status"), (status) => { context.keep({ status }); regroup(); }),
      differing.length ? choose("Group by", options, options.some((each) => [each].flat()[0] === group) ? group : "", (value) => { context.keep({ group: value }); regroup(); }) : null,
      offered.length ? h("details", { class: "menu" }, h("summary", { class: "button" }, "Columns"), h("div", { class: "menubody" }, offered.map((text) => h("label", {}, h("input", { type: "checkbox", checked: shown.has(text), onchange: (event) => toggle(text, event.target.checked) }), ` ${text.replace(/^(\w+) (.*)$/, "$2, $1")}`)))) : null,
      compare);
  }

  const regroup = () => { draw(); readGroups().catch(lost); };

  // Reading ---------------------------------------------------------------------------------------------------------

  const stampOf = (row) => `${row.last_step} ${row.status} ${row.labelled}`;

  /** Rows are read a few runs at a time: a folder of a hundred runs must not keep the page empty. */
  async function readRows() {
    if (reading) return; // the last round goes on, and the next one takes what is new since
    reading = true;
    try {
      for (;;) {
        const waiting = rows.filter((row) => !row.problem && known.get(row.id)?.of !== stampOf(row)).slice(0, AT_ONCE);
        if (!waiting.length) break;
        const answer = await getJson("rows", { run: waiting.map((row) => row.id) }, context.signal);
        for (const row of waiting) known.set(row.id, { ...(answer.rows[row.id] ?? { problem: "It is gone.", troubles: [] }), of: stampOf(row) });
        draw();
      }
      await readGroups();
    } finally {
      reading = false;
    }
  }

  async function read() {
    const answer = await getJson("runs", {}, context.signal), text = JSON.stringify([answer.runs, Math.floor(Date.now() / 60000)]);
    if (text === lastAnswer) return; // nothing new: what is open or has the focus stays as it is
    lastAnswer = text;
    rows = answer.runs;
    if (!rows.length) {
      replace(place, h("div", { class: "empty" }, h("h1", {}, "No runs yet"),
        h("p", {}, `Nothing was recorded below ${answer.roots.join(", ")}.`),
        (answer.notices ?? []).map((text) => h("p", { class: "problem" }, text)),
        h("p", {}, "Create one with ", h("code", {}, "sonde.watch(model, optimizer, run=\"runs/first\")"), ". This page shows it as soon as it is there.")));
      return;
    }
    if (!grid.isConnected || !place.contains(grid)) {
      drawControls();
      replace(place, controls, counted, grid, sweep);
    }
    draw();
    readRows().catch(lost);
  }

  function lost(error) {
    if (error.name === "AbortError") return;
    lastAnswer = "";
    counted.textContent = error.message;
  }

  await read();
  const timer = setInterval(() => { if (!document.hidden) read().catch(lost); }, EVERY_MS);
  context.signal.addEventListener("abort", () => clearInterval(timer));
  return {
    keys: [
      { keys: "j", what: "next run", act: () => grid.move(1) },
      { keys: "k", what: "previous run", act: () => grid.move(-1) },
      { keys: "x", what: "choose the run to compare it", act: () => place.querySelector("tr.current input[type=checkbox]")?.click() },
    ],
  };
}
