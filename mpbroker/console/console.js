"use strict";
/* Names, keys and values belong to other people: they only ever become text nodes. */
const by = id => document.getElementById(id);
const whole = n => n === null || n === undefined ? "-" : n.toLocaleString("en");
const bytes = n => {
  if (n === null || n === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit++; }
  return (unit ? n.toFixed(1) : n) + " " + units[unit];
};
// A Date ends with the year 275760; a record's timestamp is any number of 64 bits.
const when = ms => ms < 0 ? "-" : ms > 8.64e15 ? ms + " ms" : new Date(ms).toISOString().replace("T", " ").replace("Z", "");
let csrf = null, turn = 0;

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}
function say(text, isBad) {
  by("state").textContent = text;
  by("state").className = isBad ? "bad" : "";
}
async function ask(path, fields, body) {
  const query = new URLSearchParams(fields || {}).toString();
  const options = {headers: {}};
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
    if (csrf) options.headers["X-CSRF-Token"] = csrf;
  }
  let answer;
  try {
    answer = await fetch("api/" + path + (query ? "?" + query : ""), options);
  } catch (error) {
    throw new Error("the console does not answer");
  }
  if (!answer.ok) {
    const error = new Error((await answer.text()).trim());
    error.status = answer.status;
    throw error;
  }
  return answer.json();
}
const change = (path, body) => ask(path, null, body || {});

/* Run what a click or a form asks for, and tell how it ended. */
async function act(control, work, done) {
  const button = control && control.querySelector ? control.querySelector("button.first") || control : control;
  if (button) button.disabled = true;
  say("");
  try {
    const found = await work();
    if (done) say(typeof done === "function" ? done(found) : done);
  } catch (error) {
    say(error.message, true);
    if (error.status === 401) show();
  } finally {
    if (button) button.disabled = false;
  }
}
function table(title, columns, rows, isCards) {
  const body = rows.map(row => el("tr", {}, ...columns.map(([head, cell, kind]) => {
    const value = cell(row);
    return el("td", {class: kind, "data-title": head}, value === null || value === undefined ? "-" : value);
  })));
  return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": title},
    el("table", {class: isCards ? "cards" : null}, el("caption", {}, title),
      el("thead", {}, el("tr", {}, ...columns.map(c => el("th", {class: c[2], scope: "col"}, c[0])))),
      el("tbody", {}, ...body)));
}
function pager(page, size, go) {
  const last = Math.min(page.start + size, page.total);
  return el("div", {class: "bar"},
    el("button", {type: "button", disabled: page.start === 0, click: () => go(Math.max(0, page.start - size))}, "Previous"),
    el("span", {class: "pages"}, (page.total ? page.start + 1 : 0) + " to " + last + " of " + whole(page.total)),
    el("button", {type: "button", disabled: last >= page.total, click: () => go(page.start + size)}, "Next"));
}
/* A searched and paged list; show() makes the table of a page's rows. */
function pagedList(mine, path, label, show) {
  const match = el("input", {type: "search", input: () => act(null, () => list(0))}), place = el("div");
  async function list(start, fresh) {
    const page = await ask(path, {match: match.value, start, ...(fresh ? {fresh: 1} : {})});
    if (mine === turn && page.start === start)
      place.replaceChildren(show(page.rows), pager(page, 100, at => act(null, () => list(at))));
  }
  const form = el("form", {submit: event => event.preventDefault()}, field(label, match, true));
  return {list, parts: [form, place]};
}
/* A button that asks once more before it changes what "of" names. */
function sureButton(title, of, make, after) {
  let isSure = false;
  const button = el("button", {type: "button", class: "danger", "aria-label": title + " " + of, click: () => {
    if (!isSure) {
      isSure = true;
      button.textContent = title + " it now";
      return button.setAttribute("aria-label", title + " it now: " + of);
    }
    act(button, async () => { await make(); await after(); }, "done: " + title.toLowerCase() + " " + of);
  }}, title);
  return button;
}
const field = (title, control, isWide) => el("label", {class: isWide ? "wide" : null}, title, control);
const link = (text, ...path) => el("a", {href: "#/" + path.map(encodeURIComponent).join("/")}, text);
const shell = (title, ...children) => {
  by("main").replaceChildren(el("h1", {}, title), ...children);
  document.title = title + " - mpbroker console";
};

// -- pages ------------------------------------------------------------------------------

