// The page of a run. It asks the server for what has changed, twice a second; a report has everything in itself.
"use strict";

const EVERY_MS = 500;
const LANE = 14;
const embedded = document.getElementById("data");
const state = { changes: 0, rounds: new Map(), marks: [], islands: {}, span: 120, now: 0, lanes: 0, bars: [] };
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- numbers and times -------------------------------------------------------------------------------------------

function figure(x, digits = 3) {
  if (x === null || x === undefined) return "-";
  return Math.abs(x) >= 10000 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(digits + 1)).toString();
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

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "-");

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

// --- the two curves ----------------------------------------------------------------------------------------------

const charts = {};

function markLines(chart) {
  const { ctx, bbox } = chart;
  for (const mark of state.marks) {
    if (mark.kind === "run") continue;
    const x = chart.valToPos(mark.at_s, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.fillStyle = color({ island: "--warn", refusal: "--bad", fault: "--bad", leader: "--merge" }[mark.kind] || "--soft");
    ctx.fillRect(x, bbox.top, 1, 6);
  }
}

function chartOf(id, stroke, cosines = false) {
  const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
  const place = $(id);
  return new uPlot({
    width: place.clientWidth, height: place.clientHeight, legend: { show: false }, cursor: { y: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, all) => all.map(clock) }, { ...axis, size: 56, values: (_, all) => all.map((x) => figure(x)) },
      ...(cosines ? [{ ...axis, scale: "cosine", side: 1, size: 40, grid: { show: false } }] : [])],
    series: [{}, { stroke: () => color(stroke), width: 1.5, spanGaps: true },
      ...(cosines ? [{ scale: "cosine", stroke: () => color("--soft"), width: 1, spanGaps: true }] : [])],
    hooks: { draw: [markLines] },
  }, cosines ? [[], [], []] : [[], []], place);
}

function speeds(times, tokens) {
  const over = 8;  // points, so that one slow heartbeat is no dent
  return times.map((t, i) => {
    const from = Math.max(0, i - over);
    const took = t - times[from];
    return i && took > 0 ? Math.max(0, (tokens[i] - tokens[from]) / took) : null;
  });
}

function showCurves([times, losses, tokens, , agreements]) {
  charts.loss ||= chartOf("loss", "--merge", true);
  charts.speed ||= chartOf("speed", "--good");
  charts.loss.setData([times, losses, agreements]);
  const found = speeds(times, tokens);
  charts.speed.setData([times, found]);
  return found.at(-1);
}

// --- rounds ------------------------------------------------------------------------------------------------------

function showRounds() {
  const canvas = $("gantt");
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = Math.max(1, state.lanes) * LANE + 16;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "10px system-ui";
  const left = 26;
  const from = Math.max(0, state.now - state.span);
  const x = (t) => left + ((t - from) / state.span) * (width - left);
  ctx.fillStyle = color("--soft");
  for (let p = 0; p < state.lanes; p++) ctx.fillText(String(p), 2, p * LANE + 10);
  for (let i = 0; i <= 6; i++) {
    const t = from + (i * state.span) / 6;
    ctx.fillText(clock(t), Math.min(x(t), width - 28), height - 4);
  }
  state.bars = [];
  for (const row of state.rounds.values()) {
    const [, fragment, opened, closed, committed, version, , , cancelled] = row;
    const end = committed ?? closed ?? state.now;
    if (end < from || fragment >= state.lanes) continue;
    const [a, b, c] = [x(Math.max(from, opened)), x(Math.max(from, closed ?? state.now)), x(Math.max(from, end))];
    const y = fragment * LANE + 2;
    ctx.fillStyle = color(cancelled ? "--bad" : "--open");
    ctx.fillRect(a, y, Math.max(1.5, b - a), LANE - 4);
    if (version !== null) {
      ctx.fillStyle = color("--merge");
      ctx.fillRect(b, y, Math.max(1.5, c - b), LANE - 4);
    }
    state.bars.push({ from: a, to: Math.max(c, a + 4), y, row });
  }
}

function barAt(event) {
  const box = $("gantt").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return state.bars.find((bar) => x >= bar.from - 2 && x <= bar.to + 2 && y >= bar.y && y < bar.y + LANE);
}

function sentence([number, fragment, opened, closed, , version, islands, live, cancelled]) {
  const took = closed === null ? "open" : `${(closed - opened).toFixed(1)} s`;
  if (cancelled) return `round ${number} of fragment ${fragment}: cancelled after ${took}`;
  if (version === null) return `round ${number} of fragment ${fragment}: ${took}`;
  return `fragment ${fragment}, version ${version}: ${islands} of ${live} islands, ${took}`;
}

