// Draws figures that the server made, with the plotly.js of its installed package. A figure is fetched when it comes
// into view, and drawn again when its run or the theme changes.
import { getJson } from "./api.js";
import { h, replace } from "./dom.js";
import { onTheme, theme } from "./theme.js";

const OPTIONS = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] };
let library = null, themes = null;

function load() {
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "plotly.js", onload: () => resolve(window.Plotly),
      onerror: () => { library = null; reject(new Error("plotly.js could not be loaded from the viewer.")); } });
    document.head.append(script);
  });
  return library;
}

const templates = () => (themes ??= getJson("themes").catch((error) => { themes = null; throw error; }));

/**
 * A figure with its heading.
 * @param {string} path    where the server makes it: `run/<id>/figure/<name>`
 * @param {Object} query
 * @param {Object} options `signal` ends it; `height` in pixels; `title` in place of the server's; `onpoint(point)` is
 *   called when a point is clicked; `tools` are elements beside the heading; `hideEmpty` shows nothing where there is nothing
 * @returns {HTMLElement} with `update(query)` to draw it anew
 */
export function figure(path, query = {}, { signal, height, title, onpoint, tools = [], hideEmpty = false } = {}) {
  const heading = h("h2", {}, title ?? "…"), note = h("p", { class: "note" });
  const place = h("div", { class: "plot", style: { "min-height": `${height ?? 260}px` } });
  const element = h("section", { class: "panel figure", "aria-busy": "true", tabindex: "-1" },
    h("div", { class: "head" }, heading, h("div", { class: "tools" }, tools)), note, place);
  let drawn = null, asked = query, seen = false, turn = 0;

  async function draw() {
    if (drawn === null || signal?.aborted) return;
    const [Plotly, looks] = await Promise.all([load(), templates()]);
    if (signal?.aborted) return;
    place.style.removeProperty("min-height");
    await Plotly.react(place, drawn.data, fitted(drawn, looks[theme()], height), OPTIONS);
    element.setAttribute("aria-busy", "false");
    if (onpoint && !place.dataset.listens) {
      place.dataset.listens = "true";
      place.on("plotly_click", (event) => event.points?.length && onpoint(event.points[0], event));
    }
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
      drawn = null;
      window.Plotly?.purge(place);
      heading.textContent = title ?? "Not drawn";
      replace(place, h("p", { class: "problem", role: "alert" }, error.message));
      place.removeAttribute("data-listens");
      element.setAttribute("aria-busy", "false");
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
    seen = true;
    fetchAndDraw();
  }, { rootMargin: "300px" });
  watcher.observe(element);
  const forget = onTheme(draw);
  signal?.addEventListener("abort", () => {
    watcher.disconnect();
    forget();
    window.Plotly?.purge(place); // else its listeners keep the page's memory growing
  });
  return element;
}

/** The layout of a figure in a theme; without its title, which is text of the page, it needs less room above. */
function fitted(made, template, height) {
  const layout = { ...made.layout, template, autosize: true, title: undefined, uirevision: "kept" };
  delete layout.width;
  const above = made.layout.annotations?.length && made.layout.xaxis2 ? 34 : 14;
  const below = made.layout.margin?.b > 70 && (made.data?.length ?? 0) < 7 ? 70 : made.layout.margin?.b;
  layout.margin = { ...(made.layout.margin ?? {}), t: above, r: 16, ...(below ? { b: below } : {}) };
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
