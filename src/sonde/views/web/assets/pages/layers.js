// Every layer: one picture over all steps, one site in full, gradients by depth at any step, and the model as a tree.
import { getJson, runPath } from "../api.js";
import { choose, h, panel, replace, search } from "../dom.js";
import { figure } from "../figure.js";
import { count, plural, short } from "../words.js";
import { unescaped } from "./overview.js";

const MOST_SHOWN = 6;

/** What is typed as a glob: a word finds every key that has it. */
const glob = (text) => (!text ? "*" : /[*?[:]|^re:/.test(text) ? text : `*${text}*`);

export async function show(place, context) {
  const { run, signal } = context;
  const at = (name) => runPath(run, `figure/${name}`);
  const [info, { runs }, { statistics, quantities }] = await Promise.all([getJson(runPath(run), {}, signal), getJson("runs", {}, signal), getJson("statistics", {}, signal)]);
  const known = quantities.filter((each) => info.quantities[each]);
  const quantityOf = (text) => quantities.find((each) => text.endsWith(`:${each}`));
  const titles = Object.fromEntries(statistics.map((each) => [each.name, each.title]));
  const usual = known.length ? `*:${known[0]}` : "*";
  const pattern = () => context.query.get("pattern") || usual;
  const stat = () => context.query.get("stat") ?? "";
  /** The statistic that was chosen, unless only one quantity has it. */
  const ofAnyTensor = () => (statistics.find((each) => each.name === stat())?.quantity ? "" : stat());
  const sites = () => context.query.getAll("site").slice(0, MOST_SHOWN);

  const heat = figure(at("heat"), heatQuery(), { signal, onpoint: (point) => pick(point.y), height: 430 });
  const list = h("div", { class: "sitelist", role: "listbox", "aria-label": "Sites, up and down choose one", "aria-multiselectable": "true", tabindex: "0", onkeydown: steer }), listed = h("p", { class: "note" });
  const one = h("div", { class: "stack" });
  let keys = [], curves = null, bins = null;

  function heatQuery() {
    return { pattern: glob(pattern()), stat: stat() };
  }

  /** Show a site that was clicked in a figure, where its quantity may be left out of the name. */
  function pick(label) {
    const name = unescaped(String(label));
    const found = keys.find((key) => key === name) ?? keys.find((key) => key.startsWith(`${name}:`)) ?? keys.find((key) => key.startsWith(`${name}.`));
    if (found) select([found]);
  }

  function select(next) {
    context.keep({ site: next }, { push: true });
    markList();
    drawSite();
    one.scrollIntoView({ block: "nearest" });
  }

  async function readList() {
    const answer = await getJson(runPath(run, "sites"), { pattern: glob(pattern()), most: 500 }, signal).catch((error) => {
      if (error.name === "AbortError") throw error;
      return { total: 0, sites: [], problem: error.message };
    });
    keys = answer.sites.map((site) => site.key);
    listed.textContent = answer.problem ?? (answer.total > keys.length ? `${count(keys.length)} of ${plural(answer.total, "site")}` : plural(answer.total, "site"));
    const alike = new Set(answer.sites.map((site) => ending(site))).size === 1; // then the heading says it for all
    if (alike && keys.length) listed.textContent += `, ${ending(answer.sites[0]).slice(1).replaceAll("_", " ")}`;
    replace(list, answer.sites.map((site) => h("button", { type: "button", role: "option", tabindex: "-1", "data-site": site.key, title: `${site.key}\n${site.kind} ${site.shape.join("×")} ${site.dtype}. Shift-click to add.`,
      onclick: (event) => {
        const before = sites(), has = before.includes(site.key);
        select(event.shiftKey || event.ctrlKey || event.metaKey ? (has ? before.filter((each) => each !== site.key) : [...before, site.key]) : [site.key]);
      } }, nameParts(site.name || "(model)"), alike ? null : h("span", { class: "quiet" }, ending(site)))));
    markList();
  }

  const ending = (site) => site.key.slice(site.name.length);

  /** A name whose end stays readable: what does not fit is cut out before its last two parts. */
  function nameParts(name) {
    const at = name.split(".").slice(0, -2).join(".").length;
    return [at ? h("span", { class: "head" }, name.slice(0, at)) : null, h("span", { class: "tail" }, name.slice(at))];
  }

  function steer(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -keys.length, End: keys.length }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    next(by);
  }

  function markList() {
    const chosen = new Set(sites());
    list.removeAttribute("aria-activedescendant");
    for (const [at, each] of [...list.children].entries()) {
      each.id = `site-${at}`;
      each.setAttribute("aria-selected", String(chosen.has(each.dataset.site)));
      if (each.dataset.site === sites()[0]) list.setAttribute("aria-activedescendant", each.id);
    }
  }

  async function drawSite() {
    const chosen = sites();
    if (!chosen.length) {
      replace(one, panel("One site", h("p", { class: "quiet" }, "Click a row of the picture, or a site in the list, to see its curve and its histogram over time. Shift-click adds a second one.")));
      return;
    }
    let about;
    try {
      about = await getJson(runPath(run, "site"), { site: chosen[0], stat: stat() }, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(one, panel(chosen[0], h("p", { class: "problem", role: "alert" }, error.message)));
      return;
    }
    const other = context.query.get("other"), shownStat = about.shown, isScalar = about.quantity === "scalar";
    curves = other
      ? figure("compare/figure", { run: [run, other], site: chosen[0], stat: isScalar ? "" : shownStat }, { signal, height: 320 })
      : figure(at("curves"), { site: chosen, stat: shownStat, log: context.query.get("log") ?? "" }, { signal, height: 320, tools: [logBox()] });
    bins = isScalar ? null : figure(at("histogram"), { site: chosen[0] }, { signal, height: 320 });
    replace(one, siteHead(about, chosen, other), h("div", { class: "columns" }, curves, bins));
  }

  function logBox() {
    const box = h("input", { type: "checkbox", checked: context.query.get("log") === "1", onchange: () => { context.keep({ log: box.checked ? "1" : "" }); drawSite(); } });
    return h("label", { class: "field" }, box, h("span", {}, "log"));
  }

  const siteFacts = h("div", { class: "tiles small" }), siteWords = h("p", { class: "note" });

  function sayFacts(about) {
    replace(siteFacts, Object.entries(about.last).map(([name, value]) => h("div", { class: "tile" }, h("b", { class: name === "nonfinite" && value ? "bad" : null }, short(value)), h("span", {}, titles[name]))));
    replace(siteWords, `${about.kind} ${about.shape.join(" × ")} ${about.dtype}, ${plural(about.readings, "reading")}, ${titles[about.shown]} ${about.trend.direction === "broken" ? "no longer finite" : about.trend.direction}`,
      about.findings.length ? h("span", { class: "severity warning" }, `, named by ${about.findings.map((each) => each.replaceAll("_", " ")).join(", ")}`) : "");
  }

  async function readFacts() {
    if (sites().length) sayFacts(await getJson(runPath(run, "site"), { site: sites()[0], stat: stat() }, signal));
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
  let steps = (await getJson(runPath(run, "steps"), {}, signal)).steps, slide = null;
  const asked = context.query.get("step");
  const slider = h("input", { type: "range", min: 0, max: Math.max(steps.length, 0), step: 1, "aria-label": "Step",
    value: String(asked === null || asked === "" ? steps.length : nearest(Number(asked))), oninput: moved });
  const step = h("output", {});
  const flow = figure(at("flow"), flowQuery(), { signal, hideEmpty: true, height: 360, after: heat.ready, onpoint: (point) => pick(point.text),
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
    steps = (await getJson(runPath(run, "steps"), {}, signal)).steps;
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
    context.keep({ step: String(chosenStep()) });
    clearTimeout(slide);
    slide = setTimeout(() => { flow.update(flowQuery()); tree.update(treeQuery()); }, 100);
  }
  const shift = (by) => { slider.value = String(Number(slider.value) + by); moved(); };

  // The model as a tree.
  const colour = () => context.query.get("colour") ?? "statistic";
  const treeQuery = () => ({ colour: colour(), quantity: quantityOf(pattern()) ?? known[0], stat: ofAnyTensor(), step: colour() === "findings" ? "" : chosenStep() });
  const tree = figure(at("tree"), treeQuery(), { signal, height: 360, after: heat.ready, onpoint: (point) => point.id && within(unescaped(point.id)),
    tools: [choose("Colour by", [["statistic", "the statistic"], ["findings", "findings"]], colour(), (word) => { context.keep({ colour: word }); tree.update(treeQuery()); })] });

  /** Show only the sites inside a module. */
  function within(module) {
    setPattern(`${module === "(model)" ? "" : module}*:${quantityOf(pattern()) ?? known[0]}`);
  }

  const box = search("Sites", pattern(), "*.weight:gradient, a word, or re:…", setPattern);
  function setPattern(text) {
    box.querySelector("input").value = text;
    context.keep({ pattern: text === usual ? "" : text });
    heat.update(heatQuery());
    tree.update(treeQuery());
    readList();
  }

  replace(place,
    h("div", { class: "controls" }, h("h1", {}, "Layers"), box,
      choose("Quantity", [["", "…"], ...known.map((each) => [each, each.replace("_", " ")])], quantityOf(pattern()) ?? "", (word) => word && setPattern(`*:${word}`)),
      choose("Statistic", [["", "default"], ...statistics.filter((each) => each.shown !== "on request").map((each) => [each.name, each.title])], stat(), (word) => {
        context.keep({ stat: word }); heat.update(heatQuery()); tree.update(treeQuery()); flow.update(flowQuery()); drawSite();
      })),
    h("div", { class: "beside" }, heat, h("section", { class: "panel", "aria-label": "Sites" }, h("h2", {}, "Sites"), listed, list)),
    one, h("div", { class: "columns" }, flow, tree));
  await readList();
  drawSite();

  return {
    title: info.name,
    refresh: () => Promise.all([heat.update(), readSteps().then(() => Promise.all([flow.update(flowQuery()), tree.update(treeQuery())])), readFacts(), curves?.update(), bins?.update()]).catch(() => {}),
    keys: [
      { keys: "j", what: "next site", act: () => next(1) },
      { keys: "k", what: "previous site", act: () => next(-1) },
      { keys: "ArrowRight", what: "a step later", act: () => shift(1) },
      { keys: "ArrowLeft", what: "a step earlier", act: () => shift(-1) },
    ],
  };

  function next(by) {
    if (!keys.length) return;
    const from = keys.indexOf(sites()[0]);
    const to = Math.min(Math.max(from < 0 ? (by > 0 ? 0 : keys.length - 1) : from + by, 0), keys.length - 1);
    select([keys[to]]);
    list.children[to]?.scrollIntoView({ block: "nearest" });
  }
}