function loginPage(needsLogin) {
  by("nav").hidden = by("logout").hidden = true;
  by("user").textContent = "";
  const user = el("input", {name: "user", autocomplete: "username", required: needsLogin});
  const password = el("input", {name: "password", type: "password", autocomplete: "current-password", required: needsLogin});
  const form = el("form", {class: "login", submit: event => {
    event.preventDefault();
    act(form, async () => {
      await change("login", {user: user.value, password: password.value});
      await show();
    });
  }}, ...(needsLogin ? [field("User", user), field("Password", password)]
    : [el("p", {}, "This broker has no listener with SASL: you will be User:ANONYMOUS.")]),
  el("button", {class: "first"}, needsLogin ? "Log in" : "Enter"));
  shell("Log in", form);
  if (needsLogin) user.focus();
}

async function topicsPage(mine) {
  const match = el("input", {type: "search", id: "match", input: () => act(null, () => list(0))});
  const place = el("div");
  async function list(start, fresh) {
    const page = await ask("topics", {match: match.value, start, ...(fresh ? {fresh: 1} : {})});
    if (mine !== turn || page.start !== start) return;
    place.replaceChildren(table("Topics", [
      ["Topic", r => link(r.name, "topic", r.name), "name"],
      ["Partitions", r => whole(r.partitions), "n"],
      ["", r => r.internal ? el("span", {class: "tag"}, "internal") : ""],
    ], page.rows), pager(page, 100, at => act(null, () => list(at))));
  }
  const name = el("input", {required: true, maxlength: 249});
  const partitions = el("input", {type: "number", min: 1, value: 1, required: true});
  const configs = el("textarea", {placeholder: "retention.ms=3600000"});
  const create = el("form", {submit: event => {
    event.preventDefault();
    act(create, async () => {
      const pairs = configs.value.split("\n").filter(line => line.trim())
        .map(line => [line.split("=")[0].trim(), line.slice(line.indexOf("=") + 1).trim()]);
      await change("topics/create", {name: name.value, partitions: +partitions.value, configs: Object.fromEntries(pairs)});
      await list(0, true);
    }, "topic " + name.value + " created");
  }}, field("Name", name, true), field("Partitions", partitions), field("Configs, a line each", configs, true),
  el("button", {class: "first"}, "Create"));
  shell("Topics", el("details", {}, el("summary", {}, "Create a topic"), create), el("form", {submit: event => event.preventDefault()}, field("Name contains", match, true)), place);
  await list(0, true);
}

function tabs(name, current) {
  return el("nav", {"aria-label": "Topic"}, ...[["Partitions", []], ["Messages", ["messages"]], ["Producers", ["producers"]], ["Configs", ["configs"]]]
    .map(([title, rest]) => {
      const made = link(title, "topic", name, ...rest);
      if (title === current) made.setAttribute("aria-current", "page");
      return made;
    }));
}
async function topicPage(mine, name) {
  const place = el("div");
  async function list(start) {
    const page = await ask("topic", {name, start});
    if (mine !== turn) return;
    place.replaceChildren(table("Partitions", [
      ["Partition", r => whole(r.partition), "n"],
      ["First offset", r => whole(r.start), "n"],
      ["End offset", r => whole(r.end), "n"],
      ["Records", r => r.end === null || r.start === null ? "-" : whole(r.end - r.start), "n"],
      ["Size", r => bytes(r.bytes), "n"],
      ...(page.partitions.some(r => r.remote_end !== null) ? [
        ["In store below", r => r.remote_end === null ? "-" : whole(r.remote_end), "n"],
        ["On disk from", r => whole(r.local_start), "n"],
      ] : []),
      ["Leader", r => r.leader === null ? el("span", {class: "bad"}, "none") : r.leader, "n"],
      ["In sync", r => r.in_sync.join(", ")],
    ], page.partitions), pager(page, 100, at => act(null, () => list(at))));
  }
  const typed = el("input", {required: true, autocomplete: "off"});
  const remove = el("form", {submit: event => {
    event.preventDefault();
    if (typed.value !== name) return say("the name that you typed is not the topic's", true);
    act(remove, async () => {
      await change("topics/delete", {name});
      location.hash = "#/topics";
    });
  }}, field("To delete it and all its records, type its name", typed, true), el("button", {class: "first danger"}, "Delete"));
  shell(name, tabs(name, "Partitions"), place, el("details", {}, el("summary", {}, "Delete this topic"), remove));
  await list(0);
}
async function configsPage(mine, name) {
  const found = await ask("configs", {name});
  if (mine !== turn) return;
  const set = (form, key, value) => act(form, async () => {
    await change("configs/set", {topic: name, key, value});
    await configsPage(mine, name);
  }, key + (value === null ? " is inherited again" : " is set"));
  function editor(row) {
    const value = el("input", {value: row.value === null ? "" : row.value, "aria-label": "Value of " + row.name});
    const form = el("form", {submit: event => {
      event.preventDefault();
      set(form, row.name, value.value);
    }}, value, el("button", {class: "first"}, "Set"),
    row.own ? el("button", {type: "button", click: () => set(form, row.name, null)}, "Inherit") : null);
    return form;
  }
  shell(name, tabs(name, "Configs"), table("Configs", [
    ["Config", r => el("div", {}, el("strong", {}, r.name), el("div", {class: "quiet"}, r.documentation || "")), "name"],
    ["Value", r => r.read_only ? r.value : editor(r), "name"],
    ["Set in", r => r.own ? el("span", {class: "tag"}, r.source) : r.source],
  ], found.rows, true));
}

