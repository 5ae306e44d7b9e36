// The charts of a run over its time, and its rounds. Once one of them is zoomed, all show the same span.
"use strict";

const $ = (id) => document.getElementById(id);
const style = getComputedStyle(document.documentElement);
const color = (name) => style.getPropertyValue(name).trim();
const state = {
  frame: null, changes: 0, rounds: new Map(), points: new Map(), marks: [], events: [], islands: {}, names: [],
  zoom: null, span: null, sort: { column: 0, down: false }, shown: null, metric: "", lost: null,
};

// --- numbers and times -------------------------------------------------------------------------------------------

const short = (x) => x.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });

// Counts without digits, long ones with a letter; a figure that is too small for its digits as it is.
function figure(x, digits = 0) {
  if (x === null || x === undefined) return "–";
  if (Math.abs(x) >= 1e7) return short(x);
  if (!digits || Math.abs(x) >= 1000) return Math.round(x).toLocaleString("en");
  return x !== 0 && Math.abs(x) < 0.5 * 0.1 ** digits ? x.toPrecision(2) : x.toFixed(digits);
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (bytes >= 1000 && i < units.length - 1) { bytes /= 1000; i++; }
  return `${bytes < 10 && i ? bytes.toFixed(1) : Math.round(bytes)} ${units[i]}`;
}

