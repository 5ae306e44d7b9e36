// The page of a run. It always has a question open at the server, which answers with what has changed; a report has
// everything in itself.
"use strict";

const AGAIN_MS = 2000;
const embedded = $("data");

// --- header ------------------------------------------------------------------------------------------------------

const PHASES = { seeding: "starting", flushing: "ending" };
const isOver = () => ["ended", "stopped"].includes(state.frame.phase);

// Tokens per second over the last minute.
function rate({ curve: [times] }) {
  const from = Math.max(0, times.findIndex((t) => t >= times.at(-1) - 60));
  return speedOf(tokensOf(state.names), from, times.length - 1);
}

// From the least to the most, as one value where they are the same.
function between(values, between, digits) {
  return [...new Set([Math.min(...values), Math.max(...values)].map((x) => figure(x, digits)))].join(between);
}

// Rows of name, value, and what is to be said beside it.
function factsOfRun(frame, speed) {
  const [all, over] = [Object.values(frame.islands), isOver()];
  const count = (...states) => all.filter((each) => states.includes(each.state)).length;
  const losses = all.map((each) => each.loss).filter((each) => each !== null);
  const [silent, judged, agreement] = [count("suspect", "dead"), evaluated("loss"), frame.curve[4].at(-1) ?? null];
  const epochs = Object.values(frame.present?.leaders ?? {}).map((each) => each.epoch);
  const facts = [["loss", figure(frame.curve[1].at(-1), 3), losses.length > 1 ? `islands ${between(losses, " to ", 3)}` : ""]];
  if (judged[0].length) facts.push(["evaluated loss", figure(judged[1].at(-1), 3), `at ${clock(judged[0].at(-1))}`]);
  facts.push(
    ["tokens per second", figure(speed), over ? "in the last minute" : "over a minute"],
    over ? ["islands", all.length, "took part"] : ["islands", `${count("alive")} of ${all.length}`, silent ? `${silent} silent` : "alive"],
    ["versions", frame.fragments.length ? between(frame.fragments, "–") : "–",
      `${frame.fragments.length} fragments${epochs.length ? `, epoch ${between(epochs, "–")}` : ""}`],
  );
  if (agreement !== null) facts.push(["agreement", figure(agreement, 2), "cosine of islands"]);
  return [...facts, ["time", clock(frame.now_s), over ? "from start to end" : "since the start"]];
}

function showFacts(frame) {
  const speed = rate(frame);
  $("facts").replaceChildren(...factsOfRun(frame, speed).map(([name, value, more]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value), element("dd", more));
    return pair;
  }));
  $("run").textContent = frame.run;
  $("phase").textContent = $("phase").className = PHASES[frame.phase] ?? frame.phase;
  const { tokens, target_tokens: target } = frame;
  const say = target >= 1e7 ? short : figure;
  const done = target ? Math.min(1, tokens / target) : 0;
  const whole = percent(Math.floor(100 * done) / 100);
  const left = speed && !isOver() && done < 1 ? `, about ${duration((target - tokens) / speed)} left` : "";
  if (target) $("goal").replaceChildren(element("b", whole), ` ${say(tokens)} of ${say(target)} tokens${left}`);
  else $("goal").textContent = `${figure(tokens)} tokens, no target`;
  document.title = `${target ? `${whole} ` : ""}${frame.run} – Atoll`;
  $("progress").hidden = !target;
  $("progress").ariaValueNow = Math.round(100 * done);
  $("progress").firstElementChild.style.width = `${100 * done}%`;
}

// What stands above the page: [whether it is bad, text]; nothing: an empty text.
function noticeOf(frame, lost) {
  const copy = "A copy is report.html in its directory: up writes it at its end, plot at any time.";
  const over = `The run has ${frame?.phase}, and so has the server of this page: what is shown is final.`;
  if (lost && frame && isOver()) return [false, `${over} ${copy}`];
  if (lost?.goodbye) return [false, `The server of this page was stopped at ${lost.at}. What is shown is from then.`];
  if (lost) return [true, `No answer from the server of this page since ${lost.at}. What is shown is from then.`];
  const told = (frame.present?.totals?.troubles ?? []).map((each) => each.replace(/^(for [^:]*): (.*)$/s, "$2 ($1)"));
  const troubles = [frame.failure, frame.gone, ...told].filter(Boolean);
  if (frame.present?.broker_is_silent && !isOver()) troubles.push("No broker writes to Redis: it has ended, or lost Redis.");
  if (!troubles.length && frame.phase === "stopped") return [false, "The run was stopped before its end. It can go on: up --resume, or hub, with its directory."];
  return [true, troubles.join("\n")];
}