function cell(shown) {
  if (shown.format === "null") return el("span", {class: "quiet"}, "null");
  return el("div", {}, el("pre", {tabindex: 0}, shown.text), el("span", {class: "quiet"},
    shown.format + (shown.schema ? ", schema " + shown.schema : "") + ", " + bytes(shown.bytes)
    + (shown.is_cut ? ", the beginning" : "")), shown.note ? el("p", {class: "bad note"}, shown.note) : null);
}
function messageTable(rows) {
  return table("Messages", [
    ["Partition", r => whole(r.partition), "n"],
    ["Offset", r => whole(r.offset), "n"],
    ["Time, UTC", r => when(r.timestamp) + (r.log_append_time ? " (broker's)" : "")],
    ["Key", r => r.control ? "" : cell(r.key), "name"],
    ["Value", r => r.control ? el("span", {class: "tag"}, r.control) : cell(r.value), "name"],
    ["Headers", r => r.control ? "" : el("div", {}, ...r.headers.map(([name, value]) =>
      el("div", {}, el("strong", {}, name), ": ", value.format === "null" ? "null" : value.text)),
    r.more_headers ? "and " + whole(r.more_headers) + " more" : ""), "name"],
    ["Transaction", r => r.transaction
      ? el("span", {class: r.transaction === "committed" ? "tag" : "tag bad"}, r.transaction + ", producer " + r.producer_id)
      : r.control ? "producer " + r.producer_id : ""],
  ], rows, true);
}
async function messagesPage(mine, name) {
  const total = (await ask("topic", {name})).total;
  if (mine !== turn) return;
  const kept = 500;
  let rows = [], at = 0;
  let job = 0; // the number of the latest search or tail: earlier ones end
  const choice = options => el("select", {}, ...options.map(([value, title]) => el("option", {value}, title)));
  const partition = el("input", {type: "number", min: 0, max: total - 1, value: 0, required: true});
  const from = choice([["end", "the last 50"], ["offset", "an offset"], ["time", "a time, UTC"]]);
  const offset = el("input", {type: "number", min: 0, value: 0});
  const time = el("input", {type: "datetime-local", step: 1});
  const format = choice([["auto", "as it looks"], ["json", "JSON"], ["text", "text"], ["msgpack", "MessagePack"], ["registry", "schema registry"], ["hex", "hex"]]);
  const offsetField = field("Offset", offset), timeField = field("Time, UTC", time);
  const choose = () => { offsetField.hidden = from.value !== "offset"; timeField.hidden = from.value !== "time"; };
  from.addEventListener("change", choose);
  const needle = el("input", {type: "search", required: true});
  const place_ = choice([["any", "key or value"], ["value", "value"], ["key", "key, whole"]]);
  const meter = el("progress", {max: 1, value: 0, "aria-label": "Progress of the search", hidden: true});
  const stop = el("button", {type: "button", class: "danger", disabled: true, click: () => { job++; stop.disabled = true; }}, "Stop");
  const place = el("div");
  const draw = () => place.replaceChildren(messageTable(rows));
  const known = page => page.rows.map(row => ({...row, partition: page.partition}));
  async function load(fields) {
    const page = await ask("messages", {topic: name, partition: partition.value, format: format.value, ...fields});
    if (mine !== turn) return;
    rows = known(page);
    at = page.next;
    draw();
    say(whole(rows.length) + " shown; the partition has offsets " + whole(page.start) + " to " + whole(page.end));
  }
  const read = el("form", {submit: event => {
    event.preventDefault();
    job++;
    stop.disabled = true;
    act(read, () => load(from.value === "offset" ? {offset: offset.value}
      : from.value === "time" ? {time: Date.parse(time.value + "Z")} : {}));
  }}, field("Partition", partition), field("From", from), offsetField, timeField, field("Show as", format),
  el("button", {class: "first"}, "Read"),
  el("button", {type: "button", click: () => act(null, () => load({offset: at}))}, "Next"),
  el("button", {type: "button", click: event => tail(event.target)}, "Follow"));
  async function run(button, step) {
    const own = ++job, isOn = () => own === job && mine === turn;
    stop.disabled = false;
    await act(button, async () => { while (isOn() && await step(isOn)); });
    if (own === job) stop.disabled = true;
  }
  function tail(button) {
    rows = [];
    let next = null;
    run(button, async isOn => {
      const page = await ask("messages", {topic: name, partition: partition.value, format: format.value, count: 200,
        ...(next === null ? {count: 1} : {offset: next})});
      if (!isOn()) return false;
      const come = known(page);
      next = page.next;
      if (come.length) {
        rows = come.reverse().concat(rows).slice(0, kept);
        draw();
      }
      say("following partition " + partition.value + " from offset " + whole(next));
      if (next >= page.end) await new Promise(done => setTimeout(done, 1000));
      return true;
    });
  }
  const search = el("form", {submit: event => {
    event.preventDefault();
    rows = [];
    draw();
    meter.hidden = false;
    const parts = place_.value === "key" ? [-1] : [...Array(total).keys()];
    let index = 0, next = 0, scanned = 0;
    run(search, async isOn => {
      const page = await ask("search", {topic: name, partition: parts[index], offset: next,
        text: needle.value, in: place_.value, format: format.value});
      if (!isOn()) return false;
      scanned += page.scanned_bytes;
      next = page.next;
      if (page.rows.length) {
        rows = rows.concat(known(page)).slice(0, kept);
        draw();
      }
      meter.value = (index + (page.end ? Math.min(1, next / page.end) : 1)) / parts.length;
      say(whole(rows.length) + " found in " + bytes(scanned) + " so far");
      if (next >= page.end) { index++; next = 0; }
      const more = index < parts.length && rows.length < kept;
      if (!more) say(whole(rows.length) + " found in " + bytes(scanned) + (rows.length >= kept ? "; there may be more" : ""));
      return more;
    });
  }}, field("Search all partitions for", needle, true), field("In", place_), el("button", {class: "first"}, "Search"), stop, meter);
  const key = el("input"), value = el("textarea"), headers = el("textarea", {placeholder: "name=value"});
  const into = el("input", {type: "number", min: 0, max: total - 1, placeholder: "by key"});
  const encoding = choice([["text", "text"], ["hex", "hex"]]);
  const isNull = el("input", {type: "checkbox"});
  const send = el("form", {submit: event => {
    event.preventDefault();
    const pairs = headers.value.split("\n").filter(line => line.trim())
      .map(line => [line.split("=")[0], line.slice(line.indexOf("=") + 1)]);
    act(send, () => change("produce", {topic: name, partition: into.value === "" ? null : +into.value,
      key: key.value === "" ? null : key.value, value: isNull.checked ? null : value.value,
      headers: Object.fromEntries(pairs), encoding: encoding.value}),
    found => "written to partition " + found.partition + " at offset " + whole(found.offset));
  }}, field("Key (empty: null)", key, true), field("Partition", into), field("Key and value as", encoding), field("Value is null", isNull),
  field("Value", value, true), field("Headers, a line each", headers, true), el("button", {class: "first"}, "Produce"));
  shell(name, tabs(name, "Messages"), el("details", {}, el("summary", {}, "Produce a message"), send), read, search, place);
  choose();
  await load({});
}

