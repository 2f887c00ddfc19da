"""Who gets into the console, what one sees there, and what it refuses."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from mpbroker import AdminClient
from mpbroker.console.console import FILES
from mpbroker.protocol.acl import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from tests.console.serving import (
    CONSOLE,
    PASSWORD,
    Browser,
    browser,
    secured,
    url_of,
)
from tests.exporter.asking import told, wait_until
from tests.support.broker import Broker, BrokerFailedError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("console")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as admin:
            for name in ("flights", "secrets"):
                admin.create_topic(name, partitions=3)
            flights = (ResourceType.TOPIC, "flights", PatternType.LITERAL, "User:alice")
            admin.create_acls(
                [
                    AclBinding(*flights, "*", operation, AclPermissionType.ALLOW)
                    for operation in (AclOperation.DESCRIBE, AclOperation.READ)
                ]
            )
        yield made


# Of each test: other tests end sessions.
@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


@pytest.fixture
def alice(broker):
    return browser(broker, "alice")


def names(answer):
    return [row["name"] for row in answer.json["rows"]]


def test_nothing_is_told_before_a_login(broker):
    stranger = browser(broker)
    assert stranger.get("session").json == {
        "needs_login": True,
        "user": None,
        "csrf": None,
    }
    for path in ("topics", "topic?name=flights", "configs?name=flights", "nothing"):
        assert stranger.ask("GET", f"/api/{path}").status == 401
    assert stranger.post("topics", {}).status == 401


def test_a_login_needs_the_brokers_own_password(broker):
    one = browser(broker)
    for user, password in (("admin", "wrong"), ("nobody", PASSWORD), ("admin", "")):
        assert one.log_in(user, password).status in (400, 403)
        assert not one.cookie
    answer = one.log_in("admin")
    assert answer.json["user"] == "admin"
    flags = answer.headers["set-cookie"].split("; ")[1:]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags)
    assert PASSWORD not in answer.text


def test_a_user_of_scram_is_let_in(broker):
    with AdminClient(bootstrap_servers=broker.bootstrap) as admin:
        admin.set_scram_password("scott", "SCRAM-SHA-512", "tiger")
    one = browser(broker)
    assert one.log_in("scott", "lion").status == 403
    assert one.log_in("scott", "tiger").json["user"] == "scott"


def test_acls_decide_what_a_user_sees(admin, alice):
    assert {"flights", "secrets"} <= set(names(admin.get("topics", fresh=1)))
    assert names(alice.get("topics", fresh=1)) == ["flights"]
    assert admin.get("topic", name="secrets").json["total"] == 3
    refused = alice.get("topic", name="secrets")
    assert refused.status == 403
    assert "TOPIC_AUTHORIZATION_FAILED" in refused.text
    refused = alice.get("configs", name="flights")
    assert refused.status == 403
    assert "TOPIC_AUTHORIZATION_FAILED" in refused.text


def test_figures_of_a_topic_are_those_of_the_clients(broker, admin, alice):
    from mpbroker import EARLIEST, LATEST, Producer

    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        for number in range(30):
            producer.send("flights", b"x" * 100, partition=number % 2)
    with AdminClient(bootstrap_servers=broker.bootstrap) as client:
        client.delete_records({("flights", 1): 4})
        places = [("flights", number) for number in range(3)]
        first = client.list_offsets(dict.fromkeys(places, EARLIEST))
        last = client.list_offsets(dict.fromkeys(places, LATEST))
    rows = admin.get("topic", name="flights").json["partitions"]
    assert [(row["start"], row["end"]) for row in rows] == [
        (first[place].offset, last[place].offset) for place in sorted(first)
    ]
    assert rows[0]["bytes"] > 1500 and rows[2]["bytes"] == 0
    assert [row["local_start"] for row in rows] == [row["start"] for row in rows]
    assert {row["remote_end"] for row in rows} == {None}
    # The size is the cluster's to tell, and alice may not ask the cluster.
    shown = alice.get("topic", name="flights").json["partitions"]
    assert [row["bytes"] for row in shown] == [None] * 3
    assert [row["end"] for row in shown] == [row["end"] for row in rows]


def test_configs_come_with_their_documentation(admin):
    rows = admin.get("configs", name="flights").json["rows"]
    (retention,) = (row for row in rows if row["name"] == "retention.ms")
    assert retention["value"] == "604800000" and not retention["own"]
    assert len(retention["documentation"]) > 20


def test_an_unknown_topic_is_said_to_be_unknown(admin):
    answer = admin.get("topic", name="nope")
    assert answer.status == 404 and "UNKNOWN_TOPIC_OR_PARTITION" in answer.text


def test_topics_are_paged_and_searched(broker, admin):
    with AdminClient(bootstrap_servers=broker.bootstrap) as client:
        for number in range(105):
            client.create_topic(f"z-Paged-{number:03}", partitions=1)
    page = admin.get("topics", match="paged", fresh=1).json
    assert page["total"] == 105 and len(page["rows"]) == 100
    page = admin.get("topics", match="paged", start=100).json
    assert page["rows"][0]["name"] == "z-Paged-100"


def test_a_change_needs_the_token_of_the_page(broker):
    one = browser(broker, "admin")
    assert one.post("logout", {}, X_CSRF_Token="").status == 403
    assert one.post("logout", {}, X_CSRF_Token="x" * 43).status == 403
    assert one.get("topics").status == 200
    assert one.post("logout", {}, Origin="http://evil.example").status == 403
    gone = one.post("logout", {}, Origin=f"http://{one.address}")
    assert gone.status == 200 and "Max-Age=0" in gone.headers["set-cookie"]
    assert one.get("topics").status == 401


def test_a_form_of_another_site_cannot_log_in(broker):
    one = browser(broker)
    body = b'{"user": "admin", "password": "x"}'
    assert one.ask("POST", "/api/login", body, Content_Type="text/plain").status == 415


def test_sessions_are_bounded_and_the_oldest_ends(broker):
    first = browser(broker, "alice")
    for _ in range(64):
        assert browser(broker, "alice").cookie != first.cookie
    assert first.get("topics").status == 401


def test_every_answer_forbids_what_is_not_the_consoles_own(broker):
    one = browser(broker)
    for path in ("/", "/console.js", "/console.css", "/api/session", "/api/topics"):
        answer = one.ask("GET", path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_the_console_is_small():
    from importlib.resources import files

    page = files("mpbroker.console")
    # What pyproject.toml does not name is not installed.
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = pyproject["tool"]["setuptools"]["package-data"]["mpbroker.console"]
    assert sorted(names) == sorted(name for name, _ in FILES.values())
    assert sum(len(page.joinpath(name).read_bytes()) for name in names) < 150_000
    scripts = "".join(page.joinpath(name).read_text() for name in names)
    scripts = scripts.replace("http://www.w3.org/2000/svg", "")  # a name, not asked for
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "http:"):
        assert word not in scripts


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"BREW / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"431"),
        (b"POST /api/login HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", b"413"),
        (b"POST /api/login HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /api/login HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"GET /api/topics?" + b"a&" * 99 + b" HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_of_a_browser_is_refused(broker, sent, status):
    host, port = Browser(url_of(broker)).address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(sent)
        assert sock.recv(100).split(b" ")[1] == status


def test_silent_connections_do_not_hold_up_the_others_for_ever(broker):
    one = Browser(url_of(broker))
    host, port = one.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(30)]
    try:
        assert one.get("session").status == 200
    finally:
        for sock in silent:
            sock.close()


def test_a_broker_without_sasl_needs_no_login_and_is_localhost_only(tmp_path):
    with Broker(tmp_path / "data", CONSOLE) as made:
        one = browser(made)
        assert one.get("session").json["needs_login"] is False
        assert one.get("topics").status == 401  # the page's token comes first
        assert one.log_in().json["user"] == ""
        assert one.get("topics").json["rows"] == []
        for host in ("evil.example:80", "[::1].evil.example", "localhost:80:evil"):
            assert one.ask("GET", "/api/session", Host=host).status == 421
        for host in ("LOCALHOST", "[::1]:8080"):
            assert one.ask("GET", "/api/session", Host=host).status == 200


def test_the_console_is_a_process_that_comes_back(broker):
    def pids():
        return [c["pid"] for c in told(broker)["children"] if c["role"] == "console"]

    import os
    import signal

    (before,) = pids()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pids() not in ([], [before]))
    assert browser(broker, "admin").get("topics").status == 200


def test_there_is_no_console_without_the_setting(tmp_path):
    with Broker(tmp_path / "data") as made:
        assert "console" not in told(made)
        assert "console" not in {child["role"] for child in told(made)["children"]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"console.listeners": "HTTP://0.0.0.0:0"}, "is not loopback"),
        ({"console.listeners": "HTTP://:0"}, "is not loopback"),
        ({"console.listeners": "HTTP://192.0.2.1:0"}, "is not loopback"),
        ({"console.listeners": "127.0.0.1:80"}, "is not HTTP://host:port"),
        ({"console.listeners": "HTTPS://0.0.0.0:0"}, "has no login"),
        ({"console.listeners": "HTTPS://127.0.0.1:0"}, "ssl.keystore"),
        ({"metrics.listeners": "HTTPS://127.0.0.1:0"}, "is not HTTP://host:port"),
        (
            {
                **CONSOLE,
                "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
                "sasl.enabled.mechanisms": "OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": "file:///nothing",
            },
            "no listener lets the console in",
        ),
    ],
)
def test_a_console_that_cannot_be_is_refused_at_the_start(tmp_path, settings, words):
    broker = Broker(tmp_path / "data", settings)
    with pytest.raises(BrokerFailedError, match=words):
        broker.start()
