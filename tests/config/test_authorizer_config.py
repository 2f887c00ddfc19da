"""authorizer.class.name and super.users: what they may be, and what is said if not."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.base.config_def import ConfigError
from mpbroker.config.plug_ins import (
    is_standard_authorizer,
    load_authorizer_class,
    parse_super_users,
)
from mpbroker.server.authorization.authorizer import Authorizer
from tests.support.broker import Broker, BrokerFailedError

PLUG_IN = '''
from mpbroker.extensions import AclOperation, Authorizer

class ReadOnly(Authorizer):
    """Everybody may look; topics of the name that is set may be created."""

    def configure(self, settings):
        if settings.get("num.partitions") == "7":
            raise ValueError("seven is bad luck")
        self._partitions = settings.get("num.partitions", "1")

    def authorize(self, context, operation, resource):
        if resource.name == "broken":
            raise RuntimeError("secret-detail")
        return operation is AclOperation.DESCRIBE or resource.name == "mine"

class NotOne:
    pass

class Unfinished(Authorizer):
    pass
'''


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plug_in_for_tests.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_kafkas_names_mean_the_authorizer_that_goes_by_acls():
    assert is_standard_authorizer(
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    )
    assert is_standard_authorizer("kafka.security.authorizer.AclAuthorizer")
    assert not is_standard_authorizer("io.confluent.Other")


def test_a_class_of_ones_own_is_found(plug_in):
    found = load_authorizer_class("python:plug_in_for_tests:ReadOnly")
    assert issubclass(found, Authorizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python:plug_in_for_tests", "python:MODULE:CLASS"),
        ("python::X", "python:MODULE:CLASS"),
        ("python:missing_module_for_tests:X", "cannot be imported"),
        ("python:plug_in_for_tests:Missing", "cannot be imported"),
        ("python:plug_in_for_tests:NotOne", "no subclass of"),
        ("python:plug_in_for_tests:PLUG", "cannot be imported"),
        ("python:plug_in_for_tests:Unfinished", "does not implement authorize"),
        ("io.confluent.Other", "a Java class cannot be used"),
    ],
)
def test_what_cannot_be_an_authorizer_is_refused_with_the_way_out(plug_in, name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_authorizer_class(name)
    assert str(caught.value).startswith(f"authorizer.class.name={name}: ")


def test_super_users_are_principals_with_semicolons_between():
    assert parse_super_users("") == ()
    assert parse_super_users(" User:a ; User:CN=b, O=c;") == (
        "User:a",
        "User:CN=b, O=c",
    )
    for wrong in ("alice", "User:", ":alice", "User:a;bob"):
        with pytest.raises(ConfigError, match="is not type:name"):
            parse_super_users(wrong)


def started(tmp_path: Path, plug_in: Path, **config: object) -> Broker:
    return Broker(
        tmp_path / "data",
        {
            "authorizer.class.name": "python:plug_in_for_tests:ReadOnly",
            **{key.replace("_", "."): value for key, value in config.items()},
        },
        environ={"PYTHONPATH": str(plug_in)},
    )


def test_a_broker_asks_an_authorizer_of_ones_own(tmp_path, plug_in):
    with started(tmp_path, plug_in) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        futures = admin.create_topics([NewTopic("mine", 1), NewTopic("other", 1)])
        futures["mine"].result()
        with pytest.raises(KafkaException) as caught:
            futures["other"].result()
        assert caught.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        assert "mine" in admin.list_topics(timeout=60).topics


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_partitions": 7}, "seven is bad luck"),
        ({"super_users": "alice"}, "super.users: 'alice' is not type:name"),
        (
            {"authorizer_class_name": "python:plug_in_for_tests:Missing"},
            "cannot be imported",
        ),
    ],
)
def test_a_broker_whose_authorizer_cannot_be_used_says_why_and_ends(
    tmp_path, plug_in, config, words
):
    broker = started(tmp_path, plug_in, **config)
    with pytest.raises(BrokerFailedError):
        broker.start()
    assert words in broker.log_tail()