function showNotice() {
  const [bad, text] = noticeOf(state.frame, state.lost);
  if (state.lost && state.frame && !isOver()) Object.assign($("phase"), { textContent: "not known", className: "" });
  Object.assign($("notice"), { hidden: !text, textContent: text, className: bad ? "bad" : "" });
}

// --- islands -----------------------------------------------------------------------------------------------------

const STATES = {
  alive: "is heard", suspect: "silent for some seconds", dead: "silent for so long that rounds go on without it",
  left: "has said goodbye", stopped: "its process is gone",
};
const ORDER = ["dead", "suspect", "alive", "stopped", "left"];
const partIn = (each) => (each.versions_of ? each.versions_in / each.versions_of : null);

function moment(s) {
  if (s === null) return "–";
  return s < 1 ? `${figure(1000 * s, s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(1)} s`;
}

// Title, what it means, what it is sorted by, what is shown, and whether narrow screens leave it out.
const COLUMNS = [
  ["island", "", (each, name) => sortable(name), (each, name) => name],
  ["state", "as its heartbeats say", (each) => ORDER.indexOf(each.state), (each) => each.state],
  ["loss", "of its training, lately", (each) => each.loss, (each) => figure(each.loss, 3)],
  ["steps", "inner steps made", (each) => each.step, (each) => figure(each.step), true],
  ["step time", "of one inner step", (each) => each.step_time_s, (each) => moment(each.step_time_s), true],
  ["in versions", "share of the versions made since it joined that have something of it", partIn, (each) => percent(partIn(each))],
  ["staleness", "of its newest contribution, in versions", (each) => each.staleness, (each) => figure(each.staleness, 2), true],
  ["agreement", "cosine of its direction with the other islands'", (each) => each.agreement, (each) => figure(each.agreement, 2), true],
  ["trust", "what its weight in a merge is multiplied by", (each) => each.trust, (each) => percent(each.trust), true],
  ["sent", "bytes over the network", (each) => each.bytes_up, (each) => size(each.bytes_up), true],
  ["received", "bytes over the network", (each) => each.bytes_down, (each) => size(each.bytes_down), true],
  ["in sync", "share of its time that exchange takes from training", (each) => each.sync_share, (each) => percent(each.sync_share, 2), true],
  ["lives", "how often its process has started", (each) => each.lives, (each) => `${each.lives}`, true],
  ["last refusal", "what was refused of it last, and why", (each) => each.last_refusal || null, (each) => each.last_refusal || "–", true],
];

function sorted(names) {
  const key = COLUMNS[state.sort.column][2];
  const of = (name) => key(state.islands[name], name);
  return names.map((name) => [of(name), sortable(name), name]).sort(([a, x], [b, y]) => {
    if (a === null || b === null) return (a === null) - (b === null) || (x < y ? -1 : 1);  // unknown: last, both ways
    return (a < b ? -1 : a > b ? 1 : 0) * (state.sort.down ? -1 : 1) || (x < y ? -1 : 1);
  }).map((each) => each[2]);
}

function sortBy(column) {
  const again = state.sort.column === column;
  state.sort = { column, down: again ? !state.sort.down : column > 1 };  // of figures the largest first
  showIslands();
}

function makeHead() {
  COLUMNS.forEach(([title, help, , , minor], column) => {
    const button = element("button", title);
    button.onclick = () => sortBy(column);
    const cell = element("th", button, minor ? "minor" : "");
    cell.title = help;
    $("islands").tHead.rows[0].append(cell);
  });
}

