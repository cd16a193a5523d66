// Builds elements. Text goes in as text only: nothing here ever parses markup, so no name from a run can become any.

/**
 * Make an element.
 * @param {string} tag
 * @param {Object} [props] `class`, `dataset`, `onclick` and other handlers, anything else as an attribute; null leaves out
 * @param {...(Node|string|number|null|undefined|Array)} children
 * @returns {HTMLElement}
 */
export function h(tag, props = {}, ...children) {
  return fill(dress(document.createElement(tag), props), children);
}

/** Make an SVG element; see `h`. */
export function svg(tag, props = {}, ...children) {
  return fill(dress(document.createElementNS("http://www.w3.org/2000/svg", tag), props), children);
}

function dress(element, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return element;
}

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Put new children in the place of all that an element holds. */
export function replace(element, ...children) {
  element.replaceChildren();
  return fill(element, children);
}

const last = new WeakMap();

/** Whether a place has something else to show than the last time; what stays the same is not drawn anew under its reader. */
export function changes(place, ...values) {
  const text = JSON.stringify(values);
  if (last.get(place) === text) return false;
  last.set(place, text);
  return true;
}

/** A labelled select. `options` are texts or [value, text]. */
export function choose(label, options, value, onchange) {
  const pairs = options.map((each) => (Array.isArray(each) ? each : [each, each]));
  if (value && !pairs.some(([each]) => each === value)) pairs.unshift([value, value]);
  const select = h("select", { onchange: () => onchange(select.value) },
    pairs.map(([each, text]) => h("option", { value: each, selected: each === value }, text)));
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/** A labelled search field; Enter or leaving it counts, and so does a pause in typing. */
export function search(label, value, placeholder, onchange) {
  let timer = 0, reported = value;
  const tell = () => {
    clearTimeout(timer);
    if (input.value !== reported) onchange((reported = input.value));
  };
  const input = h("input", {
    type: "search", value, placeholder, "data-search": true, spellcheck: "false", autocomplete: "off",
    oninput: () => { clearTimeout(timer); timer = setTimeout(tell, 250); }, onchange: tell,
  });
  return h("label", { class: "field grow" }, h("span", {}, label), input);
}

/** A panel with a heading. */
export function panel(title, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), children);
}

/** Do something once what has been drawn can be seen. */
/** Whether this page is a copy that was exported: it can show what it holds, and nothing can be asked of it. */
export const isCopy = Boolean(window.sondeCopy);
/** Whether an answer can be had: of a server always, of a copy if it holds it. */
export const canAsk = (path, query = {}) => !isCopy || window.sondeCopy.holds(path, query);
/** A text that filters when it is clicked; only the text in a copy, which cannot filter. */
export const filterButton = (text, words, onclick) => (isCopy ? h("span", { title: words }, text) : h("button", { type: "button", class: "plain", title: words, "aria-label": words, onclick }, text));

export const whenIdle = (act) => requestAnimationFrame(() => (window.requestIdleCallback ?? setTimeout)(act, { timeout: 500 }));
