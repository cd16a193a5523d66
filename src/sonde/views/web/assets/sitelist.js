// The sites of a run as a list that folds: those of one block together, each block under its name.
import { h, replace } from "./dom.js";
import { plural } from "./words.js";

const MANY = 40; // with more sites than this, blocks begin folded

/**
 * @param {{chosen: () => string[], select: (keys: string[]) => void}} options
 * @returns {HTMLElement} with `show(sites)`, `mark()` after another choice, and `move(by)` to the next site
 */
export function siteList({ chosen, select }) {
  const list = h("div", { class: "sitelist", role: "listbox", "aria-label": "Sites, up and down choose one", "aria-multiselectable": "true", tabindex: "0", onkeydown: steer });
  let sites = [], groups = [];

  function steer(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -sites.length, End: sites.length }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    list.move(by);
  }

  const option = (site) => h("button", { type: "button", role: "option", tabindex: "-1", id: `site-${site.at}`, "data-site": site.key, title: `${site.key}\n${site.kind} ${site.shape.join("×")} ${site.dtype}. Shift-click to add.`,
    onclick: (event) => {
      const before = chosen(), adds = event.shiftKey || event.ctrlKey || event.metaKey;
      if (!adds) select([site.key]);
      else select(before.includes(site.key) ? before.filter((each) => each !== site.key) : [...before, site.key]);
    } }, headAndTail(inBlock(site)));

  /** A block with its sites, which are drawn when it is opened. */
  function block(members, isOpen) {
    const name = prefixOf(members) || blockOf(members[0]), inside = h("div", { role: "group", "aria-label": name, class: "block" });
    const head = h("button", { type: "button", class: "blockhead", tabindex: "-1", title: name, onclick: () => made.fold(head.getAttribute("aria-expanded") === "true") },
      headAndTail(headOf(members)), h("span", { class: "quiet" }, plural(members.length, "site")));
    const made = { members, elements: [head, inside], fold(closes) {
      head.setAttribute("aria-expanded", String(!closes));
      replace(inside, closes ? null : members.map(option));
      if (!closes) list.mark();
    } };
    head.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) replace(inside, members.map(option));
    return made;
  }

  list.show = (next) => {
    sites = next.map((site, at) => ({ ...site, at }));
    const parts = []; // in the order of the model: what is in no block stands between them
    for (const site of sites) {
      const name = blockOf(site);
      if (parts.at(-1)?.name !== name) parts.push({ name, members: [] });
      parts.at(-1).members.push(site);
    }
    const folds = sites.length > MANY && parts.length > 1, opens = parts.find((part) => part.name !== "");
    groups = parts.map((part) => (part.name === "" || parts.length === 1
      ? { members: part.members, elements: part.members.map(option), fold() {} }
      : block(part.members, !folds || part === opens || part.members.some((site) => chosen().includes(site.key)))));
    replace(list, groups.map((each) => each.elements));
    list.mark();
    if (chosen().length) list.reveal(chosen()[0]);
  };

  list.mark = () => {
    const marked = new Set(chosen());
    list.removeAttribute("aria-activedescendant");
    for (const each of list.querySelectorAll("[data-site]")) {
      each.setAttribute("aria-selected", String(marked.has(each.dataset.site)));
      if (each.dataset.site === chosen()[0]) list.setAttribute("aria-activedescendant", each.id);
    }
  };

  /** Show where a site is: its block is opened. */
  list.reveal = (key) => {
    const site = sites.find((each) => each.key === key), group = groups.find((each) => each.members.includes(site));
    if (!site) return;
    if (!document.getElementById(`site-${site.at}`)) group.fold(false);
    const row = document.getElementById(`site-${site.at}`)?.getBoundingClientRect(), box = list.getBoundingClientRect();
    if (row) list.scrollTop += row.top < box.top ? row.top - box.top : Math.max(0, row.bottom - box.bottom); // the page itself stays
  };

  list.move = (by) => {
    if (!sites.length) return;
    const from = sites.findIndex((site) => site.key === chosen()[0]);
    const to = Math.min(Math.max(from < 0 ? (by > 0 ? 0 : sites.length - 1) : from + by, 0), sites.length - 1);
    list.reveal(sites[to].key);
    select([sites[to].key]);
  };
  return list;
}

const blockOf = (site) => { const at = site.short.indexOf(" · "); return at > 0 ? site.short.slice(0, at) : ""; };

/** How a site is called below the name of its block: by the block's number and its role. */
const inBlock = (site) => site.short.replace(/^\S+ (?=\S+ · )/, "");

/** How a block is called: by its container and number, of which a short name may have left out the container. */
function headOf(members) {
  const block = blockOf(members[0]);
  return block.includes(" ") ? block : prefixOf(members).split(".").slice(-1 - block.split(".").length).join(".") || block;
}

/** What the names of some sites have in common, up to a dot. */
function prefixOf(sites) {
  let common = sites[0].name;
  for (const { name } of sites) while (!name.startsWith(common)) common = common.slice(0, -1);
  return common.replace(/\.?[^.]*$/, "");
}

/** A name whose end stays readable where the whole does not fit. */
function headAndTail(name) {
  const at = Math.max(0, name.lastIndexOf("."));
  return [at ? h("span", { class: "head" }, name.slice(0, at)) : null, h("span", { class: "tail" }, name.slice(at))];
}
