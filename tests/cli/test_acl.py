"""`mpbroker acl`, against a broker of our own."""

import json
from collections.abc import Iterator

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.support.broker import Broker


@pytest.fixture(scope="module")
def acl_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {
        "authorizer.class.name": (
            "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        ),
        "super.users": "User:ANONYMOUS",
    }
    with Broker(tmp_path_factory.mktemp("acl") / "data", config) as broker:
        yield broker


@pytest.fixture(autouse=True)
def use_our_broker(acl_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", acl_broker.bootstrap)


@pytest.fixture
def acl(mpbroker):
    def run(*arguments):
        return mpbroker("acl", *arguments)

    yield run
    run("remove", "--all")


def listed(acl, *arguments):
    result = acl("list", *arguments, "--format", "json")
    assert (result.code, result.err) == (0, "")
    return [
        tuple(row[key] for key in ("resource", "name", "pattern", "operation"))
        for row in json.loads(result.out)
    ]


def test_entries_are_added_listed_and_removed(acl):
    added = acl("add", "--allow", "User:alice", "-o", "read", "-t", "events")
    assert (added.code, added.out) == (0, b"1 entry added\n")
    prefixed = ("-o", "write", "-o", "describe", "-t", "app-", "--prefix")
    assert acl("add", "--allow", "User:alice", *prefixed).out == b"2 entries added\n"
    again = acl("add", "--allow", "User:alice", *prefixed, "--format", "json")
    told = [(each["name"], each["operation"]) for each in json.loads(again.out)]
    assert told == [("app-", "write"), ("app-", "describe")]
    deny = ("--deny", "User:größe", "--host", "10.0.0.7", "-o", "all", "-g", "*")
    assert acl("add", *deny, "--cluster").code == 0
    assert listed(acl) == [
        ("topic", "app-", "prefixed", "write"),
        ("topic", "app-", "prefixed", "describe"),
        ("topic", "events", "literal", "read"),
        ("group", "*", "literal", "all"),
        ("cluster", "kafka-cluster", "literal", "all"),
    ]
    shown = acl("list", "-g", "any", "--match").out.decode().splitlines()
    assert shown[0].split()[:3] == ["RESOURCE", "NAME", "PATTERN"]
    assert shown[1].split() == [
        *("group", "*", "literal", "User:größe", "10.0.0.7", "all", "deny")
    ]
    removed = acl("remove", "-t", "app-x", "--match", "-o", "write")
    assert b"app-" in removed.out and b"write" in removed.out
    assert len(listed(acl)) == 4
    assert acl("remove", "--principal", "User:alice").code == 0
    assert [row[0] for row in listed(acl)] == ["group", "cluster"]


def test_what_producers_and_consumers_need_is_added_at_once(acl):
    names = ("-t", "t", "-g", "g", "--transactional-id", "x")
    acl("add", "--allow", "User:a", "--producer", "--consumer", *names)
    assert set(listed(acl)) == {
        ("topic", "t", "literal", "read"),
        ("topic", "t", "literal", "write"),
        ("topic", "t", "literal", "describe"),
        ("topic", "t", "literal", "create"),
        ("group", "g", "literal", "read"),
        ("transactional_id", "x", "literal", "write"),
        ("transactional_id", "x", "literal", "describe"),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "-o", "read", "-t", "t"], "--allow or --deny"),
        (["add", "--allow", "User:a", "-o", "read"], "--topic"),
        (["add", "--allow", "User:a", "-t", "t"], "--operation"),
        (["add", "--allow", "User:a", "-t", "t", "--consumer"], "needs a --group"),
        (["add", "--allow", "User:a", "-g", "g", "--producer"], "need a --topic"),
        (
            ["add", "--allow", "User:a", "-g", "g", "-o", "write"],
            "a group has no operation write",
        ),
        (["add", "--allow", "User:a", "-t", "t", "-o", "fly"], "fly"),
        (["list", "-t", "t", "--prefix", "--match"], "--prefix or --match"),
        (["remove"], "or give --all"),
        (["remove", "--all", "-t", "t"], "or give --all"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(acl, arguments, words):
    result = acl(*arguments)
    assert result.code == ExitCode.USAGE
    assert words in result.err


def test_the_brokers_words_are_shown_when_it_refuses(acl):
    result = acl("add", "--allow", "alice", "-o", "read", "-t", "t")
    assert result.code == ExitCode.ERROR
    assert "Could not parse principal from `alice`" in result.err


def test_nothing_to_remove_is_said(acl):
    result = acl("remove", "-t", "missing")
    assert result.code == ExitCode.NOT_FOUND
    assert "no such entry" in result.err
