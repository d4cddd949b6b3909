// The cards of the page: which numbers they show, what they say where a run cannot show them, and one cursor for all.

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  // Text is only ever appended as text: nothing that a model or a file wrote becomes markup.
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const $ = (id) => document.getElementById(id);

const MEASURES = {
  mean_abs: "mean |Δ|", bias: "bias (mean Δ)", p99: "p99 of |Δ|", max: "max |Δ|", k3: "KL (k3)",
};
const GAPS = {
  mismatch: { title: "Mismatch", colour: "one", says: "engine against trainer at equal weights: drift" },
  staleness: { title: "Staleness", colour: "two", says: "weights that made the token against weights of the step" },
  update: { title: "Update", colour: "three", says: "what learning did since the step began" },
};
let measure = "mean_abs";

function gapSeries(gap) {
  const series = [{ column: `${gap}/${measure}`, label: MEASURES[measure], colour: GAPS[gap].colour }];
  if (gap === "mismatch" && measure === "mean_abs") series.push({ column: "baseline/mean_abs", label: "baseline", colour: "expected", dash: [5, 4], thin: true });
  // A run of log_step has this one number.
  if (gap === "mismatch" && !column(series[0].column) && column("kl_estimate")) return [{ column: "kl_estimate", label: "KL (as given to log_step)", colour: "one" }];
  return series;
}

const byGap = (name) => Object.entries(GAPS).map(([gap, told]) => ({ column: `${gap}/${name}`, label: gap, colour: told.colour }));

const CARDS = [
  { place: "breaker", key: "state", title: "State", says: "of each step; of many in one place, the worst", series: () => [{ column: "state", label: "", colour: "quiet" }], wish: { strip: true } },
  ...Object.entries(GAPS).map(([gap, told]) => ({
    place: "gaps", key: gap, gap, title: told.title, says: told.says, unit: "nats", series: () => gapSeries(gap), wish: () => ({ zero: true, log: measure !== "bias" }),
  })),
  { place: "training", key: "ess", title: "Effective sample size (ESS)", says: "of the ratios that a loss without separate terms sees, unclamped", gap: "total", share: true,
    series: () => [{ column: "total/token_ess", label: "tokens", colour: "one" }, { column: "total/sequence_ess", label: "sequences", colour: "two", thin: true }], wish: { top: 1 } },
  { place: "training", key: "clip", title: "Clip rate", says: "share of ratios outside the trainer's 1 ± ε, by gap", share: true, anyOf: true,
    series: () => byGap("clip_rate"), wish: { zero: true, quietGaps: true } },
  { place: "training", key: "entropy", title: "Entropy", says: "−mean log p of the sampled tokens, nats", series: () => [{ column: "entropy", label: "entropy", colour: "three" }], wish: {},
    missing: "comes with behavior_logprobs" },
  { place: "training", key: "reward", title: "Reward", says: "mean of the batch; band: where it lies by chance, from the window before",
    series: () => [{ column: "reward/mean", label: "mean", colour: "one" }, { column: "reward/baseline_mean", label: "baseline", colour: "expected", dash: [5, 4], thin: true }],
    wish: { band: ["reward/baseline_mean", "reward/baseline_margin"] }, missing: "give observe rewards=" },
  { place: "training", key: "lag", title: "Lag", says: "versions of the weights that a token is old", series: () => [{ column: "lag/mean", label: "mean", colour: "two" }, { column: "lag/max", label: "oldest", colour: "four", dash: [5, 4] }], wish: { zero: true, top: 1 },
    missing: "give observe versions= and trainer_version=" },
  { place: "training", key: "reference", title: "KL to the reference policy", says: "as it was given; grows because the model learns, and trips nothing", optional: true,
    series: () => [{ column: "reference_kl", label: "reference KL", colour: "three" }], wish: {} },
];

const cards = [];
let unseen = {};
let range = null;          // null: all steps; {last: n}; {left, right}
let hovered = null;        // a row

function buildCards() {
  for (const told of CARDS) {
    const plot = make("div", { class: "plot", role: "img", "aria-label": told.title });
    const absent = make("div", { class: "absent", hidden: true });
    const legend = make("ul", { class: "legend" });
    const node = make("article", { class: "card", id: `card-${told.key}`, hidden: Boolean(told.optional) }, make("h3", {}, told.title, told.unit ? make("span", { class: "quiet" }, ` ${told.unit}`) : null),
      make("p", { class: "says" }, told.says), legend, plot, absent);
    $(told.place).append(node);
    const card = { ...told, node, plot: new Plot(plot, [], {}), holder: plot, absent, legend, cursor: plot.appendChild(make("div", { class: "cursor", hidden: true })) };
    cards.push(card);
    follow(card);
  }
}

function has(name) {
  const values = column(name);
  if (!values) return false;
  // A column is sent once it has a number, so it need not be searched.
  return true;
}

function visibleRange() {
  const steps = data.steps.values, count = data.steps.length;
  if (!count) return { begin: 0, end: 0, left: 0, right: 1 };
  let begin = 0, end = count;
  if (range && range.last) begin = Math.max(0, count - range.last);
  else if (range) { begin = rowOf(range.left); end = rowOf(range.right + 1e-9); if (end - begin < 1) { begin = Math.max(0, begin - 1); end = Math.min(count, begin + 1); } }
  return { begin, end, left: steps[begin], right: Math.max(steps[end - 1], steps[begin]) };
}

