// The shell: bar on top, the page that the address names below it, keys, and news of a live run.
import { getJson, keepAnswers, runPath, silence } from "./api.js";
import { h, replace } from "./dom.js";
import { prepare } from "./figure.js";
import { explain } from "./glossary.js";
import { addKeys, setPageKeys, showHelp } from "./keys.js";
import { listen } from "./live.js";
import { PAGES } from "./pages.js";
import { link, parse, toQuery } from "./route.js";
import { switchTheme } from "./theme.js";
import { count } from "./words.js";

const brand = h("a", { class: "brand", href: link("runs"), "aria-label": "Sonde, all runs" }, h("img", { src: "assets/icon.svg", alt: "" }), "Sonde");
const bar = document.getElementById("bar"), main = document.getElementById("main");
const QUIET_MS = 1500; // between two redraws of a live run
const REST = 3; // and this often as long as a redraw took, so that a large run does not keep the server busy
let stop = new AbortController(), here = null, shown = null, listening = null;

/**
 * What a page is handed.
 * @typedef {Object} Context
 * @property {import("./route.js").Route} route
 * @property {?string} run
 * @property {URLSearchParams} query
 * @property {AbortSignal} signal    aborts when the page is left
 * @property {(values: Object, options?: {push?: boolean}) => void} keep  puts state into the address, without redrawing
 * @property {(values: Object) => string} here  the address of this page with some state changed
 * A page's module has `show(place, context)`, which may return `{refresh(), keys, title}`; `refresh` is called when
 * the run has changed.
 */

function context(route, signal) {
  const changed = (values) => {
    const query = new URLSearchParams(route.query);
    for (const [name, value] of Object.entries(values)) {
      query.delete(name);
      for (const [each, text] of toQuery({ [name]: value })) query.append(each, text);
    }
    return query;
  };
  const address = (query) => link(route.page, { run: route.run, rest: route.rest, query });
  return {
    route, run: route.run, query: route.query, signal,
    here: (values) => address(changed(values)),
    keep(values, { push = false } = {}) {
      if (signal.aborted) return; // another page has the address by now
      route.query = changed(values);
      this.query = route.query;
      history[push ? "pushState" : "replaceState"](push ? null : history.state, "", address(route.query));
    },
  };
}

