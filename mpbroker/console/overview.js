"use strict";
/* The overview: the machine at work. The helpers (el, ask, table...) are in console.js. */
const LOOK_MS = 2000, LATE_S = 7, HOUR_S = 3600, SHORTEST_S = 120;
const known = n => n !== null && n !== undefined;
const rate = n => !known(n) ? "-" : n > 0 && n < 10 ? n.toFixed(1) : whole(Math.round(n));
const share = n => known(n) ? (100 * n).toFixed(0) + " %" : "-";
const millis = n => !known(n) ? "-" : (n < 10 ? n.toFixed(2) : n.toFixed(0)) + " ms";
const perSecond = n => known(n) ? bytes(Math.round(n)) + "/s" : "-";
const clock = at => new Date(at * 1000).toISOString().slice(11, 23);

/* Text by key: show() sets it, and the elements stay, so that focus and scrolling do. */
class Texts {
  constructor() { this.nodes = new Map(); }
  make(key, tag = "span", attributes = {}) {
    const made = el(tag, attributes, "-");
    this.nodes.set(key, made);
    return made;
  }
  set(key, text) {
    const node = this.nodes.get(key);
    if (node.textContent !== text) node.textContent = text;
  }
}

const TILES = [
  ["Requests", "requests", n => rate(n) + "/s"],
  ["Produce, p99", "produce_p99_ms", millis],
  ["In the queue, p99", "queue_p99_ms", millis],
  ["Handlers busy", "handlers_busy", share],
  ["Received", "in_bytes", perSecond],
  ["Sent", "out_bytes", perSecond],
  ["Errors", "errors", n => rate(n) + "/s"],
  ["Connections", "connections", n => whole(n)],
  ["Wait for a handler", "queue", n => whole(n)],
  ["Parked for data", "parked", n => whole(n)],
  ["Processors busy", "processors_busy", share],
  ["Cores idle", "idle_cores", n => known(n) ? n.toFixed(1) : "-"],
];

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/* A line over the last hour, or less if less is known; what is not known is a gap. */
function drawLine(path, times, values, now) {
  const span = Math.min(HOUR_S, Math.max(SHORTEST_S, now - times[0]));
  const most = Math.max(...values.filter(known), 1e-9);
  let d = "", isDrawing = false;
  values.forEach((value, i) => {
    if (!known(value)) { isDrawing = false; return; }
    const x = 100 * (1 - (now - times[i]) / span), y = 30 - 28 * value / most;
    d += (isDrawing ? "L" : "M") + x.toFixed(2) + " " + y.toFixed(2);
    isDrawing = true;
  });
  path.setAttribute("d", d);
}

