// Several runs beside each other: what was set differently, how they went, where they part, how their layers differ.
import { getJson } from "../api.js";
import { changes, choose, h, panel, replace } from "../dom.js";
import { figure } from "../figure.js";
import { link } from "../route.js";
import { table } from "../table.js";
import { count, kindWords, lasting, plural, short } from "../words.js";

const EVERY_MS = 3000, MOST_BESIDE = 6;

export async function show(place, context) {
  const { signal } = context;
  const runs = (await getJson("runs", {}, signal)).runs.filter((each) => !each.problem);
  const ids = context.query.getAll("run");
  const picker = h("div", { class: "controls" }, h("h1", {}, "Compare"),
    ids.length > MOST_BESIDE ? h("details", { class: "options" }, h("summary", {}, plural(ids.length, "run")), h("div", { class: "chips" }, ids.map(chip))) : ids.map(chip),
    choose("Add", [["", "a run…"], ...runs.filter((each) => !ids.includes(each.id)).map((each) => [each.id, each.name])], "", (id) => { location.hash = context.here({ run: [...ids, id] }); }));

  function chip(id) {
    return h("span", { class: "chip" }, nameOf(id), h("a", { href: context.here({ run: ids.filter((each) => each !== id) }), "aria-label": `Leave out ${nameOf(id)}` }, " ✕"));
  }

  function nameOf(id) {
    return runs.find((each) => each.id === id)?.name ?? id;
  }

  if (ids.length < 2) {
    replace(place, picker, h("div", { class: "empty" }, h("p", {}, ids.length ? "Add a second run to compare this one with." : "Choose two or more runs, here or on the page of runs.")));
    return {};
  }
  let [info, sweep] = await Promise.all([getJson("compare", { run: ids }, signal), getJson("rows", { run: ids }, signal)]), parted = false;
  const by = context.query.getAll("by"), offered = sweep.differing.filter((name) => !/^(watch|helpers)\./.test(name));
  picker.append(...[offered.length && ids.length > 2 ? choose("Group by", [["", "nothing"], ...(sweep.grouping.length > 1 ? [[sweep.grouping.join("\n"), sweep.grouping.join(", ")]] : []), ...offered], by.join("\n"), (value) => { location.hash = context.here({ by: value ? value.split("\n") : null }); }) : null].filter(Boolean));
  const scalars = info.scalars, shown = context.query.getAll("metric").length ? context.query.getAll("metric") : usualMetrics(scalars);
  const drawings = h("div", { class: "columns" }), facts = h("div"), differing = h("div");
  const parting = h("div", {}, panel("Where they diverge", h("p", { class: "quiet" }, "Comparing readings…")));
  const layers = h("div", {}, panel("Layers that differ", h("p", { class: "quiet" }, "Comparing layers…")));

  function drawMetrics() {
    const wanted = context.query.getAll("metric").length ? context.query.getAll("metric") : shown;
    replace(drawings, wanted.map((key) => figure("compare/figure", { run: ids, site: key, by }, { signal, height: 300, title: key.replace(":scalar", "") })));
  }

  function summary() {
    const rowOf = (each) => sweep.rows[each.id] ?? {}, metrics = [...new Set(info.runs.flatMap((each) => Object.keys(rowOf(each).metrics ?? {})))].slice(0, 4);
    const inWords = (value) => (typeof value === "string" ? h("span", { class: "bad" }, value) : short(value));
    const rank = { critical: 3, warning: 2, info: 1 };
    const grid = table([
      { name: "name", title: "Run", cell: (row) => h("a", { class: "name", href: link("overview", { run: row.id }) }, row.name) },
      { name: "status", title: "Status", value: (row) => row.facts.status, cell: ({ facts }) => h("span", { class: `status ${facts.status}` }, facts.status) },
      { name: "findings", title: "Findings", value: (row) => rank[row.severity] ?? 0, cell: ({ findings, severity, judged }) => (findings.length ? h("span", { class: `severity ${severity}` }, findings.slice(0, 3).map(kindWords).join(", ")) : h("span", { class: "quiet" }, judged ? "none" : "not judged")) },
      { name: "steps", title: "Steps", number: true, value: (row) => row.facts.num_steps, cell: ({ facts }) => count(facts.num_steps) },
      { name: "time", title: "Time", number: true, value: (row) => row.facts.seconds, cell: ({ facts }) => lasting(facts.seconds) },
      { name: "speed", title: "Steps/s", number: true, value: (row) => row.facts.steps_per_second, cell: ({ facts }) => short(facts.steps_per_second) },
      ...metrics.flatMap((name) => ["last", "best"].map((which) => ({ name: `${which} ${name}`, title: `${name}, ${which}`, number: true, value: (row) => (typeof rowOf(row).metrics?.[name]?.[which] === "string" ? Infinity : rowOf(row).metrics?.[name]?.[which]), cell: (row) => inWords(rowOf(row).metrics?.[name]?.[which]) }))),
    ], { label: "Runs compared", empty: "" });
    grid.show(info.runs);
    return panel("Runs", grid);
  }

  function settings() {
    const { same } = info.settings, ours = (name) => /^environment\.(argv|host|directory)$/.test(name);
    const differing = info.settings.differing.filter((row) => info.runs.length <= MOST_BESIDE || !ours(row.name));
    if (!differing.length) return panel("Settings", h("p", {}, `All ${plural(same, "setting")} are the same.`));
    const value = (each) => (each === null ? h("span", { class: "quiet" }, "–") : h("code", {}, String(each)));
    return panel("Settings that differ", h("p", { class: "note" }, `${plural(same, "setting")} the same`), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), info.runs.map((each) => h("th", { scope: "col" }, each.name)))),
      h("tbody", {}, differing.map((row) => h("tr", {}, h("th", { scope: "row" }, row.name), row.values.map((each) => h("td", {}, value(each)))))))));
  }

  async function drawParting() {
    const { of, partings, left_out: more } = await getJson("compare/parting", { run: ids }, signal);
    parted = partings.every((each) => each.exact.first && each.apart.first); // where they first part stays the same from then on
    const site = (id, key) => h("a", { class: "mono", href: link("layers", { run: ids[0], query: { site: [key], other: id } }) }, key);
    const words = (id, found, tolerance) => {
      if (!found.sites) return "They have no site in common.";
      if (!found.first) return `${tolerance ? `Never by more than ${100 * tolerance}%` : "Nowhere"}: ${plural(found.sites, "site")} at ${plural(found.steps, "step")} read the same${found.complete ? "" : "; later steps were not compared"}.`;
      const more = found.count > 1 ? `, and ${count(found.count - 1)} more at that step` : "";
      return [`Step ${count(found.first.step)}, `, site(id, found.first.site), ` first: ${short(found.first.left)} against ${short(found.first.right)}${more}.`];
    };
    const brief = (each) => h("tr", {}, h("th", { scope: "row" }, each.name), h("td", { class: "number" }, each.exact.first ? `step ${count(each.exact.first.step)}` : "nowhere"), h("td", {}, each.exact.first ? site(each.run, each.exact.first.site) : ""));
    if (partings.length > 2) {
      replace(parting, panel("Where they diverge", h("p", { class: "note" }, "the first reading that differs from ", h("b", {}, of)), h("div", { class: "scroll" }, h("table", { "aria-label": "Where they diverge" }, h("tbody", {}, partings.map(brief)))),
        more ? h("p", { class: "note" }, `${plural(more, "more run")} not compared reading by reading.`) : null));
      return;
    }
    replace(parting, panel("Where they diverge", partings.map((each) => h("dl", { class: "facts" },
      h("dt", {}, "runs"), h("dd", {}, h("b", {}, of), " and ", h("b", {}, each.name)),
      h("dt", {}, "first differ"), h("dd", { "data-parting": each.exact.first?.site ?? "" }, words(each.run, each.exact, 0)),
      h("dt", {}, `differ by ${100 * each.tolerance}%`), h("dd", {}, words(each.run, each.apart, each.tolerance)))), more ? h("p", { class: "note" }, `${plural(more, "more run")} not compared reading by reading.`) : null));
  }

  async function drawLayers() {
    const answer = await getJson("compare/layers", { run: ids, by }, signal), many = answer.names.length > MOST_BESIDE;
    const values = many ? [] : answer.names.map((name, at) => ({ name: `of ${name}`, title: last(name), number: true, value: (row) => row.values[at], cell: (row) => short(row.values[at]) }));
    const grid = table([
      { name: "site", title: "Site", cell: (row) => h("a", { class: "mono", href: link("layers", { run: ids[0], query: { site: [row.site], other: ids[1] } }) }, row.site) },
      ...values,
      { name: "ratio", title: many ? "Greatest / least" : "Ratio", hint: "greatest over least", number: true, value: (row) => row.doublings, cell: (row) => (row.doublings === null ? "–" : `× ${short(2 ** row.doublings)}`) },
      ...(by.length ? [{ name: "scatter", title: "Within groups", hint: "the usual ratio between repeats of one group", number: true, value: (row) => row.scatter, cell: (row) => (row.scatter === null ? "–" : `× ${short(2 ** row.scatter)}`) }] : []),
    ], { label: "Layers that differ", key: (row) => row.site, empty: "The runs have no layer in common." });
    grid.show(answer.rows);
    const how = by.length ? "those that differ most against the scatter between repeats first" : "those that differ most first";
    replace(layers, panel("Layers that differ", h("p", { class: "note" }, `recent RMS of ${plural(answer.total, "site")} in common, ${how}`), h("div", { class: "tall" }, grid)));
  }

  const failed = (where, title) => (error) => { if (error.name !== "AbortError") replace(where, panel(title, h("p", { class: "problem", role: "alert" }, error.message))); };
  /** Take in what live runs have added. */
  async function refresh() {
    [info, sweep] = await Promise.all([getJson("compare", { run: ids }, signal), getJson("rows", { run: ids }, signal)]);
    drawFacts();
    await Promise.all([...drawings.children].map((each) => each.update()));
    if (!parted) await drawParting();
    await drawLayers();
    return info.runs;
  }

  function drawFacts() {
    if (changes(facts, info.runs, sweep.rows)) replace(facts, summary());
    if (changes(differing, info.settings)) replace(differing, settings());
  }

  drawFacts();
  drawMetrics();
  replace(place, picker, facts,
    h("div", { class: "controls" }, choose("Add a curve", [["", "…"], ...scalars], "", (key) => { if (key) { context.keep({ metric: [...new Set([...shown, ...context.query.getAll("metric"), key])] }); drawMetrics(); } })),
    drawings, h("div", { class: "columns" }, layers, parting), info.runs.length <= 3 * MOST_BESIDE ? differing : null);
  const comparing = Promise.all([drawParting().catch(failed(parting, "Where they diverge")), drawLayers().catch(failed(layers, "Layers that differ"))]);
  comparing.then(() => follow(ids, refresh, signal));
  return {};
}

