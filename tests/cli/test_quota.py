"""`mpbroker quota`: what is set is listed, and mistakes say what to do."""

import json

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.support.broker import Broker


@pytest.fixture(autouse=True)
def use_our_broker(own_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", own_broker.bootstrap)


def test_quotas_are_set_listed_and_taken_away(mpbroker, topic_name):
    name = ("-u", topic_name, "-c", "<default>")
    done = mpbroker("quota", "set", *name, "producer_byte_rate=1048576")
    assert (done.code, done.err) == (0, "")
    who = f"user {topic_name}, client-id <default>"
    assert done.out.decode() == f"{who}: producer_byte_rate = 1048576\n"
    address = ("--ip", "127.0.0.1", "connection_creation_rate=100000")
    told = mpbroker("quota", "set", *address, "--format", "json")
    assert json.loads(told.out) == {
        "entity": {"ip": "127.0.0.1"},
        "values": {"connection_creation_rate": 100000},
    }
    listed = mpbroker("quota", "list", "-u", topic_name)
    heading, line = listed.out.decode().splitlines()
    assert heading.split() == ["USER", "CLIENT-ID", "IP", "QUOTA", "VALUE"]
    assert line.split() == [
        topic_name,
        "<default>",
        "-",
        "producer_byte_rate",
        "1048576",
    ]
    everything = json.loads(mpbroker("quota", "list", "--format", "json").out)
    assert {
        "entity": {"ip": "127.0.0.1"},
        "values": {"connection_creation_rate": 100000.0},
    } in everything
    done = mpbroker("quota", "set", *name, "producer_byte_rate=")
    assert done.out.decode() == f"{who}: producer_byte_rate removed\n"
    mpbroker("quota", "set", "--ip", "127.0.0.1", "connection_creation_rate=")
    assert json.loads(mpbroker("quota", "list", *name, "--format", "json").out) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["producer_byte_rate=1"], 2, "no entity is named"),
        (["-c", "a", "producer_byte_rate"], 2, "is neither KEY=NUMBER"),
        (["-c", "a", "producer_byte_rate=much"], 2, "is neither KEY=NUMBER"),
        (["-c", "a", "producer_byte_rate=-1"], 1, "must be greater than 0"),
        (["-c", "a", "bogus=1"], 1, "this entity may have consumer_byte_rate"),
        (["-c", "a", "--ip", "::1", "bogus=1"], 1, "IP entity should not be used"),
    ],
)
def test_mistakes_are_named(mpbroker, arguments, code, said):
    result = mpbroker("quota", "set", *arguments)
    assert result.code == ExitCode(code)
    assert said in result.err
