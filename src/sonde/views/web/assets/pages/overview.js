// One run as a story along its steps: the verdict first, then what is wrong, then curves, layers and events with one cursor.
import { getJson, keptAnswer, runPath } from "../api.js";
import { chart, readingAt } from "../chart.js";
import { changes, choose, h, panel, replace, whenIdle } from "../dom.js";
import { figure } from "../figure.js";
import { findingCard, keepOpen, openFindings } from "../finding.js";
import { heatMap } from "../heat.js";
import { link } from "../route.js";
import { timeAxis } from "../timeaxis.js";
import { bytes, clock, count, lasting, percent, plural, shell, short } from "../words.js";

export async function show(place, context) {
  const { run, signal } = context, axis = timeAxis(context);
  const top = h("div", { class: "controls" }), verdict = h("div"), tiles = h("div", { class: "tiles" }), best = h("div"), found = h("div", { class: "findings" });
  const charts = h("div", { class: "charts" }), layers = h("div"), lanes = h("div", { class: "lanes" }), constants = h("p", { class: "note constants" });
  const atStep = h("div"), phases = h("div"), events = h("div"), about = h("div"), elsewhere = h("div"), toolbar = h("div", { class: "controls story-tools" });
  const curves = new Map();
  let drawn = [], latestStory = null;
  const at = (name) => runPath(run, `figure/${name}`);
  const figures = [figure(at("phases"), {}, { signal, height: 320, hideEmpty: true }), figure(at("memory"), {}, { signal, height: 320, hideEmpty: true })];
  const smoothing = () => Number(context.query.get("smooth") ?? 0.6);
  const marks = () => (latestStory?.events ?? []).filter((each) => each.level !== "fine" || ["spike", "jump"].includes(each.type)).map((each) => ({ ...each, level: each.type === "spike" ? "bad" : each.level === "fine" ? "odd" : each.level }));

  /** Read and draw; at first only what is quick to read, then all of it. */
  async function read(quick = false) {
    const [info, story] = await Promise.all([getJson(runPath(run), {}, signal), getJson(runPath(run, "story"), { quick: quick ? 1 : "" }, signal)]);
    latestStory = story;
    Object.assign(axis, { knots: story.axes, first: story.first_step ?? 0, last: story.last_step ?? 1 });
    drawTop(info, story);
    drawFindings(info, story);
    drawStory(story);
    drawPhases(info.phases);
    drawEvents(story.events);
    drawAbout(info);
    const isEmpty = story.first_step === null;
    toolbar.hidden = along.hidden = isEmpty;
    elsewhere.hidden = !isEmpty;
    found.hidden = isEmpty && !info.findings.length && !info.problems.length;
    if (isEmpty) await pointElsewhere();
    return info;
  }

  function drawTop({ facts, name, ending }, { verdict: said }) {
    replace(top, h("h1", {}, name), h("span", { class: `status ${facts.status}` }, facts.status), h("span", { class: "note" }, `${facts.model}, started ${clock(facts.created)} UTC`));
    if (changes(verdict, said, ending)) {
      const head = said.headline.charAt(0).toUpperCase() + said.headline.slice(1);
      replace(verdict, h("p", { class: `verdict ${said.tone}`, role: "status" }, h("b", {}, head), said.details.length ? `: ${said.details.join("; ")}.` : "."), ending && (ending.frames.length || !said.details.includes(ending.text.replace(/\.$/, ""))) ? howItEnded(ending) : null); // not twice
    }
    const tile = (value, word) => h("div", { class: "tile" }, h("b", { title: value }, value), h("span", {}, word));
    const taken = facts.first_step === null ? facts.num_steps : Math.max(facts.num_steps, facts.last_step - Math.max(facts.first_step, 1) + 1);
    replace(tiles, tile(count(taken), taken > facts.num_steps ? `steps, ${count(facts.num_steps)} recorded` : "steps"), tile(lasting(facts.seconds), "time"),
      tile(facts.steps_per_second ? short(facts.steps_per_second) : "–", "steps per second"),
      tile(count(facts.num_parameters), "parameters"), tile(facts.device || "–", "device"),
      tile(count(facts.num_sites), "sites"), tile(bytes(facts.nbytes), "on disk"),
      facts.num_ranks > 1 ? tile(count(facts.num_ranks), "ranks") : null,
      facts.num_attempts > 1 ? tile(count(facts.num_attempts), "attempts") : null,
      facts.dropped ? tile(count(facts.dropped), "steps dropped") : null);
    const value = (each) => (typeof each === "number" ? short(each) : each);
    replace(best, said.metrics.length ? h("div", { class: "scroll" }, h("table", { class: "metrics", "aria-label": "Losses and metrics" },
      h("thead", {}, h("tr", {}, ["", "last", "at step", "best", "at step", "going"].map((word, place) => h("th", { class: place && place < 5 ? "number" : null }, word)))),
      h("tbody", {}, said.metrics.map((each) => h("tr", {}, h("th", { scope: "row" }, each.name), h("td", { class: `number ${typeof each.last === "string" ? "bad" : ""}` }, value(each.last)), stepCell(each.last_step),
        h("td", { class: "number" }, value(each.best)), stepCell(each.best_step), h("td", {}, each.going)))))) : null);
  }

  const stepCell = (step) => h("td", { class: "number" }, step === null ? "–" : stepButton(step));
  /** A step that can be gone to. */
  const stepButton = (step) => h("button", { type: "button", class: "step", title: "Move the cursor to this step", onclick: () => axis.pin(step) }, count(step));

  /** Why a training ended that did not finish: the user's own line with its source first, then the traceback. */
  function howItEnded(ending) {
    const inner = [...ending.frames].reverse().find((each) => each.is_users);
    const frame = (each) => h("li", { class: each.is_users ? "own" : "quiet" }, h("code", {}, `${each.file}:${each.line}`), ` in ${each.function}`, each.code ? h("pre", {}, each.code) : null);
    return h("div", { class: ending.by_hand ? "ended note" : "ended problem" }, ending.step === null ? "" : `Step ${count(ending.step)}: `, ending.text,
      inner && !ending.by_hand ? h("div", { class: "culprit" }, h("code", {}, `${inner.file}:${inner.line}`), ` in ${inner.function}`, h("pre", {}, inner.code)) : null,
      ending.frames.length && !ending.by_hand ? h("details", { class: "traceback" }, h("summary", {}, `Traceback, ${plural(ending.frames.length, "line")}`), h("ol", {}, ending.frames.map(frame)), h("pre", {}, ending.traceback)) : null);
  }

  function drawFindings({ findings, judged, problems, facts: { path } }, story) {
    if (!changes(found, findings, judged, problems, story.found)) return;
    const open = openFindings(context, findings);
    const cards = findings.map((each) => findingCard(each, run, { open: open.includes(each.kind), ontoggle: () => keepOpen(context, found), onstep: (step) => axis.pin(step) }));
    const none = judged ? "The rules found nothing while it ran." : ["Recorded without a diagnosis. To get one, run ", h("code", {}, `sonde diagnose ${shell(path)}`), "."];
    replace(found, h("h2", {}, "Findings", h("span", { class: "note" }, " ", findings.length ? story.found : none)), cards,
      problems.map((text) => h("p", { class: "problem" }, text)));
    found.dataset.count = String(findings.length);
  }

  function drawStory(story) {
    drawTools();
    const before = drawn;
    drawn = story.charts.map((made) => {
      const same = curves.get(`${made.role} ${made.title}`); // a chart that is there stays: a curve that comes later does not take it from under its reader
      if (same) { same.show(made); return same; }
      const kept = context.query.get(`log-${made.role}`);
      const fresh = chart(made, axis, { signal, smoothing, marks, height: made.role === "loss" ? 220 : 120, log: kept === null ? null : kept === "1", onlog: (log) => context.keep({ [`log-${made.role}`]: log ? "1" : "0" }) });
      curves.set(`${made.role} ${made.title}`, fresh);
      return fresh;
    });
    if (!drawn.length) replace(charts, h("p", { class: "quiet" }, "No loss was logged: session.log(loss=loss) adds one."));
    else if (drawn.length !== before.length || drawn.some((each, place) => each !== before[place])) replace(charts, drawn);
    const named = Object.entries(story.constants);
    replace(constants, named.length ? ["Constant: ", named.map(([name, value], place) => [place ? ", " : "", h("b", {}, name), ` ${short(value)}`])] : null);
    drawLanes(story);
    axis.tell("data");
  }

  const cursorText = h("output", { class: "cursor" });
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: String(smoothing()), "aria-label": "Smoothing", oninput: () => { context.keep({ smooth: slider.value }); sayCursor(); for (const each of drawn) each.resmooth(); } });
  const smoothText = h("output", {});
  function drawTools() {
    const { units } = axis;
    if (!changes(toolbar, units)) return;
    replace(toolbar, h("h2", {}, "Along the steps"), choose("x", units, axis.unit, (unit) => axis.setUnit(unit)),
      h("label", { class: "field" }, h("span", {}, "Smoothing"), slider, smoothText), cursorText);
    sayCursor();
  }

  function sayCursor() {
    smoothText.textContent = smoothing() ? smoothing().toFixed(2) : "0 (raw)";
    const step = axis.pinned;
    replace(cursorText, axis.cursor === null ? "Move over a curve to read a step; click to keep it; drag to zoom." : [`step ${count(axis.cursor)} `,
      step === null ? null : [h("a", { href: link("layers", { run, query: { step } }) }, "its layers"), " ", h("button", { type: "button", class: "step", onclick: () => axis.pin(null) }, "clear")],
      axis.zoom ? h("button", { type: "button", class: "step", onclick: () => axis.setZoom(null) }, "show all steps") : null]);
  }

  /** Findings along the steps: from where each held to where; one that was closed is pale. */
  function drawLanes(story) {
    if (!changes(lanes, story.spans, axis.zoom, axis.unit, story.last_step)) return;
    const share = (step) => `${100 * Math.min(Math.max(axis.share(step), 0), 1)}%`;
    const lane = (each) => h("div", { class: `lane ${each.severity}${each.closed ? " closed" : ""}`, title: each.cause }, h("span", { class: "lane-name" }, each.title),
      h("span", { class: "lane-track" }, h("button", { type: "button", class: "lane-span", style: { left: share(each.first), width: `calc(${share(each.last)} - ${share(each.first)} + 4px)` }, "aria-label": `${each.title}, steps ${each.first} to ${each.last}${each.closed ? ", closed" : ""}`, onclick: () => axis.pin(each.first) })));
    replace(lanes, story.spans.length ? panel("Findings along the steps", story.spans.slice(0, 30).map(lane)) : null);
  }

  /** What was recorded at the cursor, or last before it; and what happened there. */
  function drawStep() {
    const step = axis.cursor ?? axis.last, near = (latestStory?.events ?? []).filter((each) => Math.abs(each.step - step) <= 1);
    const row = (each) => {
      const { value, from } = readingAt(each, step);
      return h("tr", {}, h("td", { title: each.key }, each.name), h("td", { class: "number" }, typeof value === "string" ? h("b", { class: "bad" }, value) : short(value)), h("td", { class: "note number" }, from === step || from === null ? "" : `from ${count(from)}`));
    };
    replace(atStep, panel(`Step ${count(step)}`, h("table", { "aria-label": "Recorded at this step" }, h("tbody", {}, (latestStory?.charts ?? []).flatMap((each) => each.lines).map(row))),
      near.map((each) => h("p", { class: `level-${each.level}` }, `${each.type}: ${each.message}`))));
    atStep.dataset.step = String(step);
  }
  let waiting = 0;
  axis.subscribe((what) => {
    sayCursor();
    if (what !== "cursor" && latestStory) drawLanes(latestStory);
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawStep);
  });

  async function readLayers() {
    const made = await getJson(runPath(run, "heat"), { pattern: "*:gradient", layers: 1, rows: 60 }, signal).catch(() => null);
    if (!made?.keys.length) return replace(layers);
    if (layers.firstChild) return layers.firstChild.show(made);
    const rows = made.keys.length;
    return replace(layers, heatMap(made, axis, { signal, height: Math.min(60 + 12 * rows, 260), title: `${made.what}, layer by layer`,
      onrow: (key, step) => { location.hash = link("layers", { run, query: { site: [key], step: step ?? "" } }); } }));
  }

  function drawPhases(info) {
    if (!info) return replace(phases);
    const bar = ([name, share]) => h("div", { class: "share" }, h("span", {}, name.replace("_", " ")),
      h("span", { class: "track" }, h("span", { class: "fill", style: { width: `${Math.min(100, 100 * share)}%` } })), h("span", { class: "amount" }, percent(share)));
    return replace(phases, panel("A step's time", h("p", { class: "note" }, `mean ${lasting(info.mean_s)}, median ${lasting(info.step_s)}, over ${plural(info.steps, "recorded step")}${info.shares.watching > 0.05 ? "; watching costs less in the steps between them" : ""}`), Object.entries(info.shares).map(bar)));
  }

  function drawEvents(list) {
    const last = list.slice(-8).reverse();
    if (!changes(events, last)) return;
    const line = (each) => h("tr", {}, h("td", { class: "number" }, stepButton(each.step)), h("td", { class: `level-${each.type === "spike" ? "bad" : each.level}` }, each.type), h("td", {}, each.message));
    replace(events, panel("Latest events", last.length ? h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, last.map(line)))) : h("p", { class: "quiet" }, "None."),
      h("p", {}, h("a", { href: link("timeline", { run }) }, "All events"))));
  }

  function drawAbout({ config, environment, facts: { cost } }) {
    if (!changes(about, config, environment, cost)) return;
    const block = (title, value) => Object.keys(value).length
      ? h("details", {}, h("summary", {}, title), h("pre", {}, JSON.stringify(value, null, 2))) : null;
    replace(about, cost ? h("p", { class: "note" }, `Recording, over all steps: ${cost}.`) : null, block("Configuration", config), block("Environment", environment));
  }

  /** What to look at in a run without steps, such as an evaluation. */
  async function pointElsewhere() {
    const { samples } = await getJson(runPath(run, "parts"), {}, signal);
    replace(elsewhere, panel("Where to look", samples
      ? h("p", {}, "Samples were scored in this run: ", h("a", { href: link("samples", { run }) }, "see the worst of them, and which classes are confused"), ".")
      : h("p", { class: "quiet" }, "Curves and layers come with the first step of the optimizer.")));
  }

  const along = h("div", { class: "split" }, h("div", { class: "stack" }, charts, constants, layers, lanes), h("div", { class: "stack" }, atStep, events, phases));
  const isKnown = keptAnswer(runPath(run, "story")) !== undefined;
  const info = await read(!isKnown);
  replace(place, top, verdict, best, tiles, found, elsewhere, toolbar, along, h("div", { class: "columns" }, figures), about);
  whenIdle(() => Promise.resolve(isKnown ? null : read()).then(readLayers).catch(() => {}));
  const cards = () => [...found.querySelectorAll("summary")];
  const step = (by) => {
    const all = cards(), focused = all.indexOf(document.activeElement);
    all[Math.min(Math.max(focused + by, 0), all.length - 1)]?.focus();
  };
  const move = (by) => axis.pin(Math.min(Math.max((axis.pinned ?? axis.last) + by, axis.first), axis.last));
  return {
    title: info.name,
    refresh: () => Promise.all([read(), readLayers(), ...figures.map((each) => each.update())]),
    keys: [
      { keys: "j", what: "next finding", act: () => step(1) },
      { keys: "k", what: "previous finding", act: () => step(-1) },
      { keys: "ArrowRight", what: "a step later", act: () => move(1) },
      { keys: "ArrowLeft", what: "a step earlier", act: () => move(-1) },
    ],
  };
}

/** Undo what figures do to names so that Plotly shows them as they are. */
export const unescaped = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