/** Call a function whenever one of some runs has changed; the list of runs shows it, so no run is opened. */
async function follow(ids, refresh, signal) {
  const look = async () => {
    const { runs } = await getJson("runs", {}, signal);
    return runs.filter((each) => ids.includes(each.id));
  };
  const isShown = (runs, shown) => runs.every(({ id, status }) => shown.find((each) => each.id === id)?.facts.status === status);
  let seen = null;
  while (!signal.aborted) {
    try {
      const runs = document.hidden ? null : await look();
      const now = JSON.stringify(runs?.map((each) => [each.id, each.last_step, each.status]));
      // The comparison may lag behind the list, which has noticed first that a writer died: then it is asked again.
      if (runs !== null && (seen === null || now === seen || isShown(runs, await refresh()))) seen = now;
    } catch (error) {
      if (error.name === "AbortError") return; // else it is asked again: a viewer that was stopped may come back
    }
    await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
  }
}

const last = (name = "") => name.split("/").at(-1);

/** The loss, and what reads like a measure of how well the model does. */
function usualMetrics(scalars) {
  const good = scalars.filter((key) => !/^(optimizer|scheduler|process\.|system\.|(epoch|tokens|samples)(:scalar)?$)/.test(key));
  return good.length ? good.slice(0, 4) : scalars.filter((key) => /\.lr:scalar$/.test(key)).slice(0, 1);
}
