// All runs: status, loss, worst finding; filter, sort, and choose some to compare.
import { getJson, runPath } from "../api.js";
import { spark } from "../canvas/spark.js";
import { choose, h, replace, search } from "../dom.js";
import { link } from "../route.js";
import { table } from "../table.js";
import { ago, clock, count, plural, short } from "../words.js";

const EVERY_MS = 3000;

export async function show(place, context) {
  const cards = new Map(), chosen = new Set(context.query.getAll("run"));
  let rows = [], lastAnswer = "", reading = false;
  const counted = h("p", { class: "note", role: "status" });
  const compare = h("a", { class: "button", href: "#" });
  const grid = table(columns(), {
    label: "Runs", sort: context.query.get("sort") ?? "-created", empty: "No run matches.",
    onsort: (sort) => context.keep({ sort }),
    onopen: (row) => { location.hash = link("overview", { run: row.id }); },
  });

  function columns() {
    return [
      { name: "pick", title: "", sortable: false, cell: (row) => h("input", { type: "checkbox", "aria-label": `Compare ${row.name}`,
        checked: chosen.has(row.id), onchange: (event) => pick(row.id, event.target.checked) }) },
      { name: "name", title: "Run", cell: (row) => (row.problem ? h("span", { class: "name" }, row.name) : h("a", { class: "name", href: link("overview", { run: row.id }) }, row.name)) },
      { name: "status", title: "Status", cell: (row) => h("span", { class: `status ${row.status}` }, row.status) },
      { name: "last_step", title: "Step", number: true, cell: (row) => count(row.last_step) },
      { name: "last_loss", title: "Loss", number: true, value: (row) => (typeof row.last_loss === "string" ? Infinity : row.last_loss), cell: (row) => h("span", { class: typeof row.last_loss === "string" ? "bad" : null }, short(row.last_loss)) },
      { name: "spark", title: "Loss over steps", sortable: false, cell: (row) => sparkOf(row) },
      { name: "worst", title: "Worst finding", value: (row) => rank(row), cell: (row) => worstOf(row) },
      { name: "model", title: "Model" },
      { name: "created", title: "Started", number: true, cell: (row) => h("span", { title: row.created ? clock(row.created) : "" }, ago(row.created)) },
    ];
  }

  const rank = (row) => ({ info: 1, warning: 2, critical: 3 })[cards.get(row.id)?.worst?.severity] ?? 0;

  function sparkOf(row) {
    const card = cards.get(row.id);
    return card?.spark ? spark(card.spark.values, { label: `${card.spark.name}, from ${short(card.spark.values[0])} to ${short(card.spark.values.at(-1))}` }) : "";
  }

  function worstOf(row) {
    if (row.problem) return h("span", { class: "bad" }, row.problem);
    const card = cards.get(row.id);
    if (!card) return "";
    if (card.problem) return h("span", { class: "bad" }, card.problem);
    if (!card.worst) return h("span", { class: "quiet" }, "none");
    const more = card.findings > 1 ? h("span", { class: "quiet" }, ` and ${card.findings - 1} more`) : "";
    return [h("a", { class: `severity ${card.worst.severity}`, title: card.worst.cause, href: link("overview", { run: row.id, query: { open: card.worst.kind } }) }, card.worst.kind.replaceAll("_", " ")), more];
  }

  function pick(id, wanted) {
    if (wanted) chosen.add(id); else chosen.delete(id);
    context.keep({ run: [...chosen] });
    drawCompare();
  }

  function drawCompare() {
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Choose runs to compare";
    compare.setAttribute("href", link("compare", { query: { run: [...chosen] } }));
    compare.toggleAttribute("data-off", chosen.size < 2);
    compare.setAttribute("aria-disabled", String(chosen.size < 2));
  }

  function draw() {
    const words = (context.query.get("filter") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const status = context.query.get("status") ?? "";
    const matching = rows.filter((row) => (!status || row.status === status)
      && words.every((word) => `${row.name} ${row.model} ${row.status} ${cards.get(row.id)?.worst?.kind ?? ""}`.toLowerCase().includes(word)));
    counted.textContent = matching.length === rows.length ? plural(rows.length, "run") : `${matching.length} of ${plural(rows.length, "run")}`;
    grid.show(matching);
  }

  /** Cards are asked for two at a time: a folder of a hundred runs must not open all of them at once. */
  async function readCards() {
    if (reading) return; // the last round goes on, and the next one takes what is new since
    reading = true;
    const waiting = rows.filter((row) => !row.problem && cards.get(row.id)?.of !== `${row.last_step} ${row.status}`);
    const next = async () => {
      for (let row = waiting.shift(); row && !context.signal.aborted; row = waiting.shift()) {
        const card = await getJson(runPath(row.id, "card"), {}, context.signal)
          .catch((error) => { if (error.name === "AbortError") throw error; return { problem: error.message, findings: 0 }; });
        cards.set(row.id, { ...card, of: `${row.last_step} ${row.status}` });
        if (waiting.length % 5 === 0) draw();
      }
    };
    await Promise.all([next(), next()]).catch(() => {});
    reading = false;
    if (!context.signal.aborted) draw();
  }

  async function read() {
    const answer = await getJson("runs", {}, context.signal), text = JSON.stringify([answer.runs, Math.floor(Date.now() / 60000)]);
    if (text === lastAnswer) return; // nothing new: what is open or has the focus stays as it is
    lastAnswer = text;
    rows = answer.runs;
    if (!rows.length) {
      replace(place, h("div", { class: "empty" }, h("h1", {}, "No runs yet"),
        h("p", {}, `Nothing was recorded below ${answer.roots.join(", ")}.`),
        (answer.notices ?? []).map((text) => h("p", { class: "problem" }, text)),
        h("p", {}, "Create one with ", h("code", {}, "sonde.watch(model, optimizer, run=\"runs/first\")"), ". This page shows it as soon as it is there.")));
      return;
    }
    if (!grid.isConnected || !place.contains(grid)) layOut();
    draw();
    readCards();
  }

  function layOut() {
    const statuses = ["live", "finished", "interrupted", "failed", "crashed", "damaged"];
    replace(place, h("div", { class: "controls" }, h("h1", {}, "Runs"),
      search("Filter", context.query.get("filter") ?? "", "name, model, status or finding", (filter) => { context.keep({ filter }); draw(); }),
      choose("Status", [["", "all"], ...statuses], context.query.get("status") ?? "", (status) => { context.keep({ status }); draw(); }),
      compare), counted, grid);
    drawCompare();
  }

  function lost(error) {
    if (error.name === "AbortError") return;
    lastAnswer = "";
    counted.textContent = error.message;
  }

  await read();
  const timer = setInterval(() => { if (!document.hidden) read().catch(lost); }, EVERY_MS);
  context.signal.addEventListener("abort", () => clearInterval(timer));
  return {
    keys: [
      { keys: "j", what: "next run", act: () => grid.move(1) },
      { keys: "k", what: "previous run", act: () => grid.move(-1) },
      { keys: "x", what: "choose the run to compare it", act: () => place.querySelector("tr.current input[type=checkbox]")?.click() },
    ],
  };
}