async function groupsPage(mine) {
  const match = el("input", {type: "search", id: "match", input: () => act(null, () => list(0))});
  const place = el("div");
  async function list(start, fresh) {
    const page = await ask("groups", {match: match.value, start, ...(fresh ? {fresh: 1} : {})});
    if (mine !== turn) return;
    place.replaceChildren(table("Groups", [
      ["Group", r => link(r.id, "group", r.id), "name"], ["State", r => r.state], ["Type", r => r.type],
      ["Protocol", r => r.protocol],
    ], page.rows), pager(page, 100, at => act(null, () => list(at))));
  }
  shell("Groups", el("form", {submit: event => event.preventDefault()}, field("Id contains", match, true)), place);
  await list(0, true);
}
async function groupPage(mine, id) {
  const group = await ask("group", {id});
  if (mine !== turn) return;
  const topics = [...new Set(group.offsets.map(row => row.topic))];
  const lags = group.offsets.map(row => row.lag).filter(lag => lag !== null);
  const topic = el("input", {required: true, value: topics[0] || ""});
  const to = el("select", {}, ...[["earliest", "the first record"], ["latest", "the end"], ["time", "a time, UTC"]]
    .map(([value, title]) => el("option", {value}, title)));
  const time = el("input", {type: "datetime-local", step: 1}), place = el("div");
  const timeField = field("Time, UTC", time);
  timeField.hidden = true;
  to.addEventListener("change", () => { timeField.hidden = to.value !== "time"; });
  const plan = el("form", {submit: event => {
    event.preventDefault();
    act(plan, async () => {
      const found = await change("groups/plan", {group: id, topic: topic.value,
        to: to.value === "time" ? Date.parse(time.value + "Z") : to.value});
      const offsets = Object.fromEntries(found.rows.map(row => [row.partition, row.after]));
      const apply = el("button", {type: "button", class: "first danger", click: () => act(apply, async () => {
        await change("groups/reset", {group: id, topic: found.topic, offsets});
        await groupPage(mine, id);
      }, "offsets are reset")}, "Reset to these offsets");
      place.replaceChildren(table("Nothing is changed yet", [["Partition", r => whole(r.partition), "n"],
        ["Now", r => whole(r.before), "n"], ["After the reset", r => whole(r.after), "n"]], found.rows), apply);
    });
  }}, field("Topic", topic, true), field("To", to), timeField, el("button", {class: "first"}, "Try"));
  const remove = el("button", {type: "button", class: "danger", click: () => act(remove, async () => {
    await change("groups/delete", {group: id});
    location.hash = "#/groups";
  })}, "Delete this group and its offsets");
  shell(id, el("p", {}, group.type + " group, " + group.state + ", lag " + (lags.length ? whole(lags.reduce((a, b) => a + b, 0)) : "-") + " ",
    el("button", {type: "button", click: () => act(null, () => groupPage(mine, id))}, "Refresh")),
  table("Offsets", [
    ["Topic", r => link(r.topic, "topic", r.topic), "name"], ["Partition", r => whole(r.partition), "n"],
    [group.type.toLowerCase() === "share" ? "First not finished" : "Committed", r => whole(r.committed), "n"], ["End", r => whole(r.end), "n"], ["Lag", r => whole(r.lag), "n"],
    ["Member", r => r.member, "name"],
  ], group.offsets, true),
  table("Members", [
    ["Member", r => r.id, "name"], ["Instance", r => r.instance], ["Client id", r => r.client_id, "name"],
    ["Host", r => r.host], ["Partitions", r => r.partitions.join(", "), "name"],
  ], group.members, true),
  el("details", {}, el("summary", {}, "Reset offsets"), el("p", {class: "quiet"}, "The group must have no members."), plan, place),
  el("details", {}, el("summary", {}, "Delete this group"), el("div", {class: "bar"}, remove)));
}