let palette = null;
function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement), names = ["one", "two", "three", "four", "expected", "band", "hatch", "quiet", "paper", "grid", "line", "ok", "warn", "bad"];
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return palette;
}

function drawCards() {
  const began = performance.now(), seen = visibleRange(), tones = colours();
  for (const card of cards) {
    const series = card.series(), there = series.some((one) => has(one.column)) && (card.anyOf || has(series[0].column));
    card.node.hidden = Boolean(card.optional) && !there;
    card.holder.hidden = !there; card.absent.hidden = there; card.shown = series;
    if (!there) { absence(card); continue; }
    card.plot.series = series; card.plot.wish = typeof card.wish === "function" ? card.wish() : card.wish;
    card.plot.draw(seen, tones);
  }
  legends();
  document.body.dataset.drawMs = (performance.now() - began).toFixed(1);
}

function absence(card) {
  const why = (card.gap && unseen[card.gap]) || card.missing || "";
  card.absent.replaceChildren(make("span", {}, make("strong", {}, "not observable")), why ? make("span", { class: "says" }, why) : "");
}

function lineKey(one) { return make("span", { class: `key ${one.colour}-colour${one.dash ? " dashed" : ""}` }); }

function legends() {
  const row = hovered === null ? data.steps.length - 1 : hovered;
  for (const card of cards) {
    if (card.holder.hidden || card.wish.strip) { card.legend.replaceChildren(); if (card.wish.strip) card.legend.replaceChildren(make("li", {}, stateAt(row))); continue; }
    const items = card.shown.filter((one) => has(one.column) || card.anyOf).map((one) => {
      const values = column(one.column), value = values && row >= 0 ? values[row] : NaN, told = value === value;
      return make("li", {}, lineKey(one), `${one.label} `, make("b", {}, told ? (card.share ? percent(value) : shown(value)) : "not observable"));
    });
    if (card.wish.band) items.push(make("li", { class: "optional" }, make("span", { class: "key band" }), "by chance"));
    card.legend.replaceChildren(...items);
  }
}

function stateAt(row) {
  const values = column("state");
  if (!values || row < 0) return "";
  const name = ["OK", "WARN", "QUARANTINE", "HALT"][values[row]] || "–";
  const when = new Date(data.times.values[row] * 1000);
  return [make("b", {}, `step ${data.steps.values[row].toLocaleString("en")}`), " · ", make("span", { class: `s-${name}` }, name), ` · ${when.toLocaleString()}`].reduce((list, each) => { list.append(each); return list; }, document.createDocumentFragment());
}

const percent = (value) => (value > 0.9995 && value < 1 ? ">99.9 %" : `${shown(100 * value)} %`);

// One cursor for all plots; dragging zooms all of them. A finger scrolls the page and only points.
function follow(card) {
  const holder = card.holder;
  let from = null, box = null;
  const point = (event) => {
    const seen = visibleRange(), bounds = holder.getBoundingClientRect();
    if (seen.end <= seen.begin) return;
    const step = card.plot.stepAt(event.clientX - bounds.left, seen), after = Math.min(seen.end - 1, rowOf(step)), before = Math.max(seen.begin, after - 1);
    hovered = Math.abs(data.steps.values[before] - step) < Math.abs(data.steps.values[after] - step) ? before : after;
    cursors(seen); legends();
    if (from !== null) { const x = event.clientX - bounds.left; box.style.left = `${Math.min(from, x)}px`; box.style.width = `${Math.abs(x - from)}px`; }
  };
  holder.addEventListener("pointermove", point);
  holder.addEventListener("pointerleave", () => { hovered = null; cursors(visibleRange()); legends(); });
  holder.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    from = event.clientX - holder.getBoundingClientRect().left;
    box = holder.appendChild(make("div", { class: "zoom" }));
    holder.setPointerCapture(event.pointerId); event.preventDefault();
  });
  holder.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const to = event.clientX - holder.getBoundingClientRect().left, seen = visibleRange();
    if (Math.abs(to - from) > 8) choose({ left: card.plot.stepAt(Math.min(from, to), seen), right: card.plot.stepAt(Math.max(from, to), seen) });
    from = null; box.remove();
  });
  holder.addEventListener("dblclick", () => choose(null));
}

function cursors(seen) {
  for (const card of cards) {
    card.cursor.hidden = hovered === null;
    if (hovered !== null) card.cursor.style.left = `${card.plot.xOf(data.steps.values[hovered], seen)}px`;
  }
}

const RANGES = [["all", null], ["last 10,000", { last: 10000 }], ["last 1,000", { last: 1000 }], ["last 100", { last: 100 }]];
function buildControls() {
  for (const [label, value] of RANGES) $("ranges").append(make("button", { type: "button", "aria-pressed": String(value === null), onclick: () => choose(value) }, label));
  for (const [name, label] of Object.entries(MEASURES)) $("measure").append(make("option", { value: name }, label));
  $("measure").addEventListener("change", () => { measure = $("measure").value; redraw(); });
}
function choose(value) {
  range = value;
  [...$("ranges").children].forEach((button, place) => button.setAttribute("aria-pressed", String(RANGES[place][1] === value)));
  redraw();
}

let due = false, drawnAt = 0;
function redraw() {
  if (due) return;
  due = true;
  // While much arrives, ten pictures a second are enough.
  const wait = Math.max(0, 100 - (performance.now() - drawnAt));
  setTimeout(() => requestAnimationFrame(() => { due = false; drawnAt = performance.now(); drawCards(); }), wait);
}
