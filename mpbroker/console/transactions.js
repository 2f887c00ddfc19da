"use strict";
/* Transactions, producers and log directories. The helpers are in console.js. */
const lasting = ms => ms < 0 ? "-" : ms < 60000 ? (ms / 1000).toFixed(1) + " s" : (ms / 60000).toFixed(1) + " min";

async function transactionsPage(mine) {
  const list = pagedList(mine, "transactions", "Transactional id contains", rows => table("Transactions, open ones first", [
    ["Transactional id", r => r.id, "name"],
    ["State", r => el("span", {class: r.is_open ? "tag" : null}, r.state)],
    ["Open for", r => r.started ? el("span", {class: Date.now() - r.started > r.timeout_ms ? "bad" : null}, lasting(Date.now() - r.started)) : null, "n"],
    ["Timeout", r => r.timeout_ms ? lasting(r.timeout_ms) : null, "n"],
    ["Producer id, epoch", r => known(r.producer_id) ? r.producer_id + ", " + r.epoch : null, "n"],
    ["Partitions", r => r.partitions && r.partitions.length ? r.partitions.join(", ") + (r.more ? " and " + whole(r.more) + " more" : "") : null, "name"],
    ["", r => r.is_open ? sureButton("Abort", r.id, () => change("transactions/end", {id: r.id}), () => list.list(0, true)) : ""],
  ], rows, true));
  const fresh = el("button", {type: "button", click: () => act(fresh, () => list.list(0, true))}, "Refresh");
  shell("Transactions", el("p", {}, "An open transaction keeps what comes after it from readers of committed records. Abort ends it, and fences its producer. "
    + "If a topic's last stable offset stands still and no transaction is open here, look at the topic's producers. ", fresh), ...list.parts);
  await list.list(0, true);
}

async function producersPage(mine, name) {
  const partition = el("input", {type: "number", min: 0, value: 0, required: true}), place = el("div");
  async function list() {
    const found = await ask("producers", {topic: name, partition: partition.value});
    if (mine !== turn) return;
    place.replaceChildren(table("Producers of the partition", [
      ["Producer id", r => String(r.producer_id), "n"], ["Epoch", r => whole(r.epoch), "n"], ["Last sequence", r => whole(r.sequence), "n"],
      ["Last record, UTC", r => when(r.at)],
      ["Transaction open since offset", r => known(r.open_since) ? el("span", {class: "tag"}, whole(r.open_since)) : null, "n"],
      ["", r => known(r.open_since) ? sureButton("Abort", "the transaction of producer " + r.producer_id + " in this partition",
        () => change("transactions/abort", {topic: name, partition: partition.value, producer_id: r.producer_id, epoch: r.epoch, coordinator_epoch: r.coordinator_epoch}), list) : ""],
    ], found.rows, true), el("p", {class: "quiet"}, whole(found.total) + " producers"));
  }
  const form = el("form", {submit: event => { event.preventDefault(); act(form, list); }}, field("Partition", partition), el("button", {class: "first"}, "Show"));
  shell(name, tabs(name, "Producers"), el("p", {class: "quiet"},
    "Abort here writes a marker into this partition alone. It is for a transaction that its coordinator no longer knows; end others on the page of transactions."), form, place);
  await list();
}

async function storagePage(mine) {
  const found = await ask("directories");
  if (mine !== turn) return;
  shell("Storage", table("Log directories", [
    ["Broker", r => whole(r.broker), "n"], ["Directory", r => r.path, "name"],
    ["State", r => r.error ? el("span", {class: "bad"}, r.error) : "usable"],
    ["Partitions", r => whole(r.partitions), "n"], ["Records", r => bytes(r.bytes), "n"],
    ["Volume", r => bytes(r.total_bytes), "n"], ["Free", r => bytes(r.usable_bytes), "n"],
  ], found.rows, true));
}
