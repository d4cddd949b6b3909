"use strict";
// Columns of numbers that grow, and plots of them: whatever the number of steps, a plot draws one stroke per pixel column.

class Column {
  constructor(kind) { this.values = new kind(4096); this.length = 0; }
  room(count) {
    if (this.length + count <= this.values.length) return;
    const larger = new this.values.constructor(Math.max(2 * this.values.length, this.length + count));
    larger.set(this.values.subarray(0, this.length));
    this.values = larger;
  }
  append(more, count) {
    this.room(count);
    if (more) this.values.set(more, this.length); else this.values.fill(NaN, this.length, this.length + count);
    this.length += count;
  }
}

const data = { steps: new Column(Float64Array), times: new Column(Float64Array), columns: new Map() };

function column(name) { const found = data.columns.get(name); return found ? found.values : null; }

function unpacked(text, kind) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new kind(bytes.buffer);
}

function appendRows(block) {
  const before = data.steps.length;
  data.steps.append(unpacked(block.steps, Float64Array), block.count);
  data.times.append(unpacked(block.times, Float64Array), block.count);
  for (const [name, text] of Object.entries(block.columns)) {
    if (!data.columns.has(name)) {
      const fresh = new Column(Float32Array);
      fresh.append(null, before);
      data.columns.set(name, fresh);
    }
    data.columns.get(name).append(unpacked(text, Float32Array), block.count);
  }
  for (const each of data.columns.values()) if (each.length < data.steps.length) each.append(null, block.count);
}

function clearRows() { data.steps.length = data.times.length = 0; data.columns.clear(); }

// The first row whose step is at least `step`.
function rowOf(step) {
  let low = 0, high = data.steps.length;
  while (low < high) { const middle = (low + high) >> 1; if (data.steps.values[middle] < step) low = middle + 1; else high = middle; }
  return low;
}

// Lowest, highest, first and last value of each pixel column; `cut`: something between this one and the one before was not observable.
function envelope(values, begin, end, left, scale, width) {
  const found = { low: new Float64Array(width).fill(NaN), high: new Float64Array(width), first: new Float64Array(width),
    last: new Float64Array(width), sum: new Float64Array(width), count: new Uint32Array(width), cut: new Uint8Array(width), least: Infinity, most: -Infinity };
  const steps = data.steps.values;
  let absent = false;
  for (let row = begin; row < end; row++) {
    const value = values[row];
    if (value !== value) { absent = true; continue; }
    const at = Math.min(width - 1, Math.max(0, ((steps[row] - left) * scale) | 0));
    if (found.low[at] !== found.low[at]) { found.low[at] = found.high[at] = found.first[at] = value; found.cut[at] = absent ? 1 : 0; }
    else if (value < found.low[at]) found.low[at] = value;
    else if (value > found.high[at]) found.high[at] = value;
    found.last[at] = value; found.sum[at] += value; found.count[at]++;
    absent = false;
    if (value < found.least) found.least = value;
    if (value > found.most) found.most = value;
  }
  return found;
}

function means(found) {
  const mean = found.sum.map((sum, at) => (found.count[at] ? sum / found.count[at] : NaN));
  return { ...found, low: mean, high: mean, first: mean, last: mean };
}

function shown(value) {
  if (value === null || value === undefined || value !== value) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e3 && size < 1e7) return Math.round(value).toLocaleString("en").replace("-", "−");
  let text = Number(value.toPrecision(3)).toString();
  if (size < 1e-3 || size >= 1e7) text = value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return text.replace(/^-/, "−");
}

function niceTicks(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) ticks.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const each of decades < 1.3 ? [1, 2, 5] : decades < 3 ? [1, 3] : [1]) if (each * 10 ** power >= low && each * 10 ** power <= high) ticks.push(each * 10 ** power);
  return ticks;
}

// What values a plot shows: from 0, all of it, or by factors where sizes differ eightfold.
function scaleOf(least, most, wish) {
  if (!(least <= most)) return null;
  if (wish.log && least > 0 && most / least > 8) {
    return { low: least / 1.3, high: most * 1.3, ticks: logTicks(least / 1.3, most * 1.3), place: (v) => Math.log(Math.max(v, least / 1.3) / (least / 1.3)) / Math.log(most * 1.69 / least) };
  }
  let low = wish.zero ? Math.min(0, least) : least, high = wish.zero ? Math.max(0, most) : most;
  if (wish.top !== undefined) high = Math.max(high, wish.top);
  if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!wish.zero) low -= pad; }
  const pad = (high - low) * 0.06;
  if (!(wish.zero && low === 0)) low -= pad;
  if (wish.top === undefined || high > wish.top) high += pad;
  return { low, high, ticks: niceTicks(low, high, 4), place: (v) => (v - low) / (high - low) };
}

