// Draws figures that the server made, with the plotly.js of its installed package. A figure is fetched when it comes
// into view, and drawn again when its run or the theme changes.
import { getJson } from "./api.js";
import { h, replace, whenIdle } from "./dom.js";
import { onTheme, theme } from "./theme.js";

const OPTIONS = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] };
const version = document.querySelector("script[data-plotly]")?.dataset.plotly;
let library = null, themes = null;

function load() {
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: version ? `plotly.js?v=${version}` : "plotly.js", onload: () => resolve(window.Plotly),
      onerror: () => { library = null; reject(new Error("plotly.js could not be loaded from the viewer.")); } });
    document.head.append(script);
  });
  return library;
}

/** Fetch what every figure needs before the first one is asked for: the script is large, and the server must load Plotly too. */
export const prepare = () => Promise.all([load(), templates()]).catch(() => {}); // the first figure says what is wrong

const templates = () => (themes ??= getJson("themes").catch((error) => { themes = null; throw error; }));

/**
 * A figure with its heading.
 * @param {string} path    where the server makes it: `run/<id>/figure/<name>`
 * @param {Object} query
 * @param {Object} options `signal` ends it; `height` in pixels; `title` in place of the server's; `onpoint(point)` is
 *   called when a point is clicked; `tools` are elements beside the heading; `hideEmpty` shows nothing where there is
 *   nothing; `after` is a promise to wait for, so that a more important figure comes first
 * @returns {HTMLElement} with `update(query)` to draw it anew, and `ready`, a promise that it stands or has said why not
 */
export function figure(path, query = {}, { signal, height, title, onpoint, tools = [], hideEmpty = false, after = null } = {}) {
  const heading = h("h2", {}, title ?? "…"), note = h("p", { class: "note" });
  const place = h("div", { class: "plot", style: { "min-height": `${height ?? 260}px` } });
  const element = h("section", { class: "panel figure", "aria-busy": "true", tabindex: "-1" },
    h("div", { class: "head" }, heading, h("div", { class: "tools" }, tools)), note, place);
  let drawn = null, asked = query, seen = false, turn = 0, plotted = false, stands;
  element.ready = new Promise((resolve) => { stands = resolve; });

  async function draw() {
    if (drawn === null || signal?.aborted) return;
    if (drawn.empty) {
      sayInstead(h("p", { class: "quiet" }, drawn.missing));
      return;
    }
    const [Plotly, looks] = await Promise.all([load(), templates()]);
    if (signal?.aborted) return;
    place.style.removeProperty("min-height");
    if (!plotted) replace(place);
    plotted = true;
    await Plotly.react(place, drawn.data, fitted(drawn, looks[theme()], height), OPTIONS);
    element.setAttribute("aria-busy", "false");
    if (onpoint && !place.dataset.listens) {
      place.dataset.listens = "true";
      place.on("plotly_click", (event) => event.points?.length && onpoint(event.points[0], event));
    }
  }

  /** Put words in the place of the plot. */
  function sayInstead(words) {
    if (plotted) window.Plotly.purge(place);
    plotted = false;
    place.removeAttribute("data-listens");
    place.style.removeProperty("min-height");
    replace(place, words);
    element.setAttribute("aria-busy", "false");
  }

  async function fetchAndDraw() {
    const mine = ++turn;
    try {
      const answer = await getJson(path, asked, signal);
      if (mine !== turn) return;
      drawn = answer;
      heading.textContent = title ?? answer.title;
      element.setAttribute("aria-label", heading.textContent);
      note.textContent = answer.note;
      element.hidden = hideEmpty && answer.empty;
      element.dataset.empty = String(answer.empty);
      await draw();
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      if (error.kind === "NoAnswer" && drawn) return; // what was drawn is still true; the bar shows that there is no answer
      drawn = null;
      heading.textContent = title ?? "Not drawn";
      note.textContent = "";
      sayInstead(h("p", { class: "problem", role: "alert" }, error.message));
    } finally {
      stands();
    }
  }

  element.update = (next = asked) => {
    asked = next;
    if (seen) return fetchAndDraw();
    return Promise.resolve();
  };
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    Promise.resolve(after).then(() => { seen = true; fetchAndDraw(); });
  }, { rootMargin: "300px" });
  watcher.observe(element);
  const forget = onTheme(draw);
  signal?.addEventListener("abort", () => {
    stands();
    watcher.disconnect();
    forget();
    if (plotted) whenIdle(() => window.Plotly.purge(place)); // else its listeners keep the page's memory growing
  });
  return element;
}

/** The layout of a figure in a theme; without its title, which is text of the page, it needs less room above. */
function fitted(made, template, height) {
  const layout = { ...made.layout, template, autosize: true, title: undefined, uirevision: "kept" };
  delete layout.width;
  const above = made.layout.annotations?.length && made.layout.xaxis2 ? 34 : 14;
  const legend = made.layout.margin?.b ?? 0;
  const below = legend > 70 && (made.data?.length ?? 0) < 7 ? 70 : legend || 44; // without a legend only the axis is below
  layout.margin = { ...(made.layout.margin ?? {}), t: above, r: 16, b: below };
  const own = (made.layout.height ?? 400) - 50;
  layout.height = height ?? Math.max(own, 180);
  if (layout.yaxis?.tickvals) layout.yaxis = thinnedTicks(layout.yaxis, layout.height - 90);
  return layout;
}

/** An axis with as many names as have room below each other. */
function thinnedTicks(axis, room) {
  const stride = Math.ceil((axis.tickvals.length * 13) / Math.max(room, 13));
  const kept = (_, at) => at % stride === 0;
  return { ...axis, tickvals: axis.tickvals.filter(kept), ticktext: axis.ticktext?.filter(kept) };
}
