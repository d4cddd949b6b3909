// The stream: what the server sends, and the head of the page that says how things stand.

const SENTENCES = {
  OK: "all as it should be", WARN: "trained on, and worth a look",
  QUARANTINE: "the last batch was not trained on", HALT: "nothing is trained on until somebody has looked",
};
const history_ = new Map();
const SHOWN_CHANGES = 100;
let status_ = null, clockSkew = 0, listed = null, connected = false;

// What the directory tells of its monitor; where it tells nothing, that we are connected is all that is known.
const WRITERS = {
  writing: { label: "live", kind: "on" }, ended: { label: "ended", kind: "" },
  stopped: { label: "stopped", kind: "off", says: "No monitor writes here any more, and none said that it was done: its process was killed, or came to its end without close()." },
};

function sentence(told) {
  const over = told.writer === "ended" || told.writer === "stopped";
  return over && told.state === "OK" ? "all was as it should be" : SENTENCES[told.state];
}

function showConnection() {
  if (!connected) return;
  const told = WRITERS[status_ && status_.writer] || { label: "connected", kind: "" };
  $("connection").textContent = told.label; $("connection").className = told.kind;
}

function age(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

function showStatus(told) {
  status_ = told; unseen = told.unseen; showConnection(); clockSkew = told.now - Date.now() / 1000;
  if (told.audit && told.audit.finished) { location.reload(); return; }
  const rows = told.rows > 0;
  $("live").hidden = !rows; $("waiting").hidden = rows;
  document.body.className = told.state || "";
  $("state").textContent = told.state || (told.audit ? "Audit" : "Waiting");
  $("sentence").textContent = told.state ? `· ${sentence(told)}` : told.audit ? `· ${told.audit.answers.toLocaleString("en")} answers so far` : told.writer === "ended" || told.writer === "stopped" ? `· for a step; the last monitor has ${told.writer}` : "· for the first step";
  document.title = `${told.state && told.state !== "OK" ? `${told.state} · ` : ""}${told.name} · zerodrift`;
  showFacts();
  // Only where they changed: somebody may have unfolded them.
  const reasons = JSON.stringify(told.reasons);
  if (reasons !== $("reasons").dataset.told) {
    $("reasons").dataset.told = reasons;
    $("reasons").replaceChildren(told.reasons.length ? few(told.reasons.map(reasonLine)) : "");
  }
  if (!rows) showWaiting(told);
  showNotice(told);
}

function showFacts() {
  if (!status_ || !status_.rows) { $("facts").replaceChildren(); return; }
  const facts = [["step", status_.step.toLocaleString("en")], ["last step", age(Date.now() / 1000 + clockSkew - status_.time)], ["batches judged", Object.values(status_.counts).reduce((sum, each) => sum + each, 0).toLocaleString("en")],
    ["not trained on", status_.kept_back.toLocaleString("en")], ["warned of", status_.counts.WARN.toLocaleString("en")]];
  if (status_.tokens) facts.push(["tokens of this batch", status_.tokens.toLocaleString("en")]);
  $("facts").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function reasonLine(reason) {
  const place = [reason.gap, reason.where].filter(Boolean).join(", ");
  return make("li", {}, make("span", { class: `tag${reason.warning ? " warning" : ""}` }, reason.code), place ? make("strong", {}, `${place}: `) : null, reason.says);
}

function showNotice(told) {
  const says = told.trouble ? [told.trouble] : [];
  if (told.writer === "stopped") says.push(WRITERS.stopped.says);
  if (told.unreadable) says.push(`${told.unreadable} lines of steps.jsonl could not be read${told.first_bad ? ` (${told.first_bad})` : ""}; a line that a kill tore is one.`);
  if (told.rewound) says.push(`Training went back from step ${told.rewound[0].toLocaleString("en")} to ${told.rewound[1].toLocaleString("en")}; steps that were made again are shown as they are now.`);
  $("notice").hidden = !says.length; $("notice").textContent = says.join(" ");
}

function showWaiting(told) {
  if (told.audit) {
    $("waiting").replaceChildren(make("p", {}, "An audit is running, or was stopped. Its report appears here by itself when it is done."));
    return;
  }
  $("waiting").replaceChildren(
    make("p", {}, told.found ? "steps.jsonl is there and has no step yet. " : `There is no steps.jsonl in ${told.path} yet. `, "The page begins by itself with the first step that a monitor judges."),
    make("p", {}, "In the training script:"),
    make("pre", {}, `import zerodrift\n\nmonitor = zerodrift.Monitor(directory="${told.path}")\ndecision = monitor.observe(behavior_logprobs=…, old_logprobs=…, versions=…, trainer_version=…, mask=…,\n                           prompt_ids=…, completion_ids=…, rewards=…, step=…)\nif decision.train: …`),
    make("p", {}, "With TRL:"),
    make("pre", {}, `from zerodrift.integrations.trl import attach\n\nattach(trainer, directory="${told.path}")`));
}

function showHistory() {
  const entries = [...history_.values()].sort((a, b) => b.id - a.id), listedOnes = entries.slice(0, SHOWN_CHANGES);
  // What was unfolded and how far it was scrolled stays.
  const unfolded = [...document.querySelectorAll("#history tr")].filter((row) => row.querySelector("details[open]")).map((row) => row.dataset.id);
  const scrolled = $("history").firstChild ? $("history").firstChild.scrollTop : 0;
  const rows = listedOnes.map((each) => make("tr", { "data-id": each.id },
    cell(each.first === each.last ? each.first.toLocaleString("en") : `${each.first.toLocaleString("en")} – ${each.last.toLocaleString("en")}`, "n"),
    cell(make("span", {}, each.before && each.before !== each.state ? `${each.before} → ` : "", stateTag(each.state))), cell(each.count.toLocaleString("en"), "n optional"),
    cell(each.reasons.length ? few(each.reasons.map(reasonLine)) : "all as it should be", "reasons")));
  $("history").replaceChildren(table([["step", "n"], ["state"], ["batches", "n optional"], ["why"]], rows, "stack", "tall"),
    entries.length > listedOnes.length ? make("p", { class: "quiet" }, `and ${(entries.length - listedOnes.length).toLocaleString("en")} before; steps.jsonl has all.`) : "");
  for (const row of rows) if (unfolded.includes(row.dataset.id) && row.querySelector("details")) row.querySelector("details").open = true;
  $("history").firstChild.scrollTop = scrolled;
}

let historyDue = false;
function historyChanged() {
  if (historyDue) return;
  historyDue = true;
  setTimeout(() => { historyDue = false; showHistory(); }, 200);
}

function connect() {
  const source = new EventSource("/events");
  const on = (kind, act) => source.addEventListener(kind, (event) => act(JSON.parse(event.data)));
  source.onopen = () => { connected = true; showConnection(); };
  source.onerror = () => {
    connected = false;
    $("connection").textContent = source.readyState === EventSource.CLOSED ? "no connection: reload" : "no connection, trying again";
    $("connection").className = "off";
  };
  on("reset", () => { clearRows(); history_.clear(); hovered = null; redraw(); historyChanged(); });
  on("rows", (block) => {
    // What is cut off in between is sent again; a block is taken once.
    if (block.begin !== data.steps.length) return;
    appendRows(block); document.body.dataset.rows = data.steps.length; redraw();
  });
  on("changes", (changes) => { for (const each of changes) history_.set(each.id, each); historyChanged(); });
  on("status", (told) => { const first = !status_ || !status_.rows; showStatus(told); redraw(); if (first && listed) showBatches(listed); });
  on("batches", (told) => { listed = told; showBatches(told); });
}

buildCards();
buildControls();
connect();
setInterval(showFacts, 1000);
new ResizeObserver(redraw).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette = null; redraw(); });
