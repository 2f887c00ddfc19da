"""`mpbroker topic`, against a broker in a thread."""

import json

import pytest

from mpbroker.cli.exit_codes import ExitCode


def test_a_topic_is_created_with_partitions_and_settings(fake_broker, mpbroker):
    result = mpbroker(
        *["topic", "create", "new", "--partitions", 4],
        *["--config", "retention.ms=1000", "--config", "cleanup.policy=compact"],
    )
    assert (result.code, result.out) == (0, b"topic new created\n")
    assert fake_broker.topics["new"] == 4
    assert fake_broker.configs["new"] == {
        "retention.ms": "1000",
        "cleanup.policy": "compact",
    }


def test_a_topic_that_exists_is_an_error_unless_that_is_fine(fake_broker, mpbroker):
    result = mpbroker("topic", "create", "one")
    assert result.code == ExitCode.ERROR
    assert result.err == ("mpbroker: topic 'one': TOPIC_ALREADY_EXISTS: it is there\n")
    result = mpbroker("topic", "create", "--if-not-exists", "one", "two")
    assert result.code == 0
    assert result.out == b"topic one exists already\ntopic two created\n"
    assert fake_broker.topics["two"] == 1


def test_validate_only_creates_nothing(fake_broker, mpbroker):
    result = mpbroker("topic", "create", "--validate-only", "new")
    assert result.out == b"topic new could be created\n"
    assert "new" not in fake_broker.topics


def test_list_takes_a_pattern(fake_broker, mpbroker):
    assert mpbroker("topic", "list").out == b"one\nt\n"
    assert mpbroker("topic", "list", "o*").out == b"one\n"
    assert mpbroker("topic", "list", "zzz*").code == ExitCode.NOT_FOUND
    fake_broker.topics.clear()
    assert mpbroker("topic", "list").code == 0


def test_list_as_json(fake_broker, mpbroker):
    topics = json.loads(mpbroker("topic", "list", "--format", "json").out)
    assert [(topic["name"], topic["partitions"]) for topic in topics] == [
        ("one", 1),
        ("t", 3),
    ]


def test_describe_shows_offsets_and_the_settings_that_were_made(fake_broker, mpbroker):
    fake_broker.configs["t"]["retention.ms"] = "5"
    fake_broker.starts["t", 1], fake_broker.ends["t", 1] = 3, 10
    (topic,) = json.loads(mpbroker("topic", "describe", "t", "--format", "json").out)
    assert topic["configs"] == {"retention.ms": {"value": "5", "source": "topic"}}
    assert topic["partitions"][1] == {
        "partition": 1,
        "leader": 7,
        "start_offset": 3,
        "end_offset": 10,
    }
    text = mpbroker("topic", "describe").out.decode()
    assert "topic one" in text and "topic t" in text
    assert "retention.ms=5  (topic)" in text
    assert "1          7       3      10   7" in text


def test_describe_shows_both_tiers_of_a_topic_that_has_them(fake_broker, mpbroker):
    fake_broker.configs["t"]["remote.storage.enable"] = "true"
    fake_broker.local_starts["t", 1], fake_broker.ends["t", 1] = 800, 1000
    (topic,) = json.loads(mpbroker("topic", "describe", "t", "--format", "json").out)
    assert [
        (each["last_remote_offset"], each["first_local_offset"])
        for each in topic["partitions"]
    ] == [(None, 0), (799, 800), (None, 0)]
    text = mpbroker("topic", "describe", "t").out.decode()
    assert "IN STORE TO  ON DISK FROM" in text
    assert ["1", "7", "0", "1000", "1000", "799", "800"] in map(
        str.split, text.splitlines()
    )
    assert "IN STORE" not in mpbroker("topic", "describe", "one").out.decode()


def test_alter_sets_deletes_and_adds(fake_broker, mpbroker):
    fake_broker.configs["one"]["a"] = "1"
    result = mpbroker(
        *["topic", "alter", "one", "--partitions", 5],
        *["--config", "b=2=3", "--delete-config", "a"],
    )
    assert result.code == 0
    assert fake_broker.topics["one"] == 5
    assert fake_broker.configs["one"] == {"b": "2=3"}
    assert result.out == b"topic one altered\n"


def test_alter_and_delete_say_in_json_what_they_did(fake_broker, mpbroker):
    done = mpbroker("topic", "alter", "one", "-p", 5, "--format", "json")
    told = json.loads(done.out)
    assert told == {"name": "one", "set": [], "unset": [], "partitions": 5}
    done = mpbroker("topic", "alter", "one", "--config", "a=1", "--format", "json")
    told = json.loads(done.out)
    assert told == {"name": "one", "set": ["a"], "unset": [], "partitions": None}
    names = ["one", "nope"]
    done = mpbroker("topic", "delete", "--if-exists", *names, "--format", "json")
    assert json.loads(done.out) == [
        {"name": "one", "deleted": True},
        {"name": "nope", "deleted": False},
    ]


def test_delete(fake_broker, mpbroker):
    assert mpbroker("topic", "delete", "one").code == 0
    assert "one" not in fake_broker.topics
    assert mpbroker("topic", "delete", "one").code == ExitCode.NOT_FOUND
    assert mpbroker("topic", "delete", "--if-exists", "one").code == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["describe", "nope"], ExitCode.NOT_FOUND),
        (["alter", "one", "--partitions", "1"], ExitCode.ERROR),
        (["alter", "one"], ExitCode.USAGE),
        (["alter", "one", "--config", "novalue"], ExitCode.USAGE),
        (["alter", "one", "--config", "a=1", "--delete-config", "a"], ExitCode.USAGE),
        (["create"], ExitCode.USAGE),
        (["create", "x", "--partitions", "0"], ExitCode.USAGE),
        (["list", "-b", "nowhere.invalid:1"], ExitCode.UNAVAILABLE),
        (["list", "--timeout", "0"], ExitCode.USAGE),
        (["frobnicate"], ExitCode.USAGE),
    ],
)
@pytest.mark.usefixtures("fake_broker")
def test_exit_codes_of_topic(mpbroker, arguments, code):
    result = mpbroker("topic", *arguments)
    assert result.code == code
    assert result.err