function showIslands() {
  const body = $("islands").tBodies[0];
  const wanted = $("filter").value.toLowerCase();
  const names = sorted(Object.keys(state.islands).filter((name) => name.toLowerCase().includes(wanted)));
  [...$("islands").tHead.rows[0].cells].forEach((cell, n) => {
    cell.ariaSort = n === state.sort.column ? (state.sort.down ? "descending" : "ascending") : "none";
  });
  names.forEach((name, i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      row.tabIndex = 0;
      for (const column of COLUMNS) row.insertCell().className = column[4] ? "minor" : "";
    }
    row.dataset.island = name;
    COLUMNS.forEach(([, , , shown], n) => {
      const text = shown(state.islands[name], name);
      if (row.cells[n].textContent !== text) row.cells[n].textContent = text;
    });
    row.cells[1].className = state.islands[name].state;
    row.cells[1].title = STATES[state.islands[name].state] ?? "";
    row.lastElementChild.title = state.islands[name].last_refusal;
  });
  while (body.rows.length > names.length) body.deleteRow(-1);
}

// --- what happened -----------------------------------------------------------------------------------------------

const LABELS = {
  silence: "silent", process: "restart", "island.resumed": "back", "join.refused": "not let in", "interval.changed": "interval",
  "aggregator.started": "leader", "aggregator.finished": "aggregator ended", "round.cancelled": "round cancelled",
  "run.seeded": "training begins", "run.flushing": "training ends",
};
const TOGETHER_S = 15;
const FAINT_S = 60;  // silences of one island that are less apart are told together

// Marks of one sort that come soon after each other are one event: a fleet that leaves, an island that comes and goes.
function eventsOf(marks) {
  const [events, silences] = [[], new Map()];
  for (const mark of marks) {
    const quiet = ["silent", "heard"].includes(mark.event);
    const sort = quiet ? "silence" : mark.event || mark.kind;
    const silence = silences.get(mark.island);
    if (silence && ["heard", "island.joined", "island.resumed"].includes(mark.event)) silence.back.add(mark.island);
    let event = quiet && silence && (mark.event === "heard" || mark.at_s - silence.marks.at(-1).at_s < FAINT_S) ? silence
      : events.slice(-20).findLast((each) => each.sort === sort && mark.at_s - (quiet ? each : each.marks.at(-1)).at_s < TOGETHER_S);
    if (!event) events.push(event = { sort, at_s: mark.at_s, kind: quiet ? sort : mark.kind, marks: [], back: new Set() });
    if (quiet) silences.set(mark.island, event);
    if (mark.event === "silent") event.back.delete(mark.island);
    event.marks.push(mark);
  }
  for (const event of events) Object.assign(event, wordsOf(event));
  return events;
}

function wordsOf({ sort, marks, back }) {
  const last = marks.at(-1);
  const names = [...new Set(marks.map((mark) => mark.island))].filter(Boolean);
  const all = `${names.length} islands`;
  let text = last.text + (marks.length > 1 ? ` +${marks.length - 1}` : "");
  const came = back.size === names.length ? "all" : back.size;
  if (sort === "silence" && names.length > 1) text = came ? `${all} fell silent, ${came} came back` : `${all} are silent`;
  else if (sort === "silence") text = last.text + (back.size && last.event === "silent" ? ", and came back" : "");
  else if (names.length > 1 && last.text.startsWith(last.island)) text = all + last.text.slice(last.island.length);
  const label = LABELS[sort] ?? sort.split(".").at(-1).replaceAll("_", " ");
  return { text, label: [names.length > 1 ? all : names[0], label].filter(Boolean).join(" ") };
}

function itemOf(event) {
  const line = [element("time", clock(event.at_s)), event.text];
  const item = element("li", undefined, event.kind);
  if (!event.marks || event.marks.length === 1) { item.append(...line); return item; }
  const [all, head, list] = [element("details"), element("summary"), element("ol")];
  head.append(...line);
  list.append(...event.marks.map(itemOf));
  all.append(head, list);
  item.append(all);
  return item;
}

function showMarks() {
  const bad = (event) => ["silence", "refusal", "fault", "leader"].includes(event.kind);
  const shown = state.events.filter((event) => !$("problems").checked || bad(event)).slice(-200).reverse();
  $("marks").replaceChildren(...(shown.length ? shown.map(itemOf) : [element("li", "Nothing so far.", "over")]));
}

// --- details -----------------------------------------------------------------------------------------------------

function open(title, ...parts) {
  closeCharts();
  $("detail").querySelector("div").replaceChildren(element("h3", title), ...parts);
  if (!$("detail").open) $("detail").showModal();
}

function closeCharts() {
  state.shown = null;
  for (const [key, chart] of Object.entries(charts)) if (chart.only) { chart.destroy(); delete charts[key]; }
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
  const scroll = element("div", undefined, "scroll");
  scroll.append(table);
  return scroll;
}