// --- islands and marks -------------------------------------------------------------------------------------------

function cellsOf(name, each) {
  return [
    name, each.state, figure(each.step, 8), figure(each.loss), each.step_time_s === null ? "-" : `${figure(each.step_time_s, 2)} s`,
    figure(each.staleness, 1), figure(each.agreement, 1), each.trust === null ? "-" : share(each.trust, 1), share(each.versions_in, each.versions_of), `${size(each.bytes_up)} / ${size(each.bytes_down)}`,
    each.sync_share === null ? "-" : `${(100 * each.sync_share).toFixed(2)} %`, each.lives, each.last_refusal || "-",
  ];
}

function showIslands() {
  const body = $("islands").tBodies[0];
  const wanted = $("filter").value.toLowerCase();
  const names = Object.keys(state.islands).filter((name) => name.toLowerCase().includes(wanted));
  names.forEach((name, i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      row.tabIndex = 0;
      for (let n = 0; n < 13; n++) row.insertCell();
    }
    row.dataset.island = name;
    cellsOf(name, state.islands[name]).forEach((text, n) => {
      const cell = row.cells[n];
      if (cell.textContent !== String(text)) cell.textContent = text;
    });
    row.cells[1].className = state.islands[name].state;
    row.cells[12].title = state.islands[name].last_refusal;
  });
  while (body.rows.length > names.length) body.deleteRow(-1);
}

function itemOf(mark) {
  const item = element("li", undefined, mark.kind);
  item.append(element("time", clock(mark.at_s)), mark.text);
  return item;
}

function showMarks(fresh) {
  for (const mark of fresh) $("marks").prepend(itemOf(mark));
  while ($("marks").childElementCount > 200) $("marks").lastChild.remove();
}

// --- details -----------------------------------------------------------------------------------------------------

function open(title, parts) {
  const place = $("detail").querySelector("div");
  place.replaceChildren(element("h3", title), ...parts);
  if (!$("detail").open) $("detail").showModal();
}

function tableOf(head, rows) {
  const table = element("table");
  const top = table.createTHead().insertRow();
  head.forEach((text) => top.append(element("th", text)));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text) => line.append(element("td", text)));
  }
  return table;
}

async function openVersion(row) {
  const [, fragment, , , , version] = row;
  if (version === null || embedded) return open(sentence(row), []);
  const answer = await fetch(`version/${fragment}/${version}`);
  const found = await answer.json();
  if (!answer.ok) return open(sentence(row), [element("p", found.error)]);
  const parts = [element("p", `${found.closed} Digest ${found.digest}, epoch ${found.epoch}.`)];
  parts.push(tableOf(
    ["island", "life", "steps", "tokens", "share", "staleness", "agrees", "trust", "in time"],
    found.contributors.map((c) => [c.island, c.incarnation, c.steps.join(" - "), figure(c.tokens, 8), `${(100 * c.share).toFixed(1)} %`, figure(c.staleness, 2), figure(c.agreement, 1), c.trust === null ? "-" : share(c.trust, 1), c.fresh ? "yes" : "held from an earlier round"]),
  ));
  if (found.absent && found.absent.length) {
    parts.push(element("h3", "Not in it"), tableOf(["island", "why"], found.absent.map((a) => [a.island, a.detail ? `${a.why}: ${a.detail}` : a.why])));
  }
  if (found.gone) parts.push(element("p", found.gone));
  open(sentence(row), parts);
}

function openIsland(name) {
  const each = state.islands[name];
  const refused = Object.entries(each.refusals);
  const facts = [
    ["state", each.state], ["step", figure(each.step, 8)], ["tokens", figure(each.tokens, 8)], ["loss", figure(each.loss)],
    ["in versions", `${each.versions_in} of ${each.versions_of}`], ["lives", each.lives], ["optimizer's state from", each.optimizer || "-"],
    ["last heard", clock(each.heard_at_s)], ["refused", refused.length ? refused.map(([why, n]) => `${n} ${why}`).join(", ") : "-"],
  ];
  const list = element("ol");
  list.id = "story";
  state.marks.filter((mark) => mark.island === name).slice(-50).reverse().forEach((mark) => list.append(itemOf(mark)));
  open(name, [tableOf(["", ""], facts), list]);
}

// --- frames ------------------------------------------------------------------------------------------------------

