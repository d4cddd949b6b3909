// Batches that were kept: the list, the rollouts of one, the tokens of one of these.

let chosenBatch = null;

function table(headers, rows, kind, box) {
  const head = headers.map(([label, more]) => make("th", { class: more }, label));
  return make("div", { class: `scroll ${box || ""}` }, make("table", { class: kind }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
}
// A batch that is wrong everywhere has a reason for each of its parts: the first say most.
const FEW = 3;
function few(lines) {
  if (lines.length <= FEW + 1) return make("ul", {}, lines);
  return make("div", {}, make("ul", {}, lines.slice(0, FEW)), make("details", {}, make("summary", {}, `and ${lines.length - FEW} more`), make("ul", {}, lines.slice(FEW))));
}
const cell = (content, kind) => make("td", { class: kind }, content === null || content === undefined ? "–" : content);
const whole = (value) => value.toLocaleString("en");
const stateTag = (state) => make("span", { class: `tag s-${state}` }, state);

function showBatches(told) {
  const any = told.archives > 0;
  $("kept").hidden = !any && !data.steps.length;
  $("kept-note").textContent = told.problem || (any
    ? `${whole(told.suspect)} to look at${told.suspect > told.batches.length ? `, of which the last ${whole(told.batches.length)} are listed (zerodrift archive ls has all)` : ""}; ${whole(told.healthy)} healthy ones were kept to compare with.`
    : "None yet. Give observe prompt_ids= and completion_ids=, and bad batches are kept whole, for this page and for zerodrift blame.");
  if (!told.batches.length) { $("batches").replaceChildren(); return; }
  const rows = told.batches.map((each) => make("tr", { "data-batch": each.batch, class: each.batch === chosenBatch ? "chosen" : null },
    cell(make("button", { type: "button", onclick: () => openBatch(each.batch) }, `step ${whole(each.step)}`)), cell(stateTag(each.state)),
    cell(whole(each.rollouts), "n optional"), cell(whole(each.tokens), "n optional"), cell(few(each.reasons.map((reason) => make("li", {}, reason))), "reasons")));
  $("batches").replaceChildren(table([["batch"], ["state"], ["rollouts", "n optional"], ["tokens", "n optional"], ["why"]], rows, "stack", "tall"));
}

async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const told = await answer.json().catch(() => ({ says: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(told.says);
  return told;
}

function problem(place, error) { place.replaceChildren(make("p", { class: "notice" }, `This cannot be shown: ${error.message}`)); }

async function openBatch(name) {
  chosenBatch = name;
  document.querySelectorAll("#batches tr[data-batch]").forEach((row) => row.classList.toggle("chosen", row.dataset.batch === name));
  const place = $("batch");
  place.replaceChildren(make("p", { class: "quiet" }, "reading …"));
  try { showBatch(place, await ask(`/batches/${name}`)); } catch (error) { problem(place, error); }
  place.scrollIntoView({ behavior: "smooth", block: "nearest" });
}

function showBatch(place, told) {
  const tokens = make("div", { id: "tokens" });
  const optional = [["environment", "environment"], ["replica", "replica"], ["reward", "reward"]].filter(([, key]) => told.rollouts.some((each) => each[key] !== null));
  const rows = told.rollouts.map((each) => make("tr", {},
    cell(make("button", { type: "button", onclick: () => openRollout(tokens, told.batch, each.place, 0) }, each.id)),
    cell(each.off_by === null ? "not observable" : shown(each.off_by), "n"), cell(each.worst === null ? "–" : shown(each.worst), "n"),
    cell(whole(each.prompt), "n optional"), cell(whole(each.output), "n"), cell(whole(each.missing), "n optional"),
    optional.map(([, key]) => cell(typeof each[key] === "number" ? shown(each[key]) : each[key], "optional")), cell(each.version, "optional")));
  const basis = told.rollouts.some((each) => each.basis === "rescored") ? "the trainer's, re-scored under the weights that made the token" : "the trainer's old logprobs";
  place.replaceChildren(make("div", { class: "panel" },
    make("div", { class: "head" }, make("h3", {}, `Batch of step ${whole(told.step)}`), stateTag(told.state), make("code", { class: "quiet optional" }, told.batch.slice(0, 12)),
      make("button", { type: "button", onclick: () => { chosenBatch = null; place.replaceChildren(); } }, "close")),
    few(told.reasons.map((reason) => make("li", {}, reason))),
    make("p", { class: "quiet" }, `${whole(told.total)} rollouts${told.total > told.rollouts.length ? `, the worst ${whole(told.rollouts.length)} listed` : ""}, worst first. |Δ|: engine's logprobs against ${basis}. Open one for its tokens.`),
    table([["rollout"], ["mean |Δ|", "n"], ["max |Δ|", "n"], ["prompt", "n optional"], ["output", "n"], ["not reported", "n optional"], ...optional.map(([label]) => [label, "optional"]), ["version", "optional"]], rows, "", "short"), tokens));
}

async function openRollout(place, batch, number, begin) {
  try { showTokens(place, batch, number, await ask(`/batches/${batch}/${number}?from=${begin}`)); } catch (error) { problem(place, error); }
  place.scrollIntoView({ behavior: "smooth", block: "nearest" });
}

function showTokens(place, batch, number, told) {
  const largest = Math.max(1e-12, ...told.tokens.map((row) => Math.abs(row[4] || 0)));
  const missing = (value) => (value === null ? "not reported" : value.toFixed(4).replace("-", "−"));
  const rows = told.tokens.map(([index, id, engine, trainer, delta, version, used]) => make("tr", { class: used ? null : "out" },
    cell(String(index), "n"), cell(String(id), "n"), cell(missing(engine), "n"), cell(trainer === null && !told.basis ? "not observable" : missing(trainer), "n"),
    cell(deltaCell(delta, largest), "n"), cell(version), cell(used ? "yes" : "no", "optional")));
  const last = told.begin + told.tokens.length, size = 200;
  const turn = (label, begin, off) => make("button", { type: "button", disabled: off, onclick: () => openRollout(place, batch, number, begin) }, label);
  const wider = (word, more) => make("span", {}, word, make("span", { class: "optional" }, ` ${more}`));
  const trainer = wider("trainer", told.basis === "rescored" ? "(re-scored)" : "(old)");
  place.replaceChildren(make("h3", {}, `Rollout ${told.id}`),
    make("p", { class: "quiet" }, `prompt ids, ${whole(told.prompt_total)}${told.prompt_total > told.prompt.length ? `, the first ${whole(told.prompt.length)}` : ""}:`),
    make("p", { class: "prompt" }, told.prompt.join(" ")),
    make("p", { class: "quiet" }, "completion; Δ = trainer − engine, bars to the largest on this page:"),
    table([["#", "n"], [wider("id", "of token"), "n"], [wider("engine", "logprob"), "n"], [trainer, "n"], ["Δ", "n"], ["weights"], ["in loss", "optional"]], rows, "tokens"),
    make("p", { class: "pages" }, turn("before", Math.max(0, told.begin - size), told.begin === 0), `tokens ${whole(told.begin)} to ${whole(Math.max(0, last - 1))} of ${whole(told.total)}`, turn("after", last, last >= told.total)));
}

function deltaCell(delta, largest) {
  if (delta === null) return "not observable";
  const bar = make("i", { class: delta > 0 ? "more" : "less" });
  bar.style.width = `${(50 * Math.abs(delta) / largest).toFixed(1)}%`;
  return make("span", {}, (delta > 0 ? "+" : "") + delta.toFixed(4).replace("-", "−"), make("span", { class: "delta" }, bar));
}
