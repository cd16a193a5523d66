// Every layer: one picture over all steps, one site in full, gradients by depth at any step, and the model as a tree.
import { getJson, runPath } from "../api.js";
import { canAsk, choose, h, isCopy, panel, replace, search, whenIdle } from "../dom.js";
import { chart } from "../chart.js";
import { figure } from "../figure.js";
import { heatMap } from "../heat.js";
import { siteList } from "../sitelist.js";
import { timeAxis } from "../timeaxis.js";
import { count, kindWords, plural, short } from "../words.js";
import { unescaped } from "./overview.js";

const MOST_SHOWN = 6;
let allStatistics = null;

/** The statistics there are; they stay the same as long as the server runs. */
const tableOfStatistics = () => (allStatistics ??= getJson("statistics").catch((error) => { allStatistics = null; throw error; }));

/** What is typed as a glob: a word finds every key that has it. */
const glob = (text) => (!text ? "*" : /[*?[:]|^re:/.test(text) ? text : `*${text}*`);

export async function show(place, context) {
  const { run, signal } = context;
  const at = (name) => runPath(run, `figure/${name}`);
  const [info, { statistics, quantities }, recorded] = await Promise.all([getJson(runPath(run), {}, signal), tableOfStatistics(), getJson(runPath(run, "steps"), {}, signal)]);
  let runs = null;
  const known = quantities.filter((each) => info.quantities[each]);
  const quantityOf = (text) => quantities.find((each) => text.endsWith(`:${each}`));
  const titles = Object.fromEntries(statistics.map((each) => [each.name, each.title]));
  const usual = known.length ? `*:${known[0]}` : "*";
  const pattern = () => context.query.get("pattern") || usual;
  const stat = () => context.query.get("stat") ?? "";
  /** The statistic that was chosen, unless only one quantity has it. */
  const ofAnyTensor = () => (statistics.find((each) => each.name === stat())?.quantity ? "" : stat());
  const sites = () => context.query.getAll("site").slice(0, MOST_SHOWN);

  const axis = Object.assign(timeAxis(context), { room: 190 });
  const byRow = () => context.query.get("rows") === "own";
  const rowBox = h("input", { type: "checkbox", checked: byRow(), onchange: () => { context.keep({ rows: rowBox.checked ? "own" : "" }); map?.recolour?.(); } });
  const heat = h("div", { class: "map" });
  let map = null, mapTurn = 0, stands;
  const heatStands = new Promise((resolve) => { stands = () => whenIdle(resolve); }); // what is drawn with Plotly comes after it

  /** Draw all layers over all steps; what goes wrong is said in its place. */
  async function drawHeat() {
    const mine = ++mapTurn;
    let made = null;
    try {
      made = await getJson(runPath(run, "heat"), heatQuery(), signal);
    } catch (error) {
      if (error.name === "AbortError" || mine !== mapTurn) return;
      map = null;
      stands();
      replace(heat, panel("Layers over steps", h("p", { class: "problem", role: "alert" }, error.message)));
      return;
    }
    if (mine !== mapTurn) return;
    stands();
    if (!made.keys.length) { map = null; replace(heat, panel(made.what, h("p", { class: "quiet" }, "There is nothing to draw: no reading has this statistic."))); return; }
    if (map) { map.show(made); return; }
    map = heatMap(made, axis, { signal, byRow, height: 430, onrow: (key) => select([key]),
      tools: [h("label", { class: "field", title: "Colour each row by its own lowest and highest value" }, rowBox, h("span", {}, "each row by itself"))] });
    replace(heat, map);
  }

  const listed = h("p", { class: "note" }), list = siteList({ chosen: () => sites(), select: (next) => select(next) });
  const one = h("div", { class: "stack" });
  let keys = [], curves = null, bins = null, signed = null, taped = null;

  function heatQuery() {
    return { pattern: glob(pattern()), stat: stat() };
  }

  /** Show a site that was clicked in a figure, where its quantity may be left out of the name. */
  function pick(label) {
    const name = unescaped(String(label));
    const found = keys.find((key) => key === name) ?? keys.find((key) => key.startsWith(`${name}:`)) ?? keys.find((key) => key.startsWith(`${name}.`));
    if (found) select([found]);
  }

  /** The statistic that is shown of a site: the chosen one, as far as a copy holds it. */
  const statOf = (key) => (canAsk(runPath(run, "curve"), { site: key, stat: stat() }) ? stat() : "");

  function select(next) {
    if (isCopy) next = next.slice(-1); // curves over each other are asked of a server
    context.keep({ site: next }, { push: true });
    list.mark();
    if (next.length) list.reveal(next[0]);
    drawSite();
    one.scrollIntoView({ block: "nearest" });
  }

  async function readList() {
    const answer = await getJson(runPath(run, "sites"), { pattern: glob(pattern()), most: 500 }, signal).catch((error) => {
      if (error.name === "AbortError") throw error;
      return { total: 0, sites: [], problem: error.message };
    });
    answer.sites = answer.sites.filter((site) => canAsk(runPath(run, "curve"), { site: site.key }));
    keys = answer.sites.map((site) => site.key);
    listed.textContent = answer.problem ?? (answer.total > keys.length ? `${count(keys.length)} of ${plural(answer.total, "site")}` : plural(answer.total, "site"));
    const alike = new Set(answer.sites.map((site) => ending(site))).size === 1; // then the heading says it for all
    if (alike && keys.length) listed.textContent += `, ${ending(answer.sites[0]).slice(1).replaceAll("_", " ")}`;
    list.show(answer.sites);
  }

  const ending = (site) => site.key.slice(site.name.length);

  async function drawSite() {
    const chosen = sites();
    if (!chosen.length) {
      replace(one, panel("One site", h("p", { class: "quiet" }, "Click a row of the picture, or a site in the list, to see its curve and its histogram over time. Shift-click adds a second one.")));
      return;
    }
    const other = context.query.get("other"), query = { site: chosen, stat: statOf(chosen[0]) };
    let about, made;
    try {
      [about, made, { runs }] = await Promise.all([getJson(runPath(run, "site"), { site: chosen[0], stat: statOf(chosen[0]) }, signal),
        other ? null : getJson(runPath(run, "curve"), query, signal), runs ? { runs } : getJson("runs", {}, signal)]);
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(one, panel(chosen[0], h("p", { class: "problem", role: "alert" }, error.message)));
      return;
    }
    if (chosen.join() !== sites().join()) return;
    const isScalar = about.quantity === "scalar", kept = context.query.get("log");
    if (other) curves = figure("compare/figure", { run: [run, other], site: chosen[0], stat: isScalar ? "" : about.shown }, { signal, height: 320 });
    else {
      curves = chart(made, axis, { signal, height: 300, room: 64, log: kept === null ? null : kept === "1", onlog: (log) => context.keep({ log: log ? "1" : "0" }) });
      curves.update = async () => curves.show(await getJson(runPath(run, "curve"), query, signal));
    }
    const curveStands = new Promise((resolve) => { whenIdle(resolve); });
    bins = isScalar ? null : figure(at("histogram"), { site: chosen[0] }, { signal, height: 320, after: curveStands });
    signed = isScalar ? null : figure(at("histogram"), { site: chosen[0], kind: "signed" }, { signal, height: 320, after: curveStands });
    taped = ["parameter", "state"].includes(about.quantity) ? figure(at("histogram"), { site: chosen[0], kind: "values" }, { signal, height: 320, hideEmpty: true, after: curveStands }) : null;
    replace(one, siteHead(about, chosen, other), h("div", { class: "columns narrow" }, curves, bins, signed, taped));
  }

  const siteFacts = h("div", { class: "tiles small" }), siteWords = h("p", { class: "note" });

  function sayFacts(about) {
    replace(siteFacts, Object.entries(about.last).map(([name, value]) => h("div", { class: "tile" }, h("b", { class: name === "nonfinite" && value ? "bad" : null }, short(value)), h("span", {}, titles[name]))));
    replace(siteWords, `${about.kind} ${about.shape.join(" × ")} ${about.dtype}, ${plural(about.readings, "reading")}, the last at step ${count(about.last_step)}, ${titles[about.shown]} ${about.trend.direction === "broken" ? "no longer finite" : about.trend.direction}`,
      about.findings.length ? h("span", { class: "severity warning" }, `, named by ${about.findings.map(kindWords).join(", ")}`) : "");
  }

  async function readFacts() {
    if (sites().length) sayFacts(await getJson(runPath(run, "site"), { site: sites()[0], stat: statOf(sites()[0]) }, signal));
  }

  function siteHead(about, chosen, other) {
    sayFacts(about);
    const others = runs.filter((each) => each.id !== run && !each.problem).map((each) => [each.id, each.name]);
    return h("section", { class: "panel", "aria-label": "One site" },
      h("div", { class: "head" }, h("h2", { class: "mono" }, chosen.length > 1 ? `${chosen[0]} and ${chosen.length - 1} more` : about.key),
        h("div", { class: "tools" }, others.length ? choose("Overlay the run", [["", "none"], ...others], other ?? "", (id) => { context.keep({ other: id }); drawSite(); }) : null,
          h("a", { href: context.here({ site: [] }), onclick: (event) => { event.preventDefault(); select([]); } }, "Close"))),
      siteWords, siteFacts);
  }

  // Gradients by depth, at any step.
  let { steps } = recorded, slide = null, drawnAt = null;
  const asked = axis.pinned;
  Object.assign(axis, { first: steps[0] ?? 0, last: steps.at(-1) ?? 1, knots: recorded.axes });
  const slider = h("input", { type: "range", min: 0, max: Math.max(steps.length, 0), step: 1, "aria-label": "Step",
    value: String(asked === null ? steps.length : nearest(asked)), oninput: moved });
  const step = h("output", {});
  const flow = figure(at("flow"), flowQuery(), { signal, hideEmpty: true, height: 360, after: heatStands, onpoint: (point) => pick(point.text),
    tools: [h("label", { class: "field" }, h("span", {}, "Step"), slider, step)] });
  sayStep();

  function nearest(wanted) {
    let best = 0;
    steps.forEach((each, index) => { if (Math.abs(each - wanted) < Math.abs(steps[best] - wanted)) best = index; });
    return best;
  }
  function chosenStep() {
    const index = Number(slider.value);
    return index >= steps.length ? "" : steps[index];
  }
  /** Let the slider reach the steps that a live run has added; it stays at its step, or at the latest. */
  async function readSteps() {
    const chosen = chosenStep();
    const now = await getJson(runPath(run, "steps"), {}, signal);
    steps = now.steps;
    Object.assign(axis, { first: steps[0] ?? 0, last: steps.at(-1) ?? 1, knots: now.axes });
    slider.max = String(steps.length);
    slider.value = String(chosen === "" ? steps.length : nearest(chosen));
    sayStep();
  }
  function flowQuery() {
    return { step: chosenStep(), stat: ofAnyTensor() };
  }
  function sayStep() {
    step.textContent = chosenStep() === "" ? "latest" : count(chosenStep());
    slider.setAttribute("aria-valuetext", step.textContent);
  }
  function moved() {
    sayStep();
    axis.pin(chosenStep() === "" ? null : chosenStep());
  }
  // The cursor may be moved in any picture; the slider and what is drawn of one step follow where it is kept.
  axis.subscribe(() => {
    const wanted = axis.pinned === null ? steps.length : nearest(axis.pinned);
    if (axis.hovered !== null || String(wanted) === drawnAt) return;
    drawnAt = slider.value = String(wanted);
    sayStep();
    clearTimeout(slide);
    slide = setTimeout(() => { flow.update(flowQuery()); tree.update(treeQuery()); }, 100);
  });
  const shift = (by) => { slider.value = String(Number(slider.value) + by); moved(); };

  // The model as a tree.
  const colour = () => context.query.get("colour") ?? "statistic";
  const treeQuery = () => ({ colour: colour(), quantity: quantityOf(pattern()) ?? known[0], stat: ofAnyTensor(), step: colour() === "findings" ? "" : chosenStep() });
  const tree = figure(at("tree"), treeQuery(), { signal, height: 360, after: heatStands, onpoint: (point) => point.id && within(unescaped(point.id)),
    tools: [choose("Colour by", [["statistic", "the statistic"], ["findings", "findings"]], colour(), (word) => { context.keep({ colour: word }); tree.update(treeQuery()); })] });

  /** Show only the sites inside a module. */
  function within(module) {
    setPattern(`${module === "(model)" ? "" : module}*:${quantityOf(pattern()) ?? known[0]}`);
  }

  const box = search("Sites", pattern(), "*.weight:gradient, a word, or re:…", setPattern);
  function setPattern(text) {
    box.querySelector("input").value = text;
    context.keep({ pattern: text === usual ? "" : text });
    drawHeat();
    tree.update(treeQuery());
    readList();
  }

  replace(place,
    h("div", { class: "controls" }, h("h1", {}, "Layers"), isCopy ? null : box,
      choose("Quantity", [["", "…"], ...known.map((each) => [each, each.replace("_", " ")])], quantityOf(pattern()) ?? "", (word) => word && setPattern(`*:${word}`)),
      choose("Statistic", [["", "default"], ...statistics.filter((each) => each.shown === "always" || (!isCopy && each.shown !== "on request")).map((each) => [each.name, each.title])], stat(), (word) => {
        context.keep({ stat: word }); drawHeat(); tree.update(treeQuery()); flow.update(flowQuery()); drawSite();
      }), axis.units.length > 1 ? choose("x", axis.units, axis.unit, (unit) => axis.setUnit(unit)) : null),
    h("div", { class: "beside" }, heat, h("section", { class: "panel", "aria-label": "Sites" }, h("h2", {}, "Sites"), listed, list)),
    one, h("div", { class: "columns" }, flow, tree));
  drawHeat();
  readList().catch(() => {});
  drawSite();

  return {
    title: info.name,
    refresh: () => Promise.all([drawHeat(), readSteps().then(() => Promise.all([flow.update(flowQuery()), tree.update(treeQuery())])), readFacts(), curves?.update(), bins?.update(), signed?.update(), taped?.update()]).catch(() => {}),
    keys: [
      { keys: "j", what: "next site", act: () => list.move(1) },
      { keys: "k", what: "previous site", act: () => list.move(-1) },
      { keys: "ArrowRight", what: "a step later", act: () => shift(1) },
      { keys: "ArrowLeft", what: "a step earlier", act: () => shift(-1) },
    ],
  };
}
