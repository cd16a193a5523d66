// Where time and memory go: phases of a step, operators and modules of a recorded trace, memory.
import { address, getBytes, getJson, runPath } from "../api.js";
import { choose, h, panel, replace } from "../dom.js";
import { figure } from "../figure.js";
import { openInPerfetto } from "../perfetto.js";
import { table } from "../table.js";
import { bytes, count, lasting, percent, plural } from "../words.js";

export async function show(place, context) {
  const { run, signal } = context;
  const drawings = [
    figure(runPath(run, "figure/phases"), {}, { signal, height: 340 }),
    figure(runPath(run, "figure/memory"), {}, { signal, height: 340 }),
  ];
  const [info, { traces }] = await Promise.all([getJson(runPath(run), {}, signal), getJson(runPath(run, "traces"), {}, signal)]);
  const shares = h("div", { class: "stack" }), trace = h("div", { class: "stack" });

  function drawShares({ phases }) {
    if (!phases) return replace(shares);
    const row = (name, share) => h("tr", {}, h("td", {}, name.replace("_", " ")), h("td", { class: "number" }, percent(share)), h("td", { class: "number" }, lasting(share * phases.mean_s)));
    return replace(shares, panel("Phases of a step", h("p", { class: "note" }, `mean ${lasting(phases.mean_s)}, median ${lasting(phases.step_s)}, over ${plural(phases.steps, "recorded step")}${phases.shares.watching > 0.05 ? "; watching costs less in the steps between them" : ""}`),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Phase"), h("th", { scope: "col", class: "number" }, "Share"), h("th", { scope: "col", class: "number" }, "Mean time"))),
        h("tbody", {}, Object.entries(phases.shares).map(([name, share]) => row(name, share)), phases.unexplained > 0.001 ? row("not explained", phases.unexplained) : null))));
  }

  const fileOf = (name) => address(runPath(run, `trace/${encodeURIComponent(name)}`));
  const said = h("span", { class: "note", role: "status" });
  const open = (name) => openInPerfetto(name, () => getBytes(runPath(run, `trace/${encodeURIComponent(name)}`), {}, signal), (words) => { said.textContent = words; }, signal);

  async function drawTrace() {
    if (!traces.length) {
      replace(trace, panel("Operators and modules", h("p", { class: "quiet" }, "The run has no trace. One is recorded by ", h("code", {}, 'with sonde.probes.profile_scope(run="runs/first"): …'), ", and then shown here.")));
      return;
    }
    const name = context.query.get("trace") ?? traces[0].name;
    const size = traces.find((each) => each.name === name)?.bytes;
    const head = h("div", { class: "controls" }, h("h2", {}, "Trace"),
      choose("File", traces.map((each) => each.name), name, (next) => { context.keep({ trace: next }); drawTrace(); }),
      h("a", { class: "button", href: fileOf(name), download: name }, `Download (${bytes(size)})`),
      h("button", { type: "button", title: "Opens ui.perfetto.dev in a new window and hands it the trace, which stays in your browser", onclick: () => open(name) }, "Open in Perfetto"), said);
    replace(trace, head, h("p", { class: "quiet" }, "Reading…"));
    try {
      const sums = await getJson(runPath(run, "trace-summary"), { name }, signal);
      const part = (title, rows) => rows.length ? panel(title, sumsTable(title, rows)) : null;
      replace(trace, head, h("div", { class: "columns" }, part("Operators", sums.operators), part("Modules", sums.modules), part("Kernels", sums.kernels)));
    } catch (error) {
      if (error.name !== "AbortError") replace(trace, head, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  function sumsTable(label, rows) {
    const grid = table([
      { name: "name", title: "Name", cell: (row) => h("span", { class: "mono" }, row.name) },
      { name: "own_ms", title: "Own time", number: true, cell: (row) => lasting(row.own_ms / 1e3) },
      { name: "ms", title: "Including children", number: true, cell: (row) => lasting(row.ms / 1e3) },
      { name: "calls", title: "Calls", number: true, cell: (row) => count(row.calls) },
    ], { label, sort: "-own_ms", key: (row) => row.name });
    grid.show(rows);
    return grid;
  }

  drawShares(info);
  const [time, memory] = drawings;
  replace(place, h("div", { class: "controls" }, h("h1", {}, "Profile")), h("div", { class: "columns" }, time, shares, memory, traces.length ? null : trace), traces.length ? trace : null);
  drawTrace();
  return {
    title: info.name,
    refresh: async () => { drawings.forEach((each) => each.update()); drawShares(await getJson(runPath(run), {}, signal)); },
  };
}
