"""BROKER_LOGGER: the levels of loggers, described and changed as clients do it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from mpbroker.base.logger import LEVELS, ROOT
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages import alter_configs as alter
from mpbroker.protocol.messages import describe_configs as describe
from mpbroker.protocol.messages import incremental_alter_configs as incremental
from mpbroker.server.configs import broker_loggers
from mpbroker.server.configs.broker_loggers import logger_names
from mpbroker.server.handlers.alter_configs import handle_alter_configs
from mpbroker.server.handlers.describe_configs import handle_describe_configs
from mpbroker.server.handlers.incremental_alter_configs import (
    handle_incremental_alter_configs,
)
from tests.server.contexts import context
from tests.support.metadata import start

BROKER_LOGGER = 8
SET, DELETE, APPEND, SUBTRACT = range(4)
NAMES = {
    "root",
    "mpbroker",
    "mpbroker.network",
    "mpbroker.network.acceptor",
    "mpbroker.server",
}


class Levels:
    """A page of shared memory."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}

    def read(self):
        return self.levels

    def change(self, put):
        self.levels.update(put)
        for name, level in put.items():
            if level is None:
                self.levels.pop(name, None)


class Stage:
    def __init__(self, tmp_path) -> None:
        self.levels = Levels()
        self.registry = start(tmp_path)
        self.context = context(self.registry, levels=self.levels)

    def describe(self, name="1", keys=None):
        wanted = describe.DescribeConfigsResource(
            resource_type=BROKER_LOGGER, resource_name=name, configuration_keys=keys
        )
        answer = handle_describe_configs(
            describe.DescribeConfigsRequest(resources=[wanted]),
            self.context,
        )
        body = memoryview(answer.encode(4))
        (result,) = describe.DescribeConfigsResponse.decode(4, body).results
        return result

    def told(self, keys=None):
        result = self.describe(keys=keys)
        assert (result.error_code, result.error_message) == (0, None)
        return {each.name: each.value for each in result.configs}

    def alter(self, *operations, name="1", validate_only=False):
        configs = [
            incremental.AlterableConfig(name=key, config_operation=op, value=value)
            for key, op, value in operations
        ]
        wanted = incremental.AlterConfigsResource(
            resource_type=BROKER_LOGGER, resource_name=name, configs=configs
        )
        request = incremental.IncrementalAlterConfigsRequest(
            resources=[wanted], validate_only=validate_only
        )
        (response,) = handle_incremental_alter_configs(request, self.context).responses
        return response.error_code, response.error_message


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_loggers, "logger_names", lambda: NAMES)
    return Stage(tmp_path)


def test_each_logger_has_the_level_of_the_nearest_above_it(stage):
    assert stage.told() == dict.fromkeys(sorted(NAMES), "INFO")
    assert stage.alter(("root", SET, "ERROR"), ("mpbroker.network", SET, "TRACE")) == (
        0,
        None,
    )
    assert stage.told() == {
        "root": "ERROR",
        "mpbroker": "ERROR",
        "mpbroker.network": "TRACE",
        "mpbroker.network.acceptor": "TRACE",
        "mpbroker.server": "ERROR",
    }
    assert stage.alter(("mpbroker.network", DELETE, None)) == (0, None)
    assert stage.told(keys=["mpbroker.network", "no.such"]) == {
        "mpbroker.network": "ERROR"
    }


def test_levels_are_told_as_kafka_tells_them(stage):
    entry = stage.describe(keys=["root"]).configs[0]
    assert (entry.config_source, entry.read_only, entry.is_sensitive) == (
        6,  # DYNAMIC_BROKER_LOGGER_CONFIG
        False,
        False,
    )
    assert entry.synonyms == []


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_every_level_is_described_as_it_was_set(stage, level):
    assert stage.alter(("mpbroker.server", SET, level)) == (0, None)
    assert stage.levels.levels == {"mpbroker.server": LEVELS[level]}
    assert stage.told()["mpbroker.server"] == level


