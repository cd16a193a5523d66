// One run: what is wrong with it first, then how it went.
import { getJson, runPath } from "../api.js";
import { changes, h, panel, replace } from "../dom.js";
import { figure } from "../figure.js";
import { findingCard, keepOpen, openFindings } from "../finding.js";
import { link } from "../route.js";
import { bytes, clock, count, lasting, percent, plural, shell, short } from "../words.js";

export async function show(place, context) {
  const { run, signal } = context;
  const top = h("div", { class: "controls" }), ended = h("div"), tiles = h("div", { class: "tiles" }), found = h("div", { class: "findings" });
  const health = h("div"), phases = h("div"), events = h("div"), about = h("div");
  const at = (name) => runPath(run, `figure/${name}`);
  const figures = [
    figure(at("metrics"), {}, { signal }),
    figure(at("flow"), {}, { signal, height: 320, hideEmpty: true, onpoint: toSite }),
    figure(at("phases"), {}, { signal, height: 320, hideEmpty: true }),
    figure(at("memory"), {}, { signal, height: 320, hideEmpty: true }),
  ];

  function toSite(point) {
    if (point.text) location.hash = link("layers", { run, query: { pattern: `${unescaped(point.text)}*:gradient` } });
  }

  async function read() {
    const [info, happened] = await Promise.all([getJson(runPath(run), {}, signal), getJson(runPath(run, "events"), {}, signal)]);
    drawTop(info);
    drawFindings(info);
    drawHealth(info);
    drawPhases(info.phases);
    drawEvents(happened);
    drawAbout(info);
    return info;
  }

  function drawTop({ facts, name, ending }) {
    replace(top, h("h1", {}, name), h("span", { class: `status ${facts.status}` }, facts.status), h("span", { class: "note" }, `${facts.model}, started ${clock(facts.created)} UTC`));
    replace(ended, ending ? h("p", { class: ending.by_hand ? "note" : "problem" }, ending.step === null ? "" : `Step ${count(ending.step)}: `, ending.text) : null);
    const tile = (value, word) => h("div", { class: "tile" }, h("b", { title: value }, value), h("span", {}, word));
    replace(tiles, tile(count(facts.num_steps), "steps"), tile(lasting(facts.seconds), "time"),
      tile(facts.steps_per_second ? short(facts.steps_per_second) : "–", "steps per second"),
      tile(count(facts.num_parameters), "parameters"), tile(facts.device || "–", "device"),
      tile(count(facts.num_sites), "sites"), tile(bytes(facts.nbytes), "on disk"),
      facts.num_ranks > 1 ? tile(count(facts.num_ranks), "ranks") : null,
      facts.num_attempts > 1 ? tile(count(facts.num_attempts), "attempts") : null,
      facts.dropped ? tile(count(facts.dropped), "steps dropped") : null);
  }

  function drawFindings({ findings, judged, problems, facts: { path } }) {
    if (!changes(found, findings, judged, problems)) return;
    const open = openFindings(context, findings);
    const cards = findings.map((each) => findingCard(each, run, { open: open.includes(each.kind), ontoggle: () => keepOpen(context, found) }));
    const none = judged ? "Nothing wrong was found while it ran." : ["Recorded without a diagnosis. To get one, run ", h("code", {}, `sonde diagnose ${shell(path)}`), "."];
    const words = findings.length ? plural(findings.length, "finding") : none;
    replace(found, h("h2", {}, "Findings", h("span", { class: "note" }, " ", words)), cards,
      problems.map((text) => h("p", { class: "problem" }, text)));
    found.dataset.count = String(findings.length);
  }

  function drawHealth({ health: info, learning_rate: rate }) {
    if (!info) return replace(health, panel("Health", h("p", { class: "quiet" }, "No loss was logged: session.log(loss=loss) adds one.")));
    const { dynamics } = info, losses = plural(info.points, "loss").replace("losss", "losses");
    const row = (name, value) => (value === "–" ? null : [h("dt", {}, name), h("dd", {}, value)]);
    if (dynamics.state === "unknown") return replace(health, panel("Health", h("p", { class: "quiet" }, `${losses}: too few finite values to classify the training.`)));
    return replace(health, panel("Health", h("dl", { class: "facts" },
      row("health", info.score === null ? "–" : h("b", { class: info.word === "critical" ? "bad" : null }, `${info.word} (${percent(info.score)})`)),
      row("training", h("b", { class: ["diverging", "non-finite"].includes(dynamics.state) ? "bad" : null }, dynamics.state.replace("_", " "))),
      row("loss", dynamics.stability.replace("_", " ")),
      row("first level", short(dynamics.initial)), row("best level", short(dynamics.best)), row("recent level", short(dynamics.recent)),
      row("scatter", percent(dynamics.scatter)), row("learning rate", short(rate)), row("based on", losses))));
  }

  function drawPhases(info) {
    if (!info) return replace(phases);
    const bar = ([name, share]) => h("div", { class: "share" }, h("span", {}, name.replace("_", " ")),
      h("span", { class: "track" }, h("span", { class: "fill", style: { width: `${Math.min(100, 100 * share)}%` } })), h("span", { class: "amount" }, percent(share)));
    return replace(phases, panel("A step's time", h("p", { class: "note" }, `median ${lasting(info.step_s)}, over ${plural(info.steps, "step")}`), Object.entries(info.shares).map(bar)));
  }

  function drawEvents({ events: list, total }) {
    const last = list.slice(-8).reverse();
    if (!changes(events, last, total)) return;
    const line = (each) => h("tr", {}, h("td", { class: "number" }, count(each.step)), h("td", { class: `level-${each.level}` }, each.type), h("td", {}, each.message));
    replace(events, panel("Latest events", last.length ? h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, last.map(line)))) : h("p", { class: "quiet" }, "None."),
      total > last.length ? h("p", {}, h("a", { href: link("timeline", { run }) }, `All ${count(total)} events`)) : null));
  }

  function drawAbout({ config, environment }) {
    if (!changes(about, config, environment)) return;
    const block = (title, value) => Object.keys(value).length
      ? h("details", {}, h("summary", {}, title), h("pre", {}, JSON.stringify(value, null, 2))) : null;
    replace(about, block("Configuration", config), block("Environment", environment));
  }

  const info = await read();
  replace(place, top, ended, tiles, found, h("div", { class: "split" }, figures[0], h("div", { class: "stack" }, health, phases, events)), h("div", { class: "columns" }, figures.slice(1)), about);
  const cards = () => [...found.querySelectorAll("summary")];
  const step = (by) => {
    const all = cards(), at = all.indexOf(document.activeElement);
    all[Math.min(Math.max(at + by, 0), all.length - 1)]?.focus();
  };
  return {
    title: info.name,
    refresh: () => Promise.all([read(), ...figures.map((each) => each.update())]),
    keys: [
      { keys: "j", what: "next finding", act: () => step(1) },
      { keys: "k", what: "previous finding", act: () => step(-1) },
    ],
  };
}

/** Undo what figures do to names so that Plotly shows them as they are. */
export const unescaped = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