function take(frame) {
  if (frame.changes < state.changes) return location.reload();  // another server, or another run
  state.changes = frame.changes;
  state.now = frame.now_s;
  state.lanes = Math.max(state.lanes, frame.fragments.length, ...frame.rounds.map((row) => row[1] + 1));
  for (const row of frame.rounds) state.rounds.set(`${row[1]} ${row[0]}`, row);
  while (state.rounds.size > 3000) state.rounds.delete(state.rounds.keys().next().value);
  state.marks.push(...frame.marks);
  state.marks.splice(0, state.marks.length - 500);
  state.islands = frame.islands;
  document.title = `${frame.run} - Atoll`;
  $("run").textContent = `run ${frame.run}`;
  const speed = showCurves(frame.curve);
  showFacts(frame, speed);
  showRounds();
  showIslands();
  showMarks(frame.marks);
  document.body.dataset.ready = "yes";
}

function showFacts(frame, speed) {
  const all = Object.values(frame.islands);
  const alive = all.filter((each) => each.state === "alive").length;
  const stopped = frame.phase === "stopped";
  const facts = [
    ["phase", frame.phase], ["islands", stopped ? `${all.length}` : `${alive} of ${all.length}`], ["tokens", figure(frame.tokens, 12)], ["tokens/s", figure(speed)],
    ["loss", figure(frame.curve[1].at(-1))], ["agreement", figure(frame.curve[4].at(-1), 1)],
    ["versions", frame.fragments.length ? `${Math.min(...frame.fragments)} to ${Math.max(...frame.fragments)}` : "-"], ["time", clock(frame.now_s)],
  ];
  const leaders = Object.values(frame.present?.leaders ?? {});
  if (leaders.length) facts.push([leaders.length > 1 ? "leaders" : "leader", leaders.map((each) => `${each.leader} (epoch ${each.epoch})`).join(", ")]);
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
  $("progress").hidden = !frame.target_tokens;
  if (frame.target_tokens) $("progress").value = Math.min(1, frame.tokens / frame.target_tokens);
  const troubles = [frame.failure, frame.gone, ...(frame.present?.totals?.troubles ?? [])].filter(Boolean);
  if (frame.present?.broker_is_silent && frame.phase !== "ended" && !stopped) troubles.push("No broker writes to Redis: it has ended, or lost Redis.");
  warn(troubles.join(" "));
}

function warn(text) {
  $("alert").hidden = !text;
  $("alert").textContent = text;
}

async function poll() {
  try {
    const answer = await fetch(`frame?since=${state.changes}`);
    take(await answer.json());
  } catch (error) {
    warn("The dashboard's server does not answer: is it still running? What is shown is old.");
  }
  setTimeout(poll, EVERY_MS);
}

// --- what a person does ------------------------------------------------------------------------------------------

function zoom(by) {
  state.span = Math.min(86400, Math.max(10, state.span * by));
  showRounds();
}

$("closer").onclick = () => zoom(0.5);
$("wider").onclick = () => zoom(2);
$("filter").oninput = showIslands;
$("gantt").onclick = (event) => { const bar = barAt(event); if (bar) openVersion(bar.row); };
$("gantt").onmousemove = (event) => { const bar = barAt(event); $("gantt").title = bar ? sentence(bar.row) : ""; };
$("islands").onclick = (event) => { const row = event.target.closest("tr[data-island]"); if (row) openIsland(row.dataset.island); };
document.onkeydown = (event) => {
  const row = document.activeElement.closest?.("tr[data-island]");
  if (event.target.tagName === "INPUT") { if (event.key === "Escape") { event.preventDefault(); event.target.blur(); } return; }  // else the field is emptied
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  else if (event.key === "+") zoom(0.5);
  else if (event.key === "-") zoom(2);
  else if (event.key === "Enter" && row) { event.preventDefault(); openIsland(row.dataset.island); }  // else it presses "close", too
  else if (event.key === "ArrowDown" || event.key === "j") { event.preventDefault(); (row ? row.nextElementSibling : $("islands").tBodies[0].rows[0])?.focus(); }
  else if (event.key === "ArrowUp" || event.key === "k") { event.preventDefault(); row?.previousElementSibling?.focus(); }
};
onresize = () => {
  for (const [id, chart] of Object.entries(charts)) chart.setSize({ width: $(id).clientWidth, height: $(id).clientHeight });
  showRounds();
};

if (embedded) {
  const frame = JSON.parse(embedded.textContent);
  state.span = Math.max(60, frame.now_s);
  take(frame);
} else poll();
