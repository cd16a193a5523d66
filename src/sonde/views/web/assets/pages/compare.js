// Several runs beside each other: what was set differently, how they went, where they part, how their layers differ.
import { getJson } from "../api.js";
import { changes, choose, h, panel, replace } from "../dom.js";
import { figure } from "../figure.js";
import { link } from "../route.js";
import { table } from "../table.js";
import { count, lasting, plural, short } from "../words.js";

const EVERY_MS = 3000;

export async function show(place, context) {
  const { signal } = context;
  const runs = (await getJson("runs", {}, signal)).runs.filter((each) => !each.problem);
  const ids = context.query.getAll("run");
  const picker = h("div", { class: "controls" }, h("h1", {}, "Compare"),
    ids.map((id) => h("span", { class: "chip" }, nameOf(id), h("a", { href: context.here({ run: ids.filter((each) => each !== id) }), "aria-label": `Leave out ${nameOf(id)}` }, " ✕"))),
    choose("Add", [["", "a run…"], ...runs.filter((each) => !ids.includes(each.id)).map((each) => [each.id, each.name])], "", (id) => { location.hash = context.here({ run: [...ids, id] }); }));

  function nameOf(id) {
    return runs.find((each) => each.id === id)?.name ?? id;
  }

  if (ids.length < 2) {
    replace(place, picker, h("div", { class: "empty" }, h("p", {}, ids.length ? "Add a second run to compare this one with." : "Choose two or more runs, here or on the page of runs.")));
    return {};
  }
  let info = await getJson("compare", { run: ids }, signal), parted = false;
  const scalars = info.scalars, shown = context.query.getAll("metric").length ? context.query.getAll("metric") : usualMetrics(scalars);
  const drawings = h("div", { class: "columns" }), facts = h("div"), differing = h("div");
  const parting = h("div", {}, panel("Where they diverge", h("p", { class: "quiet" }, "Comparing readings…")));
  const layers = h("div", {}, panel("Layers that differ", h("p", { class: "quiet" }, "Comparing layers…")));

  function drawMetrics() {
    const wanted = context.query.getAll("metric").length ? context.query.getAll("metric") : shown;
    replace(drawings, wanted.map((key) => figure("compare/figure", { run: ids, site: key }, { signal, height: 300, title: key.replace(":scalar", "") })));
  }

  function summary() {
    const head = h("tr", {}, h("th", { scope: "col" }, ""), info.runs.map((each) => h("th", { scope: "col" }, h("a", { href: link("overview", { run: each.id }) }, each.name))));
    const row = (name, of) => h("tr", {}, h("th", { scope: "row" }, name), info.runs.map((each) => h("td", {}, of(each))));
    return panel("Runs", h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {},
      row("status", ({ facts }) => h("span", { class: `status ${facts.status}` }, facts.status)), row("steps", ({ facts }) => count(facts.num_steps)),
      row("time", ({ facts }) => lasting(facts.seconds)), row("steps per second", ({ facts }) => short(facts.steps_per_second)),
      row("findings", ({ findings, severity }) => findings.length ? h("span", { class: `severity ${severity}` }, findings.slice(0, 3).map((each) => each.replaceAll("_", " ")).join(", ")) : h("span", { class: "quiet" }, "none"))))));
  }

  function settings() {
    const { differing, same } = info.settings;
    if (!differing.length) return panel("Settings", h("p", {}, `All ${plural(same, "setting")} are the same.`));
    const value = (each) => (each === null ? h("span", { class: "quiet" }, "–") : h("code", {}, String(each)));
    return panel("Settings that differ", h("p", { class: "note" }, `${plural(same, "setting")} the same`), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), info.runs.map((each) => h("th", { scope: "col" }, each.name)))),
      h("tbody", {}, differing.map((row) => h("tr", {}, h("th", { scope: "row" }, row.name), row.values.map((each) => h("td", {}, value(each)))))))));
  }

  async function drawParting() {
    const { of, partings } = await getJson("compare/parting", { run: ids }, signal);
    parted = partings.every((each) => each.exact.first && each.apart.first); // where they first part stays the same from then on
    const site = (id, key) => h("a", { class: "mono", href: link("layers", { run: ids[0], query: { site: [key], other: id } }) }, key);
    const words = (id, found, tolerance) => {
      if (!found.sites) return "They have no site in common.";
      if (!found.first) return `${tolerance ? `Never by more than ${100 * tolerance} %` : "Nowhere"}: ${plural(found.sites, "site")} at ${plural(found.steps, "step")} read the same${found.complete ? "" : "; later steps were not compared"}.`;
      const more = found.count > 1 ? `, and ${count(found.count - 1)} more at that step` : "";
      return [`Step ${count(found.first.step)}, `, site(id, found.first.site), ` first: ${short(found.first.left)} against ${short(found.first.right)}${more}.`];
    };
    replace(parting, panel("Where they diverge", partings.map((each) => h("dl", { class: "facts" },
      h("dt", {}, "runs"), h("dd", {}, h("b", {}, of), " and ", h("b", {}, each.name)),
      h("dt", {}, "first differ"), h("dd", { "data-parting": each.exact.first?.site ?? "" }, words(each.run, each.exact, 0)),
      h("dt", {}, `differ by ${100 * each.tolerance} %`), h("dd", {}, words(each.run, each.apart, each.tolerance))))));
  }

  async function drawLayers() {
    const answer = await getJson("compare/layers", { run: ids }, signal);
    const grid = table([
      { name: "site", title: "Site", cell: (row) => h("a", { class: "mono", href: link("layers", { run: ids[0], query: { site: [row.site], other: ids[1] } }) }, row.site) },
      { name: "left", title: last(answer.left), number: true, cell: (row) => short(row.left) },
      { name: "right", title: last(answer.right), number: true, cell: (row) => short(row.right) },
      { name: "ratio", title: "Ratio", number: true, value: (row) => (row.doublings === null ? null : Math.abs(row.doublings)), cell: (row) => (row.doublings === null ? "–" : `× ${short(2 ** row.doublings)}`) },
    ], { label: "Layers that differ", sort: "-ratio", key: (row) => row.site, empty: "The runs have no layer in common." });
    grid.show(answer.rows);
    replace(layers, panel("Layers that differ", h("p", { class: "note" }, `recent RMS of ${plural(answer.total, "site")} in common, those that differ most first`), h("div", { class: "tall" }, grid)));
  }

  const failed = (where, title) => (error) => { if (error.name !== "AbortError") replace(where, panel(title, h("p", { class: "problem", role: "alert" }, error.message))); };
  /** Take in what live runs have added. */
  async function refresh() {
    info = await getJson("compare", { run: ids }, signal);
    drawFacts();
    await Promise.all([...drawings.children].map((each) => each.update()));
    if (!parted) await drawParting();
    await drawLayers();
    return info.runs;
  }

  function drawFacts() {
    if (changes(facts, info.runs)) replace(facts, summary());
    if (changes(differing, info.settings)) replace(differing, settings());
  }

  drawFacts();
  drawMetrics();
  replace(place, picker, h("div", { class: "columns" }, facts, parting),
    h("div", { class: "controls" }, choose("Add a curve", [["", "…"], ...scalars], "", (key) => { if (key) { context.keep({ metric: [...new Set([...shown, ...context.query.getAll("metric"), key])] }); drawMetrics(); } })),
    drawings, h("div", { class: "columns" }, differing, layers));
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
  const good = scalars.filter((key) => !/^(optimizer|scheduler|process\.|system\.)/.test(key));
  return good.slice(0, 4).length ? good.slice(0, 4) : scalars.slice(0, 2);
}
