"""The console in a real Chromium: what a user clicks, and what hostile names become."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from mpbroker import AdminClient, Consumer, Producer
from tests.console.serving import CONSOLE, PASSWORD, USERS, secured, url_of
from tests.exporter.asking import pids_of, told, wait_until
from tests.support.schema_registry import SchemaRegistry

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>owned=1</script>"
# Set to a directory to look at the pages as people see them.
SCREENSHOTS = os.environ.get("MPBROKER_SCREENSHOTS")


@pytest.fixture(scope="module")
def registry():
    found = SchemaRegistry()
    yield found
    found.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory, registry):
    settings = {**CONSOLE, "console.schema.registry.url": registry.url}
    with secured(tmp_path_factory.mktemp("browser"), settings) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights", partitions=3)
            client.create_topic("typed", partitions=1)
        with Producer(bootstrap_servers=made.bootstrap) as producer:
            for number in range(60):
                producer.send("flights", b'{"n": %d}' % number, partition=1)
            producer.send(
                "flights",
                EVIL.encode(),
                key=EVIL.encode(),
                headers=[(EVIL, EVIL.encode())],
                partition=0,
            )
            for schema_id, content in typed(registry):
                producer.send("typed", b"\0" + schema_id.to_bytes(4) + content)
        wait_until(lambda: "console" in told(made))
        yield made


def typed(registry):
    """Return schema ids and values: by an Avro schema, by JSON's, and by none."""
    schema = {"type": "object", "properties": {EVIL: {"type": "integer"}}}
    checked = {"schemaType": "JSON", "schema": json.dumps(schema)}
    return [
        (registry.register("avro", {"schema": '"string"'}), b"\x0a12345"),
        (registry.register("json", checked), json.dumps({EVIL: EVIL}).encode()),
        (4711, b"\1"),
    ]


