"""`mpbroker config get|set|unset`: what a running broker goes by, and who said so."""

import json

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.support.broker import Broker


@pytest.fixture(autouse=True)
def use_our_broker(own_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", own_broker.bootstrap)


@pytest.fixture
def told(mpbroker):
    def ask(*arguments):
        result = mpbroker("config", "get", "--format", "json", *arguments)
        assert result.code == 0, result.err
        return {each["name"]: each for each in json.loads(result.out)}

    return ask


def test_a_setting_of_the_broker_is_set_shown_and_taken_away(mpbroker, told):
    key = "log.cleaner.backoff.ms"
    assert key not in told()  # at its default
    before = told("--all")[key]["value"]
    done = mpbroker("config", "set", f"{key}=14999")
    assert (done.code, done.err) == (0, "")
    assert told()[key] == {
        "name": key,
        "value": "14999",
        "source": "broker (dynamic)",
        "read_only": False,
        "sensitive": False,
    }
    heading, line = mpbroker("config", "get", key).out.decode().splitlines()
    assert heading.split() == ["SETTING", "VALUE", "SOURCE"]
    assert line.split() == [key, "14999", "broker", "(dynamic)"]
    assert mpbroker("config", "unset", key).code == 0
    assert told(key)[key]["value"] == before


def test_levels_of_loggers_are_set_shown_and_taken_away(mpbroker, told):
    name = "mpbroker.storage"
    assert told("--loggers", name)[name]["value"] == "INFO"
    done = mpbroker("config", "set", "--loggers", f"{name}=ERROR")
    assert (done.code, done.err) == (0, "")
    assert told("--loggers")[name]["value"] == "ERROR"
    assert told("--loggers")[name]["source"] == "logger"
    refused = mpbroker("config", "set", "--loggers", f"{name}=LOUD")
    assert refused.code == ExitCode.ERROR
    assert "Valid log levels are" in refused.err
    done = mpbroker("config", "unset", "--loggers", name)
    assert done.out.decode().strip() == f"loggers of broker '1': unset {name}"
    assert told("--loggers", name)[name]["value"] == "INFO"
    both = mpbroker("config", "get", "--loggers", "--all-brokers")
    assert both.code == ExitCode.USAGE


def test_settings_of_all_brokers_topics_and_groups_are_kept_apart(
    mpbroker, told, topic_name
):
    key = "offset.metadata.max.bytes"
    mpbroker("config", "set", "--all-brokers", f"{key}=4000")
    assert told("--all-brokers")[key]["source"] == "all brokers (dynamic)"
    assert told(key)[key]["value"] == "4000"
    mpbroker("config", "unset", "--all-brokers", key)
    assert key not in told("--all-brokers")
    mpbroker("topic", "create", topic_name)
    mpbroker("config", "set", "--topic", topic_name, "retention.ms=5000")
    assert told("--topic", topic_name)["retention.ms"]["source"] == "topic"
    key = "consumer.session.timeout.ms"
    mpbroker("config", "set", "--group", topic_name, f"{key}=50000")
    found = told("--group", topic_name)[key]
    assert (found["value"], found["source"]) == ("50000", "group")
    done = mpbroker("config", "unset", "--group", topic_name, key, "--format", "json")
    assert json.loads(done.out) == {"unset": [key], "of": f"group '{topic_name}'"}


def test_to_unset_what_is_not_set_is_no_mistake(mpbroker, topic_name):
    mpbroker("topic", "create", topic_name)
    for resource, key in (
        ([], "log.cleaner.backoff.ms"),
        (["--all-brokers"], "log.cleaner.backoff.ms"),
        (["--topic", topic_name], "retention.ms"),
        (["--group", topic_name], "consumer.session.timeout.ms"),
        (["--client-metrics", topic_name], "interval.ms"),
        (["--loggers"], "mpbroker.storage"),
    ):
        assert mpbroker("config", "unset", *resource, key).code == 0, (resource, key)


def test_nothing_is_unset_where_one_of_several_is_unknown(mpbroker, told, topic_name):
    mpbroker("topic", "create", topic_name, "--config", "retention.ms=5000")
    for wrong in (
        ["config", "unset", "--topic", topic_name, "retention.ms", "no.such"],
        ["topic", "alter", topic_name, "--delete-config", "retention.ms"]
        + ["--delete-config", "no.such"],
    ):
        done = mpbroker(*wrong)
        assert (done.code, done.out) == (ExitCode.NOT_FOUND, b"")
        assert done.err == f"mpbroker: topic '{topic_name}' has no setting no.such\n"
    assert told("--topic", topic_name)["retention.ms"]["value"] == "5000"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["set", "num.partitions"], ExitCode.USAGE, "a change is KEY=VALUE"),
        (["set", "num.partitions=many"], ExitCode.ERROR, "num.partitions=many"),
        (["set", "log.dirs=/x"], ExitCode.ERROR, "Cannot update these configs"),
        (["set", "no.such=1"], ExitCode.ERROR, "no.such"),
        (["get", "no.such"], ExitCode.NOT_FOUND, "no setting no.such"),
        (["unset", "no.such"], ExitCode.NOT_FOUND, "no setting no.such"),
        (["unset", "--all-brokers", "no.such"], ExitCode.NOT_FOUND, "no.such"),
        (["unset", "--group", "g", "no.such"], ExitCode.NOT_FOUND, "no.such"),
        (["unset", "--client-metrics", "g", "no.such"], ExitCode.NOT_FOUND, "no.such"),
        (["unset", "--loggers", "no.such"], ExitCode.NOT_FOUND, "no.such"),
        (
            ["unset", "--topic", "no-such", "retention.ms"],
            ExitCode.NOT_FOUND,
            "no-such",
        ),
        (["get", "--topic", "a", "--group", "b"], ExitCode.USAGE, "exclude one"),
    ],
)
def test_mistakes_say_what_to_do(mpbroker, arguments, code, said):
    result = mpbroker("config", *arguments)
    assert result.code == code and said in result.err
