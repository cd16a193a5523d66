// A finding: what is wrong, and, opened, how that is known and what to do about it.
import { h } from "./dom.js";
import { link } from "./route.js";
import { count, kindWords, percent, short } from "./words.js";

const RELATIONS = { ">=": "≥", "<=": "≤", "!=": "≠", "==": "=" };

/** The kinds of findings that are open: those the address names, and the first where it names none. */
export function openFindings(context, findings, first = true) {
  const asked = context.query.get("open");
  if (asked !== null) return asked.split(",");
  return first && findings.length && findings[0].severity !== "info" ? [findings[0].kind] : [];
}

/** Put into the address which findings are open; `-` says none, which is not the usual. */
export function keepOpen(context, place) {
  const open = [...place.querySelectorAll("details.finding[open]")].map((each) => each.dataset.kind).join(",");
  context.keep({ open: open || "-" });
}

/** @returns {HTMLElement} a card that opens; `ontoggle` is called when a reader opens or closes it */
export function findingCard(finding, run, { open = false, ontoggle = () => {}, onstep = null } = {}) {
  const row = (name, ...value) => [h("dt", {}, name), h("dd", {}, value)];
  return h("details", { class: `finding ${finding.severity}`, open, "data-kind": finding.kind },
    h("summary", { onclick: () => setTimeout(ontoggle) }, h("span", { class: `severity ${finding.severity}` }, finding.severity), h("b", {}, finding.title),
      h("span", { class: "note" }, `${places(finding.sites)}${finding.when}`)),
    h("p", {}, finding.cause),
    h("p", {}, onstep ? h("button", { type: "button", class: "step", onclick: () => onstep(finding.step) }, `Go to step ${count(finding.step)}`) : h("a", { href: link("overview", { run, query: { step: finding.step } }) }, `Go to step ${count(finding.step)}`),
      finding.sites.length && finding.layer ? [" · ", h("a", { href: link("layers", { run, query: { site: [finding.layer], step: finding.step } }) }, "its layer at that step")] : null),
    h("dl", {},
      finding.line ? row("line", h("code", {}, finding.line.place), " ", h("code", { class: "quiet" }, finding.line.code)) : null,
      finding.sites.length ? row("where", h("span", { class: "mono" }, finding.sites.slice(0, 8).join(", ")), finding.sites.length > 8 ? ` and ${finding.sites.length - 8} more` : "") : null,
      finding.evidence.length ? row("because", h("ul", {}, finding.evidence.map((each) => evidence(each, run)))) : null,
      finding.fix ? row("fix", h("span", { class: "fix" }, finding.fix)) : null,
      finding.refute ? row("refute", finding.refute) : null,
      finding.explains.length ? row("explains", finding.explains.map(kindWords).join(", ")) : null,
      finding.confidence === null ? null : row("confidence", percent(finding.confidence))));
}

const places = (sites) => (sites.length ? `${sites[0]}${sites.length > 1 ? ` and ${sites.length - 1} more` : ""}, ` : "");

function evidence(item, run) {
  const held = item.relation && item.threshold !== null ? h("span", { class: "quiet" }, ` (${RELATIONS[item.relation] ?? item.relation} ${short(item.threshold)})`) : null;
  const words = [`${item.name}: `, h("b", {}, short(item.value)), held];
  if (!item.site) return h("li", {}, words);
  return h("li", {}, words, " ", h("a", { href: link("layers", { run, query: { site: [item.site], stat: item.stat } }) }, "curve"));
}
