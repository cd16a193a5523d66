// What one step computed: batch, modules, loss, backward and optimizer, as a tree that folds by module.
import { getJson, runPath } from "../api.js";
import { changes, choose, h, replace } from "../dom.js";
import { count, plural } from "../words.js";

const OPEN_DEPTH = 1;
const MANY = 12; // operations in a row, outside of any module, that are folded into one line

export async function show(place, context) {
  const { run, signal } = context;
  const tree = h("div", { class: "tape" }), about = h("p", { class: "note", role: "status" }), controls = h("div", { class: "controls" });
  let tapes = [];

  const chosen = () => tapes.find((each) => String(each.step) === context.query.get("step")) ?? tapes.at(-1);

  /** One line: what, what came out of it, and the user's line. */
  const line = (node) => [h("span", { class: `mono tape-${node.kind}` }, node.title), h("span", { class: "mono quiet" }, node.result ?? ""),
    h("span", { class: "mono quiet tape-line", title: node.source ?? "" }, node.line ?? "")];

  /** A node with what lies inside; that is drawn when it is opened for the first time. */
  function draw(node, depth) {
    if (!node.children?.length) return h("div", { class: "tape-row" }, line(node));
    const inside = h("div", { class: "tape-inside" });
    const fill = () => { if (!inside.firstChild) replace(inside, node.kind === "row" ? node.children.map((each) => draw(each, depth + 1)) : drawAll(node.children, depth + 1)); };
    const open = node.kind === "module" && depth < OPEN_DEPTH;
    if (open) fill();
    return h("details", { open, ontoggle: fill }, h("summary", { class: "tape-row" }, line(node)), inside);
  }

  /** Nodes one below the other; many operations in a row become one line that opens. */
  function drawAll(nodes, depth) {
    const rows = [];
    for (const node of nodes) {
      const isPlain = node.kind === "op" && !node.children?.length;
      if (isPlain && rows.at(-1)?.isPlain) rows.at(-1).nodes.push(node);
      else rows.push({ isPlain, nodes: [node] });
    }
    return rows.flatMap((row) => (row.nodes.length > MANY ? [draw(folded(row.nodes), depth)] : row.nodes.map((each) => draw(each, depth))));
  }

  function folded(nodes) {
    const lines = [...new Set(nodes.map((each) => each.line).filter(Boolean))];
    return { kind: "row", title: plural(nodes.length, "operation"), result: [...new Set(nodes.map((each) => each.title.replace(/\(.*/s, "")))].slice(0, 6).join(", "), line: lines.length > 1 ? `${lines[0]} and ${plural(lines.length - 1, "other line")}` : lines[0], source: lines.join("\n"), children: nodes };
  }

  function redraw() {
    const tape = chosen();
    if (!changes(tree, tape ?? null)) return;
    about.textContent = tape ? [`${plural(tape.operations, "operation")}, taped: ${tape.reason}.`, ...tape.notes].join(" ") : "No step of this run was taped.";
    replace(tree, drawAll(tape?.nodes ?? [], 0));
    const options = tapes.map((each) => [String(each.step), count(each.step)]);
    replace(controls, h("h1", {}, "Tape"), tape ? choose("Step", options, String(tape.step), (step) => { context.keep({ step }); redraw(); }) : null);
  }

  async function read() {
    tapes = (await getJson(runPath(run, "tape"), {}, signal)).tapes;
    redraw();
  }

  const overview = await getJson(runPath(run), {}, signal);
  replace(place, controls, about, tree);
  await read();
  return { title: overview.name, refresh: read, keys: [] };
}