class Plot {
  constructor(holder, series, wish) {
    this.holder = holder; this.series = series; this.wish = wish;
    this.canvas = holder.appendChild(document.createElement("canvas"));
    this.margin = { left: 46, right: 6, top: 8, bottom: 20 };
  }
  get width() { return Math.max(1, Math.floor(this.holder.clientWidth - this.margin.left - this.margin.right)); }
  stepAt(x, range) { return range.left + Math.max(0, Math.min(1, (x - this.margin.left) / this.width)) * (range.right - range.left); }
  xOf(step, range) { return this.margin.left + (step - range.left) / (range.right - range.left || 1) * this.width; }
  draw(range, colours) {
    const ratio = window.devicePixelRatio || 1, wide = this.holder.clientWidth, tall = this.holder.clientHeight;
    if (!wide) return;
    this.canvas.width = Math.round(wide * ratio); this.canvas.height = Math.round(tall * ratio);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const box = { left: this.margin.left, top: this.margin.top, width: this.width, height: tall - this.margin.top - this.margin.bottom };
    this.drawSteps(pen, box, range, colours);
    const scale = this.width / (range.right - range.left || 1);
    const lines = [];
    for (const one of this.series) {
      const values = column(one.column);
      if (values) lines.push({ ...one, found: envelope(values, range.begin, range.end, range.left, scale, box.width) });
    }
    if (this.wish.strip) { this.drawStrip(pen, box, lines[0], colours); return; }
    const band = this.wish.band ? this.bandOf(range, scale, box.width) : null;
    let least = Infinity, most = -Infinity;
    for (const each of band ? [...lines.map((one) => one.found), band] : lines.map((one) => one.found)) { least = Math.min(least, each.least); most = Math.max(most, each.most); }
    const axis = scaleOf(least, most, this.wish);
    this.drawAbsent(pen, box, range, scale, colours);
    if (!axis) return;
    const y = (value) => box.top + box.height * (1 - axis.place(value));
    this.drawValues(pen, box, axis, y, colours);
    if (band) this.drawBand(pen, box, band, y, colours);
    // Many steps in a pixel: their range as a wash, and their mean as the line.
    const dense = range.end - range.begin > 4 * box.width;
    for (const line of lines) if (dense) this.drawRange(pen, box, line, y, colours);
    for (const line of lines) this.drawLine(pen, box, dense ? { ...line, found: means(line.found) } : line, y, colours);
  }
  drawSteps(pen, box, range, colours) {
    pen.font = "11px system-ui, sans-serif"; pen.fillStyle = colours.quiet; pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    const bottom = box.top + box.height + 14;
    for (const step of niceTicks(range.left, range.right === range.left ? range.left + 1 : range.right, Math.max(2, box.width / 62))) {
      const x = this.xOf(step, range);
      if (step !== Math.round(step) || x > box.left + box.width + 1) continue;
      const label = step.toLocaleString("en"), half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(x, box.left + box.width - half), bottom);
    }
    pen.strokeStyle = colours.line; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(box.left, box.top + box.height + 0.5); pen.lineTo(box.left + box.width, box.top + box.height + 0.5); pen.stroke();
  }
  drawValues(pen, box, axis, y, colours) {
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.strokeStyle = colours.grid; pen.lineWidth = 1;
    for (const tick of axis.ticks) {
      const at = Math.round(y(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.left + box.width, at); pen.stroke();
      pen.fillStyle = colours.quiet; pen.fillText(shown(tick), box.left - 6, at);
    }
  }
  // Steps that did not show the first series: hatched, so that nobody takes a gap for a zero.
  drawAbsent(pen, box, range, scale, colours) {
    const values = column(this.series[0].column), steps = data.steps.values;
    if (this.wish.quietGaps) return;
    pen.save(); pen.beginPath(); pen.rect(box.left, box.top, box.width, box.height); pen.clip();
    pen.strokeStyle = colours.hatch; pen.fillStyle = colours.grid; pen.lineWidth = 1; pen.beginPath();
    let drawn = -1, widest = [0, 0];
    for (let row = range.begin; row < range.end; row++) {
      if (values && values[row] === values[row]) continue;
      const first = row;
      while (row + 1 < range.end && (!values || values[row + 1] !== values[row + 1])) row++;
      const from = first > range.begin ? (steps[first - 1] + steps[first]) / 2 : steps[first], to = row + 1 < range.end ? (steps[row] + steps[row + 1]) / 2 : steps[row];
      const x0 = Math.max((from - range.left) * scale, drawn), x1 = Math.max((to - range.left) * scale, x0 + 1);
      for (let at = Math.ceil(x0 / 4) * 4; at <= x1; at += 4) { pen.moveTo(box.left + at, box.top); pen.lineTo(box.left + at, box.top + box.height); }
      if (x1 - x0 > widest[1] - widest[0]) widest = [x0, x1];
      drawn = x1;
    }
    pen.stroke(); pen.restore();
    if (widest[1] - widest[0] > 14) this.nameAbsent(pen, box, box.left + (widest[0] + widest[1]) / 2, colours);
  }
  nameAbsent(pen, box, x, colours) {
    pen.save(); pen.translate(x, box.top + box.height / 2); pen.rotate(-Math.PI / 2);
    pen.font = "10px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    const width = pen.measureText("not observable").width;
    pen.fillStyle = colours.paper; pen.fillRect(-width / 2 - 3, -7, width + 6, 14);
    pen.fillStyle = colours.quiet; pen.fillText("not observable", 0, 0.5); pen.restore();
  }
  drawRange(pen, box, line, y, colours) {
    const { low, high } = line.found;
    pen.fillStyle = colours[line.colour]; pen.globalAlpha = 0.28;
    for (let at = 0; at < box.width; at++) {
      if (low[at] !== low[at]) continue;
      const top = y(high[at]);
      pen.fillRect(box.left + at, top, 1, Math.max(1, y(low[at]) - top));
    }
    pen.globalAlpha = 1;
  }
  drawLine(pen, box, line, y, colours) {
    const { low, high, first, last, cut } = line.found;
    pen.strokeStyle = colours[line.colour]; pen.lineWidth = line.thin ? 1.25 : 1.75; pen.lineJoin = "round"; pen.lineCap = "round";
    pen.setLineDash(line.dash || []);
    pen.beginPath();
    let pending = false, count = 0, only = 0;
    for (let at = 0; at < box.width; at++) {
      if (low[at] !== low[at]) continue;
      const x = box.left + at + 0.5;
      if (!pending || cut[at]) { pen.moveTo(x, y(first[at])); pen.lineTo(x + 0.01, y(first[at])); } else pen.lineTo(x, y(first[at]));
      if (low[at] !== high[at]) { pen.lineTo(x, y(low[at])); pen.lineTo(x, y(high[at])); pen.lineTo(x, y(last[at])); }
      pending = true; count++; only = at;
    }
    pen.stroke(); pen.setLineDash([]);
    if (count === 1) { pen.fillStyle = colours[line.colour]; pen.beginPath(); pen.arc(box.left + only + 0.5, y(last[only]), 3, 0, 7); pen.fill(); }
  }
  bandOf(range, scale, width) {
    const middle = column(this.wish.band[0]), margin = column(this.wish.band[1]), steps = data.steps.values;
    const found = { low: new Float64Array(width).fill(NaN), high: new Float64Array(width), least: Infinity, most: -Infinity };
    if (!middle || !margin) return found;
    for (let row = range.begin; row < range.end; row++) {
      const low = middle[row] - margin[row], high = middle[row] + margin[row];
      if (low !== low) continue;
      const at = Math.min(width - 1, Math.max(0, ((steps[row] - range.left) * scale) | 0));
      if (found.low[at] !== found.low[at] || low < found.low[at]) found.low[at] = low;
      if (!(high < found.high[at]) || found.high[at] === 0) found.high[at] = high;
      found.least = Math.min(found.least, low); found.most = Math.max(found.most, high);
    }
    return found;
  }
  drawBand(pen, box, band, y, colours) {
    const xs = [];
    for (let at = 0; at < box.width; at++) if (band.low[at] === band.low[at]) xs.push(at);
    if (!xs.length) return;
    pen.fillStyle = colours.band; pen.beginPath();
    for (const at of xs) pen.lineTo(box.left + at + 0.5, y(band.high[at]));
    for (const at of xs.reverse()) pen.lineTo(box.left + at + 0.5, y(band.low[at]));
    pen.fill();
  }
  // OK, WARN, QUARANTINE, HALT by height and by colour; the worst of each pixel column.
  drawStrip(pen, box, line, colours) {
    if (!line) return;
    const names = ["OK", "WARN", "QUARANTINE", "HALT"], tone = [colours.ok, colours.warn, colours.bad, colours.bad];
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.font = "10px system-ui, sans-serif"; pen.strokeStyle = colours.grid;
    names.forEach((name, level) => {
      const at = Math.round(box.top + box.height * (1 - (level + 1) / 4)) + 0.5;
      pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.left + box.width, at); pen.stroke();
      pen.fillStyle = colours.quiet; pen.fillText(name === "QUARANTINE" ? "QUAR." : name, box.left - 6, at + box.height / 8);
    });
    let level = -1;
    for (let at = 0; at < box.width; at++) {
      const { high, low, last } = line.found, here = low[at] === low[at];
      const worst = here ? high[at] : level;
      if (worst < 0) continue;
      const height = box.height * (worst + 1) / 4;
      pen.fillStyle = tone[worst]; pen.fillRect(box.left + at, box.top + box.height - height, 1, height);
      if (here) level = last[at];
    }
  }
}