function clock(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const [h, m] = [Math.floor(s / 3600), Math.floor(s / 60) % 60];
  return h ? `${h}:${String(m).padStart(2, "0")}:${String(s % 60).padStart(2, "0")}` : `${m}:${String(s % 60).padStart(2, "0")}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  const [days, hours] = [Math.floor(minutes / 1440), Math.floor(minutes / 60) % 24];
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}

const percent = (part, digits = 0) => (part === null || part === undefined ? "–" : `${(100 * part).toFixed(digits)} %`);

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.append(text);
  if (classes) made.className = classes;
  return made;
}

// --- what is drawn -----------------------------------------------------------------------------------------------

const FEW = 8;  // islands up to this have a colour of their own

// Islands as they are listed, whatever the order of their coming.
const sortable = (text) => text.toLowerCase().replace(/\d+/g, (digits) => digits.padStart(12, "0"));
const inOrder = (names) => [...names].sort((a, b) => (sortable(a) < sortable(b) ? -1 : 1));

// Tokens per second of some islands between two points, of each since it was first heard: what it had then is old.
function speedOf(columns, from, to) {
  const times = state.frame.curve[0];
  let sum = null;
  for (const tokens of columns) {
    let i = from;
    while (i < to && !tokens[i]) i++;
    if (i < to && tokens[to] >= tokens[i]) sum += (tokens[to] - tokens[i]) / (times[to] - times[i]);
  }
  return sum;
}

// Over eight points, so that one slow heartbeat is no dent.
const speeds = (columns) => state.frame.curve[0].map((_, i) => speedOf(columns, Math.max(0, i - 8), i));

function ofIsland(name, field) {
  const i = state.frame.names.indexOf(name);
  return state.frame.curve[0].map((t) => state.points.get(t)?.[i]?.[field] ?? null);
}

const tokensOf = (names) => names.map((name) => ofIsland(name, 1));

// Evaluations know how many tokens were trained; the curve knows when that was.
function timeOf(tokens) {
  const [times, , trained] = state.frame.curve;
  const i = trained.findIndex((each) => each >= tokens);
  if (i <= 0) return i ? state.frame.now_s : times[0];
  return times[i - 1] + ((times[i] - times[i - 1]) * (tokens - trained[i - 1])) / (trained[i] - trained[i - 1] || 1);
}

function evaluated(metric) {
  const found = state.frame.curve[0].length ? state.frame.evaluations.filter((each) => (each.metrics[metric] ?? null) !== null) : [];
  return [found.map((each) => timeOf(each.tokens)), found.map((each) => each.metrics[metric])];
}

const CHARTS = {
  loss: { title: "Loss", digits: 3, fleet: (curve) => curve[1], island: (name) => ofIsland(name, 0) },
  speed: {
    title: "Tokens per second", digits: 0, zero: true,
    fleet: () => speeds(tokensOf(state.names)), island: (name) => speeds(tokensOf([name])),
  },
  agreement: {
    title: "Agreement of islands", digits: 2,
    help: "cosine of each island's direction with the others': 1 is the same, 0 unrelated, below 0 against them",
    fleet: (curve) => curve[4], island: (name) => ofIsland(name, 2),
  },
  metric: { title: "Evaluation", digits: 3 },
};
const charts = {};

function dataOf(id, only) {
  const { curve } = state.frame;
  if (id === "metric") return evaluated(state.metric);
  const found = [curve[0], ...state.names.map((name) => (only && name !== only ? [] : CHARTS[id].island(name))), CHARTS[id].fleet(curve)];
  if (id === "loss") return uPlot.join([found, evaluated("loss")]);
  return found;
}

// The last value up to a place: times of evaluations lie between those of heartbeats.
function known(column, at) {
  for (let i = at; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
  return null;
}

function readOut(chart) {
  const at = chart.cursor.idx ?? chart.series[0].idxs?.[1] ?? chart.data[0].length - 1;
  const values = chart.data.map((column, n) => (n && column.length ? known(column, at) : null));
  const parts = [];
  const say = (n, label, text) => {
    const part = element("span");
    const swatch = element("i");
    swatch.style.background = n ? chart.series[n].stroke(chart) : color("--accent");
    part.append(swatch, `${label} `, element("b", text));
    parts.push(part);
  };
  const shown = (x) => figure(x, Math.abs(x) < 10 ? CHARTS[chart.id].digits : 1 * (CHARTS[chart.id].digits > 0));
  const all = chart.series.map((series, n) => ({ series, n })).slice(1);
  const islands = all.filter(({ series, n }) => series.island && values[n] !== null);
  for (const { series, n } of all) if (!series.island && values[n] !== null) say(n, series.label, shown(values[n]));
  if (islands.length > FEW) {
    const found = islands.map(({ n }) => values[n]);
    say(0, `${found.length} islands`, `${shown(Math.min(...found))} to ${shown(Math.max(...found))}`);
  }
  for (const { series, n } of islands) if (islands.length <= FEW || n === chart.focused) say(n, series.label, shown(values[n]));
  const span = chart.scales.x.max - chart.scales.x.min;
  const pointed = Number.isInteger(chart.cursor.idx);
  const near = pointed && state.events.filter((each) => Math.abs(each.at_s - chart.data[0][at]) < span / 60).at(-1);
  chart.pointed.replaceChildren(pointed ? `at ${clock(chart.data[0][at])} ` : "", near ? element("span", near.text, near.kind) : "");
  chart.readout.replaceChildren(...parts);
}

// Lines where something happened, each with its label where there is room for one.
function drawEvents(ctx, xOf, [left, top, width, height], ratio) {
  ctx.save();
  Object.assign(ctx, { font: `${10 * ratio}px system-ui, sans-serif`, textAlign: "left", textBaseline: "alphabetic" });
  let free = left;
  const seen = state.events.map((event) => [event, xOf(event.at_s)]).filter(([, x]) => x >= left && x <= left + width);
  for (const [event, x] of seen) {
    ctx.fillStyle = color({ refusal: "--bad", fault: "--bad", silence: "--warn", leader: "--accent" }[event.kind] || "--soft");
    const wide = ctx.measureText(event.label).width + 4 * ratio;
    const labelled = x >= free && x + wide <= left + width;
    if (labelled) {
      ctx.fillText(event.label, x + 3 * ratio, top + 9 * ratio);
      free = x + wide + 4 * ratio;
    }
    ctx.globalAlpha = Math.min(0.45, 8 / seen.length);
    ctx.fillRect(x, labelled ? top : top + 12 * ratio, ratio, height - (labelled ? 0 : 12 * ratio));
    ctx.globalAlpha = 1;
  }
  ctx.restore();
}

function wholeSpan() {
  const times = state.frame.curve[0];
  return times.length ? [times[0], Math.max(times.at(-1), times[0] + 1)] : [0, 1];
}

const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

function zoomTo(span) {
  state.zoom = span;
  $("whole").hidden = !span;
  redraw();
}

function makeChart(id, place, only) {
  const spec = CHARTS[id];
  const card = element("section");
  card.title = spec.help ?? "";
  const [head, readout, plot] = [element("h2", spec.title), element("p", undefined, "readout"), element("div", undefined, "chart")];
  Object.assign(plot, { role: "img", ariaLabel: `${spec.title} over the time of the run` });
  const pointed = element("small");
  head.append(pointed);
  card.append(head, readout, plot);
  place.append(card);
  const many = state.names.length > FEW;
  const faint = Math.round(255 * Math.max(0.1, 10 / state.names.length)).toString(16).padStart(2, "0");  // as in #rrggbbaa
  const apart = id === "speed" && many;  // islands have the lower half and an axis at the right: the fleet is far above
  const points = { show: (u) => u.data[0].length < 3 };  // too few for a line
  const series = [{}];
  const judged = { stroke: () => color("--good"), points: { show: true, size: 6 } };
  if (id === "metric") series.push({ label: "value", width: 1.5, ...judged });
  else {
    state.names.forEach((label, i) => series.push({
      label, island: true, scale: apart ? "each" : "y", width: only ? 2 : 1, points, show: !only || label === only,
      stroke: (u) => (many ? color("--accent") + (only || u?.focused === i + 1 ? "" : faint) : color(`--i${i}`)),
    }));
    series.push({ label: "fleet", stroke: () => color("--ink"), width: only ? 1 : 2, points });
    if (id === "loss") series.push({ label: "evaluated", width: 1, dash: [4, 4], ...judged });
  }
  const axis = {
    stroke: () => color("--soft"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false },
    gap: 4, font: "11px system-ui, sans-serif",
  };
  const told = (x) => (Math.abs(x) >= 10000 ? short(x) : x.toLocaleString("en"));
  const y = { ...axis, size: 46, values: (_, all) => all.map(told) };
  const range = (_, low, high) => {
    if (spec.zero) return [0, 1.08 * (high || 1)];
    const pad = high - low < 1e-6 * Math.abs(high) ? Math.abs(high) / 2 || 1 : 0;
    return uPlot.rangeNum((low ?? 0) - pad, (high ?? 1) + pad, 0.08, true);
  };
  const scales = { x: { time: false, range: () => state.zoom ?? wholeSpan() }, y: { range } };
  if (apart) scales.each = { range: (_, low, high) => [0, 2 * (high || 1)] };
  const chart = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight, legend: { show: false }, padding: [14, apart ? 0 : 18, 0, 0],
    scales, series, focus: { alpha: 0.25 },
    axes: [
      { ...axis, size: 18, incrs: STEPS_S, values: (_, all) => all.map(clock) }, y,
      ...(apart ? [{ ...y, scale: "each", side: 1, grid: { show: false } }] : []),
    ],
    cursor: {
      y: false, focus: { prox: 12 }, points: { one: many },
      sync: only ? undefined : { key: "run", setSeries: id !== "metric" },
      drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { zoomTo(null); return null; } },
    },
    hooks: {
      draw: [(u) => {
        const { left, top, width, height } = u.bbox;
        const above = 12 * devicePixelRatio;  // for labels
        drawEvents(u.ctx, (t) => u.valToPos(t, "x", true), [left, top - above, width, height + above], devicePixelRatio);
        if (u.readout) readOut(u);
      }],
      setCursor: [(u) => u.readout && readOut(u)],
      setSeries: [(u, n) => {
        u.focused = n;
        u.series.forEach((each, i) => { if (each.island && !only) each.width = i === n ? 2.5 : 1; });
        if (u.readout) readOut(u);
      }],
      setSelect: [(u) => {
        const { left, width: wide } = u.select;
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (wide > 5) zoomTo([u.posToVal(left, "x"), u.posToVal(left + wide, "x")]);
      }],
    },
  }, dataOf(id, only), plot);
  Object.assign(chart, { readout, pointed, id, only, plot, card, head });
  new ResizeObserver(() => { if (plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: plot.clientHeight }); }).observe(plot);
  readOut(chart);
  return chart;
}

function chooseMetric(head, metrics) {
  const choice = element("select");
  choice.ariaLabel = "metric";
  choice.append(...metrics.map((each) => new Option(each)));
  choice.value = state.metric;
  choice.onchange = () => { state.metric = choice.value; showCharts(); };
  head.firstChild.after(choice);
}

// Makes the charts that there are data for, anew when islands or metrics have come, and shows the newest values.
function showCharts() {
  const metrics = [...new Set(state.frame.evaluations.flatMap((each) => Object.keys(each.metrics)))].filter((each) => each !== "loss");
  if (!metrics.includes(state.metric)) state.metric = metrics[0] ?? "";
  const agree = state.frame.curve[4].some((each) => each !== null);
  const ids = ["loss", "speed", ...(agree ? ["agreement"] : []), ...(metrics.length ? ["metric"] : [])];
  const made = JSON.stringify([ids, state.names, metrics]);
  if ($("charts").dataset.made !== made) {
    for (const [key, chart] of Object.entries(charts)) if (!chart.only) { chart.destroy(); chart.card.remove(); delete charts[key]; }
    Object.assign($("charts").dataset, { made, count: ids.length, many: state.names.length > FEW });
    for (const id of ids) charts[id] = makeChart(id, $("charts"));
    if (charts.metric) chooseMetric(charts.metric.head, metrics);
  }
  for (const chart of Object.values(charts)) chart.setData(dataOf(chart.id, chart.only));
}

// --- rounds ------------------------------------------------------------------------------------------------------

const bars = [];

// Of a run that nobody has zoomed: the newest rounds, as many as can be told apart.
function shownSpan() {
  const { now_s: now, fragments } = state.frame;
  const rounds = [...state.rounds.values()];
  const each_s = rounds.length ? ((now - rounds[0][2]) * fragments.length) / rounds.length : 1;
  const span = state.span ?? Math.max(10, (each_s * $("gantt").clientWidth) / 16);
  return state.zoom ?? [Math.max(0, now - span), Math.max(now, 1)];
}

function showRounds() {
  const canvas = $("gantt");
  const ratio = devicePixelRatio || 1;
  const lanes = Math.max(state.frame.fragments.length, 1, ...[...state.rounds.values()].map((row) => row[1] + 1));
  const [width, height, top, left] = [canvas.clientWidth, canvas.clientHeight, 14, 26];
  const lane = (height - top - 18) / lanes;
  const gap = lane > 6 ? 2 : lane / 4;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "11px system-ui, sans-serif";
  const [from, to] = shownSpan();
  const x = (t) => left + ((Math.min(Math.max(t, from), to) - from) / (to - from)) * (width - left);
  ctx.fillStyle = color("--soft");
  const every = Math.ceil(12 / lane);
  for (let p = 0; p < lanes && state.rounds.size; p += every) ctx.fillText(String(p), 2, top + (p + 0.5) * lane + 4);
  ctx.textAlign = "center";
  const step = STEPS_S.find((each) => (to - from) / each < width / 80) ?? to - from;
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    if (x(t) > left + 14 && x(t) < width - 14) ctx.fillText(clock(t), x(t), height - 3);
  }
  bars.length = 0;
  for (const row of state.rounds.values()) {
    const [, fragment, opened, closed, committed, version, , , cancelled] = row;
    const end = committed ?? closed ?? state.frame.now_s;
    if (end < from || opened > to) continue;
    const [a, b, c] = [x(opened), x(closed ?? state.frame.now_s), x(end)];
    const y = top + fragment * lane + gap / 2;
    ctx.fillStyle = color(cancelled ? "--bad" : "--open");
    ctx.fillRect(a, y, Math.max(1.5, b - a), lane - gap);
    if (version !== null) {
      ctx.fillStyle = color("--accent");
      ctx.fillRect(b, y, Math.max(1.5, c - b), lane - gap);
    }
    bars.push({ from: a, to: Math.max(c, a + 4), y, high: lane, row });
  }
  drawEvents(ctx, (t) => (t < from || t > to ? -1 : x(t)), [left, 0, width - left, height - 18], 1);
}

function barAt(event) {
  const box = $("gantt").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return bars.filter((bar) => y >= bar.y - 1 && y < bar.y + bar.high && x >= bar.from - 3 && x <= bar.to + 3).at(-1);
}

function redraw() {
  for (const chart of Object.values(charts)) chart.setData(chart.data);
  showRounds();
}