/** Without a page in the address: the list of runs, or the overview of the only run. */
async function start() {
  if (location.hash.replace(/^#\/?$/, "")) return;
  const { runs } = await getJson("runs").catch(() => ({ runs: [] }));
  if (runs.length === 1 && !runs[0].problem && !location.hash) history.replaceState(null, "", link("overview", { run: runs[0].id }));
}

async function go() {
  if (location.hash === "#main") return; // the link that skips the bar
  const route = parse(location.hash);
  const page = PAGES.find((each) => each.name === route.page && Boolean(each.ofRun) === (route.run !== null));
  stop.abort();
  stop = new AbortController();
  document.querySelector("dialog[open]")?.close(); // it belongs to the page that was left
  const { signal } = stop;
  here = route;
  shown = null;
  setPageKeys([]);
  drawBar(route);
  follow(route.run);
  readParts(route);
  main.dataset.page = route.page;
  main.removeAttribute("data-ready");
  main.setAttribute("aria-busy", "true");
  const place = h("div", { class: "page" });
  try {
    if (!page) throw new Error(`There is no such page: ${location.hash}`);
    const module = await page.load().catch(() => { throw silence(); });
    const made = await module.show(place, context(route, signal));
    if (signal.aborted) return;
    shown = made ?? {};
    setPageKeys(shown.keys ?? []);
    document.title = `${page.title}${route.run ? ` · ${shown.title ?? nameOf(route.run)}` : ""} · Sonde`;
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    document.title = "Sonde";
    replace(place, problem(error));
  }
  replace(main, place);
  main.dataset.ready = "true";
  main.setAttribute("aria-busy", "false");
  scrollBack(history.state?.top ?? 0, signal);
}

let isScrollingBack = false;

const SETTLING_MS = 5000, LONGEST_MS = 60000;

/** Scroll to where a page was left, and again while its figures come and its height changes, until the reader moves. */
function scrollBack(top, signal) {
  clearTimeout(resting);
  window.scrollTo(0, top);
  isScrollingBack = top > 0;
  if (!isScrollingBack) return;
  const began = performance.now();
  let quiet = 0;
  const grown = new ResizeObserver(() => {
    window.scrollTo(0, top);
    clearTimeout(quiet);
    if (performance.now() - began > LONGEST_MS) return end();
    // Figures may come late on a busy machine: it is over when the height has rested at the right place.
    quiet = setTimeout(() => { if (!signal.aborted && window.scrollY >= top - 1) end(); }, SETTLING_MS);
  });
  const end = () => { clearTimeout(quiet); grown.disconnect(); isScrollingBack = false; };
  grown.observe(main);
  for (const kind of ["wheel", "touchstart", "pointerdown", "keydown"]) window.addEventListener(kind, end, { once: true, passive: true, signal });
  signal.addEventListener("abort", end, { once: true });
}

const HEADINGS = { RunNotFound: "There is no such run", NotInCopy: "Not in this copy", NoAnswer: "No answer" };

/** What is said in the place of a page that cannot be shown. */
function problem(error) {
  return h("div", { class: "problem", role: "alert" }, h("h1", {}, HEADINGS[error.kind] ?? "This cannot be shown"), h("p", {}, error.message),
    h("p", { class: "controls" }, h("a", { href: link("runs") }, "All runs"),
      history.length > 1 ? h("button", { type: "button", onclick: () => history.back() }, "Back") : null,
      h("button", { type: "button", onclick: go }, "Try again")));
}

let resting = 0;
window.addEventListener("scroll", () => {
  clearTimeout(resting);
  if (isScrollingBack) return;
  resting = setTimeout(() => { if (main.dataset.ready) history.replaceState({ top: window.scrollY }, ""); }, 120);
}, { passive: true });

/** The name of a run, from its id. */
export function nameOf(run) {
  const text = run.replace(/^\d+-/, "").replaceAll("~", "%");
  try {
    return decodeURIComponent(text);
  } catch {
    return run;
  }
}

const parts = new Map(); // by run: which pages have something to show

function drawBar(route) {
  const focused = bar.contains(document.activeElement), known = parts.get(route.run) ?? {};
  const address = (page) => link(page.name, { run: page.ofRun ? route.run : null, query: page.name === "compare" && route.run ? { run: [route.run] } : {} });
  const tab = (page) => h("a", { href: address(page), "aria-current": route.page === page.name ? "page" : null }, page.title);
  const listed = PAGES.filter((page) => page.inBar !== false && (!page.ofRun || route.run) && !(window.sondeCopy && page.name === "compare"));
  const isEmpty = (page) => known[page.name] === false && route.page !== page.name;
  const empty = listed.filter(isEmpty);
  const more = empty.length ? h("details", { class: "menu" }, h("summary", { title: "Pages without anything in this run" }, "More"),
    h("div", { class: "menubody" }, empty.map((page) => h("a", { href: address(page), class: "emptypage" }, page.title, h("span", { class: "quiet" }, page.fill))))) : null;
  const nav = h("nav", { id: "pages", "aria-label": "Pages" }, listed.filter((page) => !isEmpty(page)).map(tab), more);
  const title = PAGES.find((page) => page.name === route.page)?.title ?? "Pages";
  const fold = h("button", { type: "button", class: "fold", "aria-expanded": "false", "aria-controls": "pages", onclick: () => fold.setAttribute("aria-expanded", String(nav.classList.toggle("open"))) }, "☰ ", title);
  replace(bar,
    brand, fold, nav,
    route.run ? h("span", { class: "runname", title: nameOf(route.run) }, nameOf(route.run)) : null,
    h("span", { id: "pulse", class: "pulse", role: "status" }),
    h("span", { class: "end" },
      h("button", { type: "button", onclick: switchTheme, title: "Light or dark (d)" }, "◐", h("span", { class: "unseen" }, "Light or dark")),
      h("button", { type: "button", onclick: showHelp, title: "Keys (?)" }, "?", h("span", { class: "unseen" }, " Keys"))));
  if (focused) bar.querySelector("[aria-current]")?.focus(); // keep the focus for keyboard users
}

/** Ask which pages of a run have something to show, and fold the others away. */
async function readParts(route) {
  if (route.run === null) return;
  const answer = await getJson(runPath(route.run, "parts"), {}).catch(() => null);
  if (!answer) return;
  const isNew = JSON.stringify(parts.get(route.run)) !== JSON.stringify(answer);
  parts.set(route.run, answer);
  if (isNew && here === route && !bar.contains(document.activeElement)) { drawBar(route); showPulse(); }
  bar.dataset.knownOf = route.run;
}

/** Listen to the run that is shown; the pages of one run share one listener. */
function follow(run) {
  if (listening?.run === run) {
    showPulse();
    return;
  }
  listening?.stop.abort();
  listening = null;
  keepAnswers(run, null);
  if (run === null) return;
  const mine = { run, stop: new AbortController(), pulse: null, how: null, timer: 0, quiet: QUIET_MS, missed: false };
  listening = mine;
  listen(run, (pulse) => {
    const before = mine.pulse;
    mine.pulse = pulse;
    keepAnswers(run, pulse);
    showPulse();
    if (before && before.version !== pulse.version) soon(mine);
  }, (how) => {
    mine.how = how;
    if (how === "lost" || how === "gone") keepAnswers(run, null);
    showPulse();
  }, mine.stop.signal);
}

function soon(mine) {
  if (mine.timer) {
    mine.missed = true;
    return;
  }
  mine.timer = setTimeout(async () => {
    if (listening !== mine) return;
    if (document.hidden) { // nobody looks; a hidden window must not keep the server busy
      document.addEventListener("visibilitychange", () => { mine.timer = 0; soon(mine); }, { once: true });
      return;
    }
    const begin = performance.now();
    mine.missed = false;
    await Promise.resolve(shown?.refresh?.()).catch(() => {}); // left meanwhile, or no answer, which the bar says
    mine.quiet = Math.max(QUIET_MS, REST * (performance.now() - begin));
    mine.timer = 0;
    if (mine.missed) soon(mine); // it changed again while it was drawn
  }, mine.quiet);
}

const STATUS_MEANING = {
  live: "It is being written now.",
  crashed: "The process ended without recording why: it was killed, ran out of memory, or the machine went down.",
  interrupted: "It was stopped before its end, by Ctrl-C or a signal.",
  failed: "It ended with an error.",
  deleted: "Its folder is gone. What was read before is still shown.",
};

/** Show the state of the followed run, and how it arrives, in the bar, which may have been redrawn since. */
function showPulse() {
  const place = document.getElementById("pulse");
  if (!listening || !place) return;
  const { pulse, how } = listening;
  if (how) place.dataset.how = how;
  if (!pulse) return;
  place.dataset.status = pulse.status;
  place.dataset.step = String(pulse.last_step ?? "");
  place.title = STATUS_MEANING[pulse.status] ?? "";
  replace(place, h("span", { class: `status ${pulse.status}` }, pulse.status), pulse.last_step === null ? `, no step${pulse.status === "live" ? " yet" : ""}` : ` step ${count(pulse.last_step)}`);
}

addKeys([
  { keys: "?", what: "show these keys", act: showHelp },
  { keys: "d", what: "light or dark", act: switchTheme },
  { keys: "/", what: "search", act: () => main.querySelector("[data-search]")?.focus() },
  ...PAGES.filter((page) => page.key).map((page) => ({
    keys: `g ${page.key}`, what: `go to ${page.title}`,
    act: () => {
      if (!page.ofRun) location.hash = link(page.name, { query: page.name === "compare" && here.run ? { run: [here.run] } : {} });
      else if (here.run) location.hash = link(page.name, { run: here.run });
    },
  })),
]);
explain(main);
window.addEventListener("hashchange", go);
history.scrollRestoration = "manual";
start().then(go).finally(() => setTimeout(() => { prepare(); for (const page of PAGES) page.load().catch(() => {}); }, 200));