@pytest.mark.parametrize(
    ("operation", "code", "text"),
    [
        (("no.such", SET, "INFO"), E.INVALID_CONFIG, "Logger no.such does not exist!"),
        (("no.such", DELETE, None), E.INVALID_CONFIG, "does not exist!"),
        (("mpbroker.", SET, "INFO"), E.INVALID_CONFIG, "does not exist!"),
        (("x" * 9999, SET, "INFO"), E.INVALID_CONFIG, "xxx... does not exist!"),
        (
            ("root", SET, "LOUD"),
            E.INVALID_CONFIG,
            "Cannot set the log level of root to LOUD as it is not a supported log"
            " level. Valid log levels are DEBUG, ERROR, FATAL, INFO, TRACE, WARN",
        ),
        (("root", SET, "info"), E.INVALID_CONFIG, "not a supported log level"),
        (("root", SET, ""), E.INVALID_CONFIG, "not a supported log level"),
        (("root", SET, None), E.INVALID_REQUEST, "Null value not supported"),
        (
            ("root", DELETE, None),
            E.INVALID_REQUEST,
            "Removing the log level of the root logger is not allowed",
        ),
        (
            ("root", APPEND, "INFO"),
            E.INVALID_REQUEST,
            "APPEND operation is not allowed for the BROKER_LOGGER resource",
        ),
        (("root", SUBTRACT, "INFO"), E.INVALID_REQUEST, "SUBTRACT operation is not"),
        (("root", 9, "INFO"), E.INVALID_REQUEST, "Unknown operation 9"),
        (("mpbroker", SET, "WARN"), E.INVALID_REQUEST, "duplicate config keys"),
    ],
)
def test_an_invalid_change_has_a_reason_and_changes_nothing(
    stage, operation, code, text
):
    found = stage.alter(("mpbroker", SET, "TRACE"), operation)
    assert found[0] == code
    assert text in found[1]
    assert stage.levels.levels == {}


@pytest.mark.parametrize("name", ["", "2", "one", "-1", "x" * 5000])
def test_loggers_are_those_of_this_broker(stage, name):
    code, message = stage.alter(("root", SET, "WARN"), name=name)
    assert code == E.INVALID_REQUEST
    assert message.startswith(("Node id must be an integer", "Unexpected node id"))
    result = stage.describe(name)
    assert (result.error_code, result.configs) == (E.INVALID_REQUEST, [])
    assert result.error_message.startswith(
        ("Broker id must ", "Unexpected broker id, expected 1 but received")
    )
    assert stage.levels.levels == {}


def test_a_change_with_validate_only_sets_nothing(stage):
    assert stage.alter(("root", SET, "WARN"), validate_only=True) == (0, None)
    assert stage.alter(("root", SET, "LOUD"), validate_only=True)[0]
    assert stage.levels.levels == {}


def test_alter_configs_knows_no_loggers(stage):
    wanted = alter.AlterConfigsResource(
        resource_type=BROKER_LOGGER,
        resource_name="1",
        configs=[alter.AlterableConfig(name="root", value="WARN")],
    )
    request = alter.AlterConfigsRequest(resources=[wanted])
    (response,) = handle_alter_configs(request, stage.context).responses
    assert response.error_code == E.INVALID_REQUEST
    assert "by IncrementalAlterConfigs" in response.error_message


def test_all_loggers_of_the_broker_can_be_named():
    names = logger_names()
    assert {
        "root",
        "mpbroker",
        "mpbroker.network",
        "mpbroker.network.security.sasl",
        "mpbroker.network.security.sasl.jwt_validator",
        "mpbroker.server.configs.broker_loggers",
        "mpbroker.exporter.http_server",
    } <= names
    assert not any(name.startswith("mpbroker.client") for name in names)
    assert all(name.rpartition(".")[0] in {*names, ""} for name in names)


def test_every_module_that_is_named_has_a_logger():
    found = {name: importlib.util.find_spec(name) for name in logger_names() - {ROOT}}
    assert None not in found.values()
    modules = [spec for spec in found.values() if not spec.submodule_search_locations]
    for spec in modules:
        source = Path(spec.origin).read_text()
        assert re.search(r"^\w+ = get_logger\(__name__\)$", source, re.M), spec.name