function makeTiles(texts) {
  return el("ul", {class: "tiles", "aria-label": "The last hour"}, ...TILES.map(([title, key]) => {
    const chart = svg("svg", {viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true"});
    const path = svg("path", {});
    chart.append(path);
    texts.nodes.set("line:" + key, path);
    return el("li", {}, el("span", {}, title), texts.make("tile:" + key, "strong"), chart,
      el("small", {class: "quiet"}, "most in the hour ", texts.make("most:" + key)));
  }));
}

/* A part of the machine: its processes, each with a bar of how busy it is. */
function makePart(texts, key, title) {
  const place = el("ul", {class: "processes"});
  texts.nodes.set("part:" + key, place);
  const made = el("li", {class: "part part-" + key}, el("h3", {}, title,
    texts.make("hot:" + key, "span", {class: "tag bad", hidden: true})), place, texts.make("note:" + key, "p", {class: "quiet"}));
  texts.nodes.set("box:" + key, made);
  texts.set("note:" + key, "");
  return made;
}
const makeFlow = (texts, key) => el("li", {class: "flow flow-" + key},
  texts.make("rate:" + key, "strong"), el("span", {class: "arrow", "aria-hidden": "true"}), texts.make("wait:" + key));

function makeMachine(texts) {
  return el("ol", {class: "machine", "aria-label": "The machine at work"},
    makePart(texts, "clients", "Clients"), makeFlow(texts, "accept"),
    makePart(texts, "acceptors", "Acceptors"), makeFlow(texts, "hand"),
    makePart(texts, "processors", "Processors"), makeFlow(texts, "request"), makeFlow(texts, "answer"),
    makePart(texts, "handlers", "Handlers"), makeFlow(texts, "append"), makeFlow(texts, "read"),
    makePart(texts, "log", "Log"), makeFlow(texts, "coordinate"),
    makePart(texts, "coordinator", "Coordinator"),
    makePart(texts, "others", "Also running"));
}

const BARS = 8;
function drawProcesses(place, rows, isNamed) {
  const shown = rows.length > BARS
    ? [...rows].sort((a, b) => (b.busy || b.cpu || 0) - (a.busy || a.cpu || 0)).slice(0, BARS) : rows;
  place.replaceChildren(...shown.map(row => {
    const busy = known(row.busy) ? row.busy : row.cpu;
    const bar = el("span", {class: "bar-of", "aria-hidden": "true"}), full = el("span");
    full.style.width = (100 * Math.min(1, busy || 0)).toFixed(0) + "%";
    bar.append(full);
    const isUp = row.state === "READY";
    return el("li", {}, el("span", {}, isNamed ? row.role : row.role + " " + row.id), " ",
      isUp ? share(busy) : el("span", {class: "bad"}, row.state.toLowerCase()), bar);
  }), ...(rows.length > BARS ? [el("li", {class: "quiet"}, "and " + (rows.length - BARS) + " less busy")] : []));
}

function drawMachine(texts, now) {
  const flows = now.flows, of = role => now.processes.filter(row => row.role === role);
  const flow = (key, text, wait) => { texts.set("rate:" + key, text); texts.set("wait:" + key, wait); };
  flow("accept", rate(flows.accept.rate) + "/s", "new connections");
  flow("hand", whole(flows.accept.waiting), "on their way");
  flow("request", rate(flows.request.rate) + "/s", whole(flows.request.waiting) + " of " + whole(now.queue_limit) + " wait");
  flow("answer", rate(flows.answer.rate) + "/s", whole(flows.answer.waiting) + " answers wait");
  flow("append", perSecond(flows.append.bytes), "appended");
  flow("read", perSecond(flows.read.bytes), "fetched");
  flow("coordinate", rate(flows.coordinate.rate) + "/s", whole(flows.coordinate.waiting) + " wait");
  for (const [key, role] of [["acceptors", "acceptor"], ["processors", "processor"], ["handlers", "handler"], ["coordinator", "coordinator"]])
    drawProcesses(texts.nodes.get("part:" + key), of(role), false);
  const wired = ["acceptor", "processor", "handler", "coordinator"];
  drawProcesses(texts.nodes.get("part:others"), now.processes.filter(row => !wired.includes(row.role)), true);
  texts.set("note:clients", whole(now.connections) + " connections");
  texts.set("note:acceptors", Object.entries(now.listeners || {}).map(pair => pair.join(" ")).join(", "));
  texts.set("note:handlers", whole(now.parked) + " requests are parked: they wait for data or for the disk");
  texts.set("note:log", whole(flows.append.waiting) + " records not yet on disk");
  for (const key of ["processors", "handlers"]) {
    const isHot = now.bottleneck === key;
    texts.nodes.get("box:" + key).classList.toggle("hot", isHot);
    texts.nodes.get("hot:" + key).hidden = !isHot;
    texts.set("hot:" + key, "bottleneck");
  }
}

/* A table whose rows are replaced and whose frame stays. */
function liveTable(title, columns) {
  const made = table(title, columns, []);
  made.show = rows => made.querySelector("tbody").replaceWith(table(title, columns, rows).querySelector("tbody"));
  return made;
}

async function overviewPage(mine) {
  const texts = new Texts();
  const age = texts.make("age", "p", {class: "age", role: "status"});
  const events = liveTable("Deaths and repairs", [
    ["Time, UTC", r => clock(r.at)], ["Process", r => r.role + " " + r.id], ["What happened", r => r.text, "name"],
  ]);
  const apis = liveTable("Requests of the last minute, by API", [
    ["API", r => r.api], ["A second", r => rate(r.rate), "n"], ["p50", r => millis(r.p50_ms), "n"], ["p99", r => millis(r.p99_ms), "n"],
    ["Waits, p99", r => millis(r.queue_p99_ms), "n"], ["Work, p99", r => millis(r.work_p99_ms), "n"],
    ["Parked, p99", r => millis(r.parked_p99_ms), "n"], ["Answer waits, p99", r => millis(r.answer_p99_ms), "n"],
    ["Send, p99", r => millis(r.send_p99_ms), "n"],
  ]);
  const processes = liveTable("Processes", [
    ["Process", r => r.role + " " + r.id], ["Pid", r => r.pid || "-", "n"],
    ["State", r => r.state === "READY" ? "ready" : el("span", {class: "bad"}, r.state.toLowerCase())],
    ["Busy", r => share(r.busy), "n"], ["CPU", r => share(r.cpu), "n"], ["Requests/s", r => rate(r.rate), "n"],
    ["Parked", r => whole(r.parked), "n"], ["Connections", r => whole(r.connections), "n"],
    ["Restarts", r => r.restarts ? el("span", {class: "bad"}, r.restarts) : "0", "n"], ["Last exit", r => r.last_exit || "-"],
  ]);
  const board = el("div", {class: "board", hidden: true},
    el("p", {class: "verdict"}, "Bottleneck: ", texts.make("verdict", "strong"), " ", texts.make("advice", "span", {class: "quiet"})),
    makeTiles(texts), makeMachine(texts), events, apis, processes, texts.make("about", "p", {class: "quiet"}));
  shell("Overview", age, board);
  texts.set("age", "loading");
  const past = {};
  let recent = 0, next = 0;

  async function learn(now) {
    const after = past.at && past.at.length ? Math.floor(past.at[past.at.length - 1]) : 0;
    const {columns} = await ask("history", {after});
    // "after" is a whole second, so the latest row may come a second time.
    const first = columns.at.findIndex(at => at > recent);
    for (const [name, values] of Object.entries(columns)) {
      const had = past[name] || (past[name] = []);
      had.push(...values.slice(first < 0 ? values.length : first));
      had.splice(0, Math.max(0, had.length - 720));
    }
    if (past.at.length) recent = past.at[past.at.length - 1];
    for (const [, key, show] of TILES) {
      const values = past[key], numbers = values.filter(known);
      drawLine(texts.nodes.get("line:" + key), past.at, values, now);
      texts.set("most:" + key, numbers.length ? show(Math.max(...numbers)) : "-");
      texts.set("tile:" + key, show(values.length ? values[values.length - 1] : null));
    }
  }
  function draw(now) {
    texts.set("verdict", now.verdict || "-");
    texts.set("advice", now.advice ? "Suggestion: " + now.advice : "");
    drawMachine(texts, now);
    for (const [, key, show] of TILES) if (key in now) texts.set("tile:" + key, show(now[key]));
    events.hidden = !now.events.length;
    events.show(now.events.slice(0, 20));
    apis.show(now.apis);
    processes.show(now.processes);
    texts.set("about", "mpbroker " + now.version + ", cluster " + now.cluster_id + ", since "
      + when(now.started * 1000).slice(0, 19) + " UTC, " + now.phase.toLowerCase() + ", " + "unexpected deaths: " + whole(now.deaths));
    board.hidden = false;
  }
  function tell(text) {
    texts.set("age", text);
    board.classList.toggle("stale", text !== "");
  }
  async function look() {
    const {overview, age_s} = await ask("overview");
    if (mine !== turn) return;
    if (!overview) return tell("nothing is known yet: the exporter has just started");
    if (overview.at >= next) { await learn(overview.at); next = overview.at + 5; }
    if (mine !== turn) return;
    draw(overview);
    tell(age_s > LATE_S ? "these figures are " + whole(Math.round(age_s)) + " s old" : "");
  }
  async function loop() {
    while (mine === turn) {
      await new Promise(done => setTimeout(done, LOOK_MS));
      if (mine !== turn || document.hidden) continue;
      try {
        await look();
      } catch (error) {
        if (mine !== turn) return;
        if (error.status === 401) return show();
        tell(error.message + ": these figures are not of now");
      }
    }
  }
  try {
    await look();
  } catch (error) {
    if (error.status === 403 && location.hash.length < 3) location.hash = "#/topics";
    throw error;
  }
  loop();
}