function sentence([number, fragment, opened, closed, , version, islands, live, cancelled]) {
  const took = closed === null ? "is open" : `took ${(closed - opened).toFixed(1)} s`;
  if (version !== null) return `Fragment ${fragment}, version ${version}: ${islands} of ${live} islands, ${took}`;
  return `Fragment ${fragment}, round ${number}: ${cancelled ? "was cancelled, " : ""}${took}`;
}

// What is known of a version: from the server, or in a report from what it has in itself.
async function versionOf(fragment, version) {
  if (!embedded) {
    const answer = await fetch(`version/${fragment}/${version}`).catch(() => null);
    if (!answer) return { error: "The server of this page does not answer." };
    return answer.json();
  }
  const kept = state.frame.versions[`${fragment}:${version}`];
  if (!kept) return { error: `This file has the newest versions alone. For this one: explain ${fragment}:${version} RUN_DIR` };
  const [closed, digest, missing, rows] = kept;
  const names = ["island", "incarnation", "steps", "tokens", "share", "staleness", "agreement", "trust", "fresh"];
  const contributors = rows.map((row) => Object.fromEntries(row.map((value, n) => [names[n], value])));
  const absent = missing.map((island) => ({ island, why: "it was waited for until the round closed" }));
  return { closed, digest, contributors, absent };
}

async function openVersion(row) {
  const [, fragment, , , , version] = row;
  if (version === null) return open(sentence(row));
  const others = [...state.rounds.values()].filter((each) => each[1] === fragment && each[5] !== null);
  const at = others.findIndex((each) => each[5] === version);
  const steps = element("p", undefined, "steps");
  for (const [text, other] of [["‹ older", others[at - 1]], ["newer ›", others[at + 1]]]) {
    const button = element("button", text);
    button.disabled = !other;
    button.onclick = () => openVersion(other);
    steps.append(button);
  }
  const found = await versionOf(fragment, version);
  if (found.error) return open(sentence(row), steps, element("p", found.error));
  const parts = [element("p", `Closed because: ${found.closed || "not known"}. Digest ${found.digest}.`)];
  parts.push(tableOf(
    ["island", "weight", "steps", "tokens", "staleness", "agreement", "trust", "came"],
    found.contributors.map((each) => [
      each.island, percent(each.share, 1), each.steps.map((step) => figure(step)).join(" to "), figure(each.tokens),
      figure(each.staleness, 2), figure(each.agreement, 2), percent(each.trust), each.fresh ? "in time" : "late: held from an earlier round",
    ]),
  ));
  const absent = (found.absent ?? []).map((each) => [each.island, [each.why, each.detail].filter(Boolean).join(": ")]);
  if (absent.length) parts.push(element("h3", "Not in it"), tableOf(["island", "why"], absent));
  if (found.gone) parts.push(element("p", found.gone));
  open(sentence(row), steps, ...parts);
}

function factsOf(name) {
  const each = state.islands[name];
  const refused = Object.entries(each.refusals).map(([why, n]) => `${n} ${why.replaceAll("_", " ")}`).join(", ");
  const rows = COLUMNS.slice(1, -1).map(([title, , , shown]) => [title, shown(each, name)]);
  rows.push(["tokens", figure(each.tokens)], ["optimizer's state", each.optimizer || "–"]);
  rows.push(["last heard", clock(each.heard_at_s)], ["refused", refused || "nothing"]);
  return rows.map(([title, value]) => {
    const pair = element("div");
    pair.append(element("dt", title), element("dd", value));
    return pair;
  });
}

function openIsland(name) {
  const [facts, place, list] = [element("dl"), element("div", undefined, "charts"), element("ol")];
  list.id = "story";
  list.append(...eventsOf(state.marks.filter((mark) => mark.island === name)).reverse().map(itemOf));
  open(name, facts, place, list);
  state.shown = { name, facts };
  facts.append(...factsOf(name));
  for (const id of ["loss", "speed", "agreement"]) if (charts[id]) charts[`${id} of one`] = makeChart(id, place, name);
}

// --- frames ------------------------------------------------------------------------------------------------------