@pytest.fixture(scope="module")
def chromium():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    arguments = ["--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(broker, chromium):
    """A page that has found no error and asked nobody but the console."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    made = context.new_page()
    errors, asked = [], []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda request: asked.append(request.url))
    made.goto(url_of(broker))
    yield made
    assert errors == []
    assert all(address.startswith(url_of(broker)) for address in asked)
    context.close()


def log_in(page, user="admin"):
    page.get_by_label("User").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    if user == "admin":
        page.get_by_role("heading", name="Overview").wait_for()
        page.get_by_role("link", name="Topics").click()
    page.get_by_role("heading", name="Topics").wait_for()
    page.get_by_role("region", name="Topics").wait_for()


def picture(page, name):
    if SCREENSHOTS:
        for width in (1280, 420):
            page.set_viewport_size({"width": width, "height": 900})
            page.screenshot(path=Path(SCREENSHOTS) / f"{name}-{width}.png")
        page.set_viewport_size({"width": 1280, "height": 900})


def is_unharmed(page):
    return page.evaluate(
        "typeof owned === 'undefined' && document.title !== 'owned'"
        " && !document.querySelector('main img, main script, #user img')"
    )


def fits(page):
    """Whether a telephone shows the page without scrolling sideways."""
    page.set_viewport_size({"width": 420, "height": 900})
    try:
        return page.evaluate("document.documentElement.scrollWidth <= 420")
    finally:
        page.set_viewport_size({"width": 1280, "height": 900})


def test_a_wrong_password_is_said_to_be_wrong(page):
    page.get_by_label("User").fill("admin")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("SASL_AUTHENTICATION_FAILED").wait_for()
    picture(page, "login")
    assert fits(page)


def test_the_overview_shows_the_machine_and_dims_what_is_old(broker, page):
    log_in(page)
    page.get_by_role("link", name="Overview").click()
    machine = page.get_by_role("list", name="The machine at work")
    machine.get_by_text("handler 0").wait_for()
    # Nothing is claimed before it is known; then the bottleneck has a name.
    page.get_by_text("Bottleneck: none").wait_for()
    os.kill(pids_of(broker, "handler")[0], signal.SIGKILL)
    page.get_by_role("cell", name="died: signal 9").first.wait_for()
    page.get_by_role("cell", name=re.compile("serves again")).first.wait_for()
    row = page.get_by_role("region", name="Requests of the last minute")
    row.get_by_role("cell", name="Metadata").wait_for()
    picture(page, "overview")
    assert fits(page)
    assert page.locator(".stale").count() == 0
    page.route("**/api/overview", lambda route: route.abort())
    page.get_by_text("these figures are not of now").wait_for()
    page.locator(".stale").wait_for()
    picture(page, "overview-stale")
    page.unroute("**/api/overview")
    page.locator(".stale").wait_for(state="detached")


def test_a_topic_is_made_looked_at_and_deleted(page):
    log_in(page)
    page.get_by_text("Create a topic").click()
    page.get_by_label("Name", exact=True).fill("by-hand")
    page.get_by_label("Partitions", exact=True).fill("2")
    page.get_by_role("button", name="Create").click()
    page.get_by_text("topic by-hand created").wait_for()
    picture(page, "topics")
    assert fits(page)
    page.get_by_role("link", name="by-hand").click()
    rows = page.get_by_role("region", name="Partitions").locator("tbody tr")
    rows.nth(1).wait_for()
    assert rows.count() == 2
    page.get_by_role("link", name="Configs").click()
    value = page.get_by_label("Value of retention.ms", exact=True)
    value.fill("60000")
    value.press("Enter")
    page.get_by_text("retention.ms is set").wait_for()
    picture(page, "configs")
    assert fits(page)
    page.get_by_role("link", name="Partitions").click()
    page.get_by_text("Delete this topic").click()
    page.get_by_label("To delete it").fill("by-hand")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="Topics").wait_for()
    page.get_by_role("link", name="flights").wait_for()
    page.get_by_role("link", name="by-hand").wait_for(state="detached")


def test_messages_are_read_searched_followed_and_produced(page):
    log_in(page)
    page.get_by_role("link", name="flights").click()
    page.get_by_role("link", name="Messages").click()
    page.get_by_text("1 shown; the partition has offsets 0 to 1").wait_for()
    page.get_by_label("Partition", exact=True).last.fill("1")
    page.get_by_role("button", name="Read").click()
    page.get_by_text("50 shown; the partition has offsets 0 to 60").wait_for()
    # Only what was chosen is asked for: the field of an offset, or that of a time.
    assert not page.get_by_label("Offset", exact=True).is_visible()
    assert not page.get_by_label("Time, UTC", exact=True).is_visible()
    picture(page, "messages")
    assert fits(page)
    page.get_by_label("Search all partitions for").fill('"n": 42')
    page.get_by_role("button", name="Search").click()
    page.get_by_text("1 found in").wait_for()
    assert '"n": 42' in page.locator("pre").first.text_content()
    # At once, as the search may still run: the tail ends it, and is not ended by it.
    page.get_by_role("button", name="Follow").click()
    page.get_by_text("following partition 1 from offset 60").wait_for()
    page.get_by_text("Produce a message").click()
    page.get_by_label("Value", exact=True).fill("come live")
    page.get_by_label("Partition", exact=True).first.fill("1")
    page.get_by_role("button", name="Produce").click()
    page.locator("pre", has_text="come live").wait_for()
    page.get_by_role("button", name="Stop").click()


def test_hostile_keys_values_and_headers_stay_text(page):
    log_in(page)
    page.get_by_role("link", name="flights").click()
    page.get_by_role("link", name="Messages").click()
    page.locator("pre", has_text="<script>").first.wait_for()
    assert page.locator("pre", has_text=EVIL).count() == 2
    assert is_unharmed(page)


def test_a_timestamp_after_the_last_date_is_shown_as_a_number(broker, page):
    forever = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    with AdminClient(bootstrap_servers=broker.bootstrap) as client:
        client.create_topic("late", partitions=1, configs=forever)
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        producer.send("late", b"from the end of time", timestamp_ms=9 * 10**15)
    log_in(page)
    page.get_by_role("link", name="late").click()
    page.get_by_role("link", name="Messages").click()
    page.locator("pre", has_text="from the end of time").wait_for()
    page.get_by_text("9000000000000000 ms").wait_for()


def test_values_of_a_schema_registry_are_shown_and_stay_text(page):
    log_in(page)
    page.get_by_role("link", name="typed").click()
    page.get_by_role("link", name="Messages").click()
    page.get_by_text("avro, schema 1, 11 B").wait_for()
    page.get_by_text("the schema registry has no schema 4711").wait_for()
    page.locator("p.note", has_text="does not fit its schema").wait_for()
    assert page.locator("pre", has_text='"12345"').count() == 1
    assert page.locator("pre", has_text="<script>").count() == 1
    picture(page, "typed")
    assert fits(page)
    assert is_unharmed(page)
    page.get_by_label("Show as").select_option("hex")
    page.get_by_role("button", name="Read").click()
    page.locator("pre", has_text="00 00 00 00 01 0a").wait_for()
    assert page.locator("p.note").count() == 0


def test_hostile_users_topics_groups_and_client_ids_stay_text(broker, page):
    with Consumer(
        bootstrap_servers=broker.bootstrap,
        group_id=EVIL,
        client_id=EVIL,
        auto_offset_reset="earliest",
    ) as consumer:
        consumer.subscribe(["flights"])
        while not consumer.poll(1000):
            pass
        log_in(page)
        page.get_by_role("link", name="Groups").click()
        page.get_by_role("link", name=EVIL).click()
        page.get_by_role("heading", name=EVIL).wait_for()
        page.get_by_role("cell", name=EVIL, exact=True).wait_for()
        assert is_unharmed(page)
        picture(page, "group")
        assert fits(page)
    page.goto(f"{url_of(broker)}#/topic/{EVIL}".replace('"', "%22"))
    page.get_by_text("INVALID_TOPIC_EXCEPTION").wait_for()
    assert is_unharmed(page)
    page.goto(f"{url_of(broker)}#/topics")
    page.get_by_role("button", name="Log out").click()
    log_in(page, USERS[2])
    assert page.locator("#user").text_content() == USERS[2]
    assert is_unharmed(page)


def test_rights_users_and_quotas_are_shown_and_changed(page):
    log_in(page)
    page.get_by_role("link", name="Access").click()
    page.get_by_text("Add or delete an ACL").click()
    page.get_by_label("User", exact=True).fill(f"User:{EVIL}")
    page.get_by_role("combobox", name="Operation").select_option("READ")
    page.get_by_label("Name", exact=True).fill("x")
    page.get_by_role("combobox", name="Name is").select_option("PREFIXED")
    page.get_by_role("button", name="Add this ACL").click()
    page.get_by_text("the ACL is added").wait_for()
    page.get_by_role("cell", name=EVIL).wait_for()
    picture(page, "acls")
    assert fits(page)
    assert is_unharmed(page)
    page.get_by_role("button", name="allow read: change").click()
    page.get_by_role("button", name="Delete this ACL").click()
    page.get_by_text("the ACL is deleted").wait_for()
    page.get_by_role("cell", name=EVIL).wait_for(state="detached")
    page.get_by_role("link", name="Users").click()
    page.get_by_text("Add a user, or set a password").click()
    page.get_by_label("User", exact=True).fill(EVIL)
    page.get_by_label("Password", exact=True).fill("a password")
    page.get_by_role("button", name="Set").click()
    page.get_by_role("cell", name=EVIL, exact=True).wait_for()
    picture(page, "users")
    assert fits(page)
    assert is_unharmed(page)
    page.get_by_role("button", name=f"Remove SCRAM-SHA-512 of {EVIL}").click()
    page.get_by_text("Remove it now").click()
    page.get_by_role("cell", name=EVIL, exact=True).wait_for(state="detached")
    page.get_by_role("link", name="Quotas").click()
    page.get_by_text("Set or remove a quota").click()
    page.get_by_label("Client id", exact=True).fill(EVIL)
    page.get_by_label("Value", exact=True).fill("1000000")
    page.get_by_role("button", name="Set this quota").click()
    page.get_by_role("cell", name=EVIL).wait_for()
    picture(page, "quotas")
    assert fits(page)
    assert is_unharmed(page)
    page.get_by_role("button", name="Remove this quota").click()
    page.get_by_text("the quota is removed").wait_for()
    page.get_by_role("cell", name=EVIL).wait_for(state="detached")


def test_an_open_transaction_is_ended_by_hand(broker, page):
    producer = Producer(bootstrap_servers=broker.bootstrap, transactional_id=EVIL)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("flights", b"v", partition=2).result(60)
    log_in(page)
    page.get_by_role("link", name="Transactions").click()
    page.get_by_role("cell", name=EVIL).first.wait_for()
    picture(page, "transactions")
    assert fits(page)
    assert is_unharmed(page)
    page.get_by_role("link", name="Topics").click()
    page.get_by_role("link", name="flights").click()
    page.get_by_role("link", name="Producers").click()
    page.get_by_label("Partition", exact=True).fill("2")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("button", name=re.compile("Abort the transaction")).wait_for()
    picture(page, "producers")
    assert fits(page)
    page.get_by_role("link", name="Transactions").click()
    page.get_by_role("button", name=f"Abort {EVIL}").click()
    page.get_by_text("Abort it now").click()
    page.get_by_text("done: abort").wait_for()
    page.get_by_text("Abort it now").wait_for(state="detached")
    producer.close(0)
    page.get_by_role("link", name="Storage").click()
    page.get_by_role("cell", name=str(broker.data_dir)).wait_for()
    picture(page, "storage")
    assert fits(page)


def test_a_user_without_rights_is_told_why(broker, page):
    log_in(page, "alice")
    page.get_by_text("0 to 0 of 0").wait_for()
    page.goto(f"{url_of(broker)}#/topic/flights/messages")
    page.get_by_text("TOPIC_AUTHORIZATION_FAILED").wait_for()


def test_no_script_of_another_place_may_run(page):
    log_in(page)
    refused = page.evaluate(
        """() => { try { document.body.innerHTML = '<b>x</b>'; return false; }
        catch (error) { return error instanceof TypeError; } }"""
    )
    assert refused
    assert page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(page, scheme):
    """4.5 to 1 for text, WCAG 2.2, 1.4.3 (AA), for each pair of colours in use."""
    page.emulate_media(color_scheme=scheme)
    log_in(page)
    picture(page, f"topics-{scheme}")
    contrasts = page.evaluate(
        """() => {
      const light = text => {
        const parts = text.match(/[0-9.]+/g).slice(0, 3).map(c => c / 255)
          .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const behind = node => {
        for (let at = node; at; at = at.parentElement) {
          const colour = getComputedStyle(at).backgroundColor;
          if (!colour.startsWith('rgba(0, 0, 0, 0')) return colour;
        }
      };
      return [...document.querySelectorAll('body *')]
        .filter(node => node.checkVisibility() && !node.disabled)
        .filter(node => node.textContent.trim())
        .map(node => {
          const a = light(getComputedStyle(node).color), b = light(behind(node));
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });
    }"""
    )
    assert len(contrasts) > 20 and min(contrasts) >= 4.5


def test_every_control_has_a_name(page):
    log_in(page)
    page.get_by_role("link", name="flights").click()
    page.get_by_role("link", name="Messages").click()
    page.locator("pre").first.wait_for()
    assert (
        page.evaluate(
            """[...document.querySelectorAll('input, select, textarea, button')]
        .filter(each => !(each.labels && each.labels.length)
          && !each.getAttribute('aria-label') && !each.textContent.trim())
        .map(each => each.outerHTML)"""
        )
        == []
    )


PAGES = {
    "overview": "The machine at work",
    "topics": "Create a topic",
    "topic/flights": "Delete this topic",
    "topic/flights/messages": "Produce a message",
    "topic/typed/messages": "has no schema 4711",
    "topic/flights/configs": "retention.ms",
    "groups": "Id contains",
    "transactions": "Transactional id contains",
    "topic/flights/producers": "Producers of the partition",
    "storage": "usable",
    "acls": "Add or delete an ACL",
    "users": "Add a user",
    "quotas": "Set or remove a quota",
}


@pytest.mark.parametrize(
    ("scheme", "names"),
    [("light", list(PAGES)), ("dark", ["overview", "topic/flights"])],
)
def test_axe_finds_no_fault_on_any_page(broker, page, scheme, names):
    """WCAG 2.2 A and AA, by axe's rules; folded parts are opened."""
    page.emulate_media(color_scheme=scheme)
    rules = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]}

    def faults(name):
        found = axe.Axe().run(page, options={"runOnly": rules}).response
        assert len(found["passes"]) > 5, "nothing was looked at"
        return [
            (name, each["id"], node["html"])
            for each in found["violations"]
            for node in each["nodes"]
        ]

    found = faults("login")
    log_in(page)
    for name in names:
        text = PAGES[name]
        page.goto(f"{url_of(broker)}#/{name}")
        if name == "overview":
            page.get_by_role("list", name=text).wait_for()
        else:
            page.get_by_text(text).first.wait_for()
        page.evaluate(
            "document.querySelectorAll('details').forEach(d => d.open = true)"
        )
        found += faults(name)
    assert found == []
