// Keys. A page adds its own to those that work everywhere; `?` lists them all.
import { h } from "./dom.js";

const lasting = [];
let ofPage = [], waiting = "", timer = 0;

/**
 * @typedef {Object} Key
 * @property {string} keys  such as `j`, `ArrowLeft` or `g r` for one after the other
 * @property {string} what  what it does, in a few words
 * @property {() => void} act
 */

/** Add keys that work on every page. @param {Key[]} keys */
export const addKeys = (keys) => lasting.push(...keys);

/** Set the keys of the page that is shown. @param {Key[]} keys */
export const setPageKeys = (keys) => { ofPage = keys; };

function typing(target) {
  if (target.closest?.("[contenteditable]")) return true;
  return ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName) && target.type !== "checkbox";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return escape(event);
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  const all = [...ofPage, ...lasting];
  const pressed = waiting ? `${waiting} ${event.key}` : event.key;
  const found = all.find((each) => each.keys === pressed);
  waiting = "";
  clearTimeout(timer);
  if (found) {
    event.preventDefault();
    found.act();
  } else if (all.some((each) => each.keys.startsWith(`${event.key} `))) {
    waiting = event.key;
    timer = setTimeout(() => { waiting = ""; }, 1500);
  }
});

function escape(event) {
  if (typing(event.target)) event.target.blur();
}

const SIGNS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "space" };

// What the browser and the things on a page do by themselves.
const USUAL = [
  { keys: "Tab", what: "to the next link, button or field" },
  { keys: "Enter", what: "open what has the focus" },
  { keys: "ArrowUp ArrowDown", what: "in a list of sites, a map of scores or a slider" },
  { keys: "Escape", what: "leave a field, close this" },
];

/** Show all keys. */
export function showHelp() {
  if (document.querySelector("dialog[open]")) return;
  const row = (each) => h("tr", {}, h("td", {}, each.keys.split(" ").map((key) => h("kbd", {}, SIGNS[key] ?? key))), h("td", {}, each.what));
  const group = (title, keys) => (keys.length ? h("section", {}, h("h3", {}, title), h("table", { "aria-label": title }, h("tbody", {}, keys.map(row)))) : null);
  const leading = lasting.filter((each) => each.keys.startsWith("g ")), rest = lasting.filter((each) => !each.keys.startsWith("g "));
  const close = () => dialog.close();
  const dialog = h("dialog", { class: "help", "aria-label": "Keys", onclose: () => dialog.remove(),
    onclick: (event) => { if (event.target === dialog) close(); } },
    h("div", { class: "head" }, h("h2", {}, "Keys"), h("button", { type: "button", onclick: close }, "Close")),
    h("div", { class: "keys" }, h("div", {}, group("On this page", ofPage), group("Everywhere", [...rest, ...USUAL])), group("Go to", leading.map((each) => ({ ...each, what: each.what.replace(/^go to /, "") })))));
  document.body.append(dialog);
  dialog.showModal();
}