function take(frame) {
  const another = state.frame && (frame.changes < state.changes || frame.run !== state.frame.run);
  if (another) return location.reload();  // another server, or another run
  const grown = !state.frame || frame.each.length || frame.evaluations.length !== state.frame.evaluations.length;
  Object.assign(state, { frame, changes: frame.changes, islands: frame.islands, names: inOrder(frame.names) });
  for (const row of frame.rounds) state.rounds.set(`${row[1]} ${row[0]}`, row);
  while (state.rounds.size > 3000) state.rounds.delete(state.rounds.keys().next().value);
  for (const [t, each] of frame.each) state.points.set(t, each);
  const times = new Set(frame.curve[0]);  // of a long run the server keeps every other one
  for (const t of state.points.keys()) if (!times.has(t)) state.points.delete(t);
  state.marks.push(...frame.marks);
  state.marks.splice(0, state.marks.length - 500);
  if (frame.marks.length || !state.events.length) { state.events = eventsOf(state.marks); showMarks(); }
  showFacts(frame);
  if (grown) showCharts();
  showRounds();
  showIslands();
  showNotice();
  if (state.shown) state.shown.facts.replaceChildren(...factsOf(state.shown.name));
  document.body.dataset.ready = "yes";
}

async function poll() {
  const frame = await fetch(`frame?since=${state.changes}&wait`).then((answer) => answer.json()).catch(() => null);
  const at = new Date().toLocaleTimeString();
  if (frame) state.lost = frame.last ? { goodbye: true, at } : null;
  else state.lost ??= { goodbye: false, at };
  setTimeout(poll, state.lost ? AGAIN_MS : 0);
  if (frame) take(frame);
  else showNotice();
}

// --- what a person does ------------------------------------------------------------------------------------------

function longer(by) {
  const [from, to] = shownSpan();
  const span = Math.min(86400, Math.max(5, (to - from) * by));
  if (state.zoom) zoomTo([Math.max(0, to - span), to]);
  else { state.span = span; showRounds(); }
}

function light(name) {
  const n = state.names.indexOf(name) + 1;
  for (const chart of Object.values(charts)) if (!chart.only && chart.id !== "metric") chart.setSeries(n || null, { focus: true });
}

$("closer").onclick = () => longer(0.5);
$("wider").onclick = () => longer(2);
$("whole").onclick = () => zoomTo(null);
$("filter").oninput = showIslands;
$("problems").onchange = showMarks;
$("detail").onclose = closeCharts;
$("gantt").onclick = (event) => { const bar = barAt(event); if (bar) openVersion(bar.row); };
$("gantt").onmousemove = (event) => {
  const bar = barAt(event);
  $("gantt").style.cursor = bar ? "pointer" : "";
  if (bar) $("round").textContent = sentence(bar.row);
};
const rowOf = (event) => event.target.closest?.("tr[data-island]");
$("islands").onclick = (event) => { if (rowOf(event)) openIsland(rowOf(event).dataset.island); };
$("islands").onmouseover = (event) => light(rowOf(event)?.dataset.island);
$("islands").onmouseleave = () => light(null);
document.onkeydown = (event) => {
  const row = document.activeElement.closest?.("tr[data-island]");
  if (event.target.type === "search") {
    if (event.key === "Escape") { event.preventDefault(); event.target.blur(); }  // else the field is emptied
    return;
  }
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  else if (event.key === "+") longer(0.5);
  else if (event.key === "-") longer(2);
  else if (event.key === "Escape" && !$("detail").open) zoomTo(null);
  else if (event.key === "Enter" && document.activeElement === $("gantt")) {
    event.preventDefault();
    const newest = [...state.rounds.values()].findLast((each) => each[5] !== null);
    if (newest) openVersion(newest);
  } else if (event.key === "Enter" && row) { event.preventDefault(); openIsland(row.dataset.island); }  // else it presses "close", too
  else if (["ArrowDown", "j"].includes(event.key)) {
    event.preventDefault();
    (row ? row.nextElementSibling : $("islands").tBodies[0].rows[0])?.focus();
  } else if (["ArrowUp", "k"].includes(event.key)) { event.preventDefault(); row?.previousElementSibling?.focus(); }
};
new ResizeObserver(() => state.frame && showRounds()).observe($("rounds"));
matchMedia("(prefers-color-scheme: dark)").onchange = () => state.frame && redraw();

makeHead();
if (embedded) take(JSON.parse(embedded.textContent));
else poll();
