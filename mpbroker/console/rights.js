"use strict";
/* Who may what: ACLs, users of SCRAM, quotas. The helpers are in console.js. */
const OPERATIONS = ["ALL", "READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "DESCRIBE_CONFIGS",
  "ALTER_CONFIGS", "IDEMPOTENT_WRITE", "CREATE_TOKENS", "DESCRIBE_TOKENS", "TWO_PHASE_COMMIT"];
const RESOURCES = ["TOPIC", "GROUP", "CLUSTER", "TRANSACTIONAL_ID", "DELEGATION_TOKEN", "USER"];
const QUOTAS = [["producer_byte_rate", "bytes/s produced"], ["consumer_byte_rate", "bytes/s fetched"],
  ["request_percentage", "% of a process"], ["controller_mutation_rate", "changes/s"], ["connection_creation_rate", "connections/s"]];
const inWords = name => name.toLowerCase().replaceAll("_", " ");
const pick = values => el("select", {}, ...values.map(value => el("option", {value}, inWords(value))));

function rightsTabs(current) {
  return el("nav", {"aria-label": "Access"}, ...[["ACLs", "acls"], ["Users", "users"], ["Quotas", "quotas"]].map(([title, to]) => {
    const made = link(title, to);
    if (title === current) made.setAttribute("aria-current", "page");
    return made;
  }));
}
function changeForm(title, parts, submit) {
  const form = el("form", {submit: event => { event.preventDefault(); submit(form); }}, ...parts);
  return el("details", {}, el("summary", {}, title), form);
}

async function aclsPage(mine) {
  const principal = el("input", {required: true, placeholder: "User:alice"}), name = el("input", {required: true, value: "*"});
  const type = pick(RESOURCES), pattern = pick(["LITERAL", "PREFIXED"]), host = el("input", {required: true, value: "*"});
  const operation = pick(OPERATIONS), permission = pick(["ALLOW", "DENY"]);
  const given = () => ({principal: principal.value, type: type.value, name: name.value, pattern: pattern.value,
    host: host.value, operation: operation.value, permission: permission.value});
  // A cluster has one name.
  type.addEventListener("change", () => { if (type.value === "CLUSTER") name.value = "kafka-cluster"; });
  const run = (control, path, done) => act(control, async () => {
    await change(path, given());
    await acls.list(0, true);
  }, done);
  const remove = el("button", {type: "button", class: "danger", click: () => { if (form.reportValidity()) run(remove, "acls/delete", "the ACL is deleted"); }}, "Delete this ACL");
  const details = changeForm("Add or delete an ACL", [field("User", principal, true), field("May", permission), field("Operation", operation),
    field("Resource", type), field("Name", name, true), field("Name is", pattern), field("From host", host),
    el("button", {class: "first"}, "Add this ACL"), remove], control => run(control, "acls/create", "the ACL is added"));
  const form = details.querySelector("form");
  function choose(row, each, kind) {
    for (const [control, value] of [[principal, row.principal], [type, row.type], [name, row.name], [pattern, row.pattern],
      [host, row.host], [operation, each], [permission, kind]]) control.value = value;
    details.open = true;
    remove.focus();
  }
  const acls = pagedList(mine, "acls", "User or name contains", rows => {
    const used = OPERATIONS.filter(each => rows.some(row => row.operations[each]));
    return table("Who may what", [
      ["User", r => r.principal + (r.host === "*" ? "" : " from " + r.host), "name"],
      ["Resource", r => inWords(r.type) + " " + r.name + (r.pattern === "PREFIXED" ? "…" : ""), "name"],
      ...used.map(each => [inWords(each), r => !r.operations[each] ? "" : el("span", {}, ...r.operations[each].map(kind =>
        el("button", {type: "button", class: kind === "DENY" ? "mark danger" : "mark", click: () => choose(r, each, kind),
          "aria-label": inWords(kind) + " " + inWords(each) + ": change"}, inWords(kind)))) ]),
    ], rows, true);
  });
  shell("Access", rightsTabs("ACLs"), details, ...acls.parts);
  await acls.list(0, true);
}

async function usersPage(mine) {
  const user = el("input", {required: true, autocomplete: "off"}), mechanism = el("select", {},
    ...["SCRAM-SHA-512", "SCRAM-SHA-256"].map(value => el("option", {value}, value)));
  const password = el("input", {type: "password", required: true, autocomplete: "new-password"});
  const details = changeForm("Add a user, or set a password", [field("User", user, true), field("Mechanism", mechanism), field("Password", password, true),
    el("button", {class: "first"}, "Set")], form => act(form, async () => {
    await change("users/set", {user: user.value, mechanism: mechanism.value, password: password.value});
    password.value = "";
    await users.list(0, true);
  }, "the password of " + user.value + " is set"));
  const users = pagedList(mine, "users", "User contains", rows => table("Users with SCRAM", [
    ["User", r => r.name, "name"],
    ["Mechanisms", r => el("span", {class: "bar"}, ...Object.entries(r.mechanisms).map(([each, iterations]) =>
      el("span", {}, each + ", " + whole(iterations) + " iterations ", sureButton("Remove", each + " of " + r.name, () => change("users/delete", {user: r.name, mechanism: each}), () => users.list(0, true)))))],
  ], rows, true));
  shell("Access", rightsTabs("Users"), details, ...users.parts);
  await users.list(0, true);
}

async function quotasPage(mine) {
  const parts = [["user", "User"], ["client-id", "Client id"], ["ip", "Address"]].map(([kind, title]) => [kind, title, el("input", {})]);
  const key = el("select", {}, ...QUOTAS.map(([value, title]) => el("option", {value}, inWords(value) + ", " + title)));
  const value = el("input", {type: "number", min: 0, step: "any", required: true});
  const set = (control, chosen) => act(control, async () => {
    const entity = Object.fromEntries(parts.map(([kind, , input]) => [kind, input.value]));
    await change("quotas/set", {...entity, key: key.value, value: chosen});
    await quotas.list(0, true);
  }, chosen === null ? "the quota is removed" : "the quota is set");
  const remove = el("button", {type: "button", class: "danger", click: () => set(remove, null)}, "Remove this quota");
  const details = changeForm("Set or remove a quota", [...parts.map(([, title, input]) => field(title, input, true)), field("Quota", key), field("Value", value),
    el("button", {class: "first"}, "Set this quota"), remove], form => set(form, value.value));
  const choose = (row, name) => {
    for (const [kind, , input] of parts) input.value = row.entity[kind] || "";
    key.value = name;
    value.value = row.quotas[name];
    details.open = true;
    value.focus();
  };
  const quotas = pagedList(mine, "quotas", "Name contains", rows => table("Quotas", [
    ["Of", r => r.shown, "name"],
    ...QUOTAS.map(([name, title]) => [title, r => name in r.quotas
      ? el("button", {type: "button", class: "mark", click: () => choose(r, name), "aria-label": whole(r.quotas[name]) + " " + title + ": change"}, whole(r.quotas[name])) : null, "n"]),
  ], rows, true));
  shell("Access", rightsTabs("Quotas"), details, el("p", {class: "quiet"}, "A name may be <default>: it stands for all that have no quota of their own."), ...quotas.parts);
  await quotas.list(0, true);
}