const pages = {
  overview: overviewPage,
  transactions: transactionsPage,
  storage: storagePage,
  acls: aclsPage,
  users: usersPage,
  quotas: quotasPage,
  groups: groupsPage,
  group: groupPage,
  topics: topicsPage,
  topic: (mine, name, what) => ({configs: configsPage, messages: messagesPage, producers: producersPage}[what] || topicPage)(mine, name),
};
const menu = [["Overview", "overview"], ["Topics", "topics"], ["Groups", "groups"], ["Transactions", "transactions"], ["Storage", "storage"], ["Access", "acls"]];

async function show() {
  const mine = ++turn;
  try {
    const session = await ask("session");
    if (mine !== turn) return;
    csrf = session.csrf;
    if (session.user === null) return loginPage(session.needs_login);
    const path = location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
    const page = Object.hasOwn(pages, path[0]) ? path[0] : menu[0][1];
    by("user").textContent = session.user || "User:ANONYMOUS";
    by("logout").hidden = by("nav").hidden = false;
    by("nav").replaceChildren(...menu.map(([title, to]) => {
      const made = link(title, to);
      if (page === to || page + "s" === to || (to === "acls" && ["users", "quotas"].includes(page))) made.setAttribute("aria-current", "page");
      return made;
    }));
    await pages[page](mine, ...path.slice(1));
    if (mine === turn) by("main").focus();
  } catch (error) {
    if (mine !== turn) return;
    say(error.message, true);
    if (error.status === 401) loginPage(true);
  }
}
by("logout").addEventListener("click", () => act(by("logout"), async () => {
  await change("logout");
  await show();
}));
addEventListener("hashchange", () => { say(""); show(); });
show();
