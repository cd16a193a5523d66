// What the program printed, the code that ran, and where it ran.
import { getJson, runPath } from "../api.js";
import { changes, h, panel, replace, search } from "../dom.js";
import { clock, count, plural } from "../words.js";

export async function show(place, context) {
  const { run, signal } = context;
  let answer = await getJson(runPath(run, "logs"), {}, signal);
  const output = h("div"), code = h("div"), environment = h("div"), said = h("p", { class: "note", role: "status" });
  let follow = true;
  const filter = () => (context.query.get("filter") ?? "").toLowerCase();
  const how = () => h("p", { class: "quiet" }, "What a program prints and its source files are kept on request: ", h("code", {}, "sonde.watch(model, optimizer, run=\"runs/first\", logs=True)"), " or ", h("code", {}, "sonde run -o logs=true train.py"), ".");
  place.append(h("div", { class: "controls" }, h("h1", {}, "Logs"), answer.output ? search("Filter", context.query.get("filter") ?? "", "text in a line", (text) => { context.keep({ filter: text }); drawOutput(); }) : null, said), output, h("div", { class: "columns" }, code, environment));

  function drawOutput() {
    if (!answer.output) { replace(output, panel("Printed", how())); return; }
    if (!answer.output.total) { replace(output, panel("Printed", h("p", { class: "quiet" }, "The program printed nothing while it was watched."))); return; }
    const { lines, total, cut } = answer.output, first = total - lines.length, wanted = filter();
    const rows = lines.map((line, at) => ({ ...line, at: first + at })).filter((line) => !wanted || line.text.toLowerCase().includes(wanted));
    said.textContent = `${wanted ? `${count(rows.length)} of ` : ""}${plural(total, "line")}${first ? `; the last ${count(lines.length)} are shown` : ""}`;
    const box = h("div", { class: "printed", tabindex: "0", role: "log", "aria-label": "Printed" }, rows.map((line) => [
      line.at === cut ? h("div", { class: "quiet" }, "… some lines were not kept …") : null,
      h("div", { class: line.stream === "err" ? "err" : null, title: `${line.time ? clock(line.time) : ""}${line.step === null ? "" : ` · step ${count(line.step)}`}` }, line.text || "\u200b")]));
    box.addEventListener("scroll", () => { follow = box.scrollTop + box.clientHeight >= box.scrollHeight - 8; });
    replace(output, panel("Printed", box));
    if (follow) box.scrollTop = box.scrollHeight;
  }

  function drawCode() {
    const commit = answer.environment.git_commit ? h("p", {}, "Commit ", h("code", {}, answer.environment.git_commit)) : null;
    replace(code, panel("Code that ran", answer.code.length
      ? [commit, answer.code.map((file, at) => h("details", { open: at === 0 || null }, h("summary", { class: "mono" }, file.path, file.is_cut ? " (its beginning)" : ""), h("pre", { class: "source" }, file.text)))]
      : [commit, h("p", { class: "mono" }, (answer.environment.argv ?? []).join(" ")), how()]));
  }

  function drawEnvironment() {
    const say = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).map(([name, each]) => `${name}=${each}`).join(", ") || "none" : Array.isArray(value) ? value.join(" ") : String(value));
    replace(environment, panel("Environment", h("dl", { class: "facts" }, Object.entries(answer.environment).map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", { class: "mono" }, say(value))]))));
  }

  function draw() {
    if (changes(output, answer.output)) drawOutput();
    if (changes(code, answer.code)) drawCode();
    if (changes(environment, answer.environment)) drawEnvironment();
  }

  draw();
  return { refresh: async () => { answer = await getJson(runPath(run, "logs"), {}, signal); draw(); } };
}
