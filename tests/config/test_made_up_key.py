"""A new key is one row: with it, and nothing else, all that a key can do is there."""

from __future__ import annotations

import json
import sys

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.cli import main
from mpbroker.config import BROKER_CONFIG_DEF, BrokerConfig
from tests.broker.resizing import alter, settle
from tests.config.made_up_key import ROW
from tests.support.broker import Broker
from tests.support.children import wait_until

NAME, OF_LISTENER = "made.up.limit", "listener.name.plaintext.made.up.limit"


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, with the row in it."""
    monkeypatch.setattr(BrokerConfig, ROW.attribute, ROW, raising=False)
    monkeypatch.setitem(BROKER_CONFIG_DEF._keys, ROW.name, ROW)


def load(arguments=(), file=None, environ=None, cores=3) -> BrokerConfig:
    return BrokerConfig.load(
        dict(arguments), file, environ or {"HOME": "/h"}, cores=cores
    )


def test_without_the_row_there_is_no_such_key():
    with pytest.raises(ConfigError, match=f"unknown setting '{NAME}'"):
        load({NAME: "5"})


@pytest.mark.usefixtures("row")
def test_it_is_read_from_arguments_environment_and_file(tmp_path):
    assert load().made_up_limit == 3
    assert load(cores=64).made_up_limit == 4
    file = tmp_path / "server.properties"
    file.write_text(f"{NAME}=5\n")
    assert load(file=file).made_up_limit == 5
    environ = {"MPBROKER_MADE_UP_LIMIT": "6"}
    assert load(file=file, environ=environ).made_up_limit == 6
    config = load({NAME: "7"}, file, environ)
    assert config.made_up_limit == config.resolved(NAME).value == 7
    assert config.static_texts() == {NAME: "7"}


@pytest.mark.usefixtures("row")
def test_outside_its_limits_it_is_refused_with_the_limit_and_a_value_that_is_good():
    for text in ("0", "1001", "many"):
        with pytest.raises(ConfigError) as caught:
            load({NAME: text})
        assert str(caught.value) == (
            f"{NAME}={text}: not accepted; it must be a whole number of 32 bits,"
            " between 1 and 1000 (default 3) (the command line)"
        )


@pytest.mark.usefixtures("row")
def test_a_listener_may_have_its_own_within_limits_of_its_own():
    config = load({NAME: "500", OF_LISTENER: "9"})
    assert config.for_listener("PLAINTEXT", NAME) == 9
    assert config.for_listener("OTHER", NAME) == 500
    with pytest.raises(ConfigError, match=f"^{OF_LISTENER}=11: .* between 1 and 10"):
        load({OF_LISTENER: "11"})


@pytest.mark.usefixtures("row")
def test_it_is_explained_and_listed(capsys, tmp_path):
    file = tmp_path / "server.properties"
    file.write_text(f"{NAME}=5\n")
    assert main(["config", "explain", NAME, "--config", str(file)]) == 0
    text = capsys.readouterr().out
    assert "Limit of what a test makes up. Default: the cores available, at" in text
    assert "between 1 and 1000" in text and "now         5, from" in text
    assert "update      cluster-wide" in text
    assert main(["config", "explain", OF_LISTENER]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}  (broker setting)")
    command = ["config", "list", "--changed", "--format", "json"]
    assert main([*command, "--config", str(file)]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["value"]) == (NAME, "5")


def test_its_reader_gets_a_new_value_while_the_broker_serves(tmp_path):
    file = tmp_path / "values"
    command = [sys.executable, "-m", "tests.config.made_up_key", str(file)]
    config = {NAME: 5, "num.io.threads": 1}
    with Broker(tmp_path / "data", config, command=command) as broker:
        wait_until(lambda: file.read_text().split() == ["5"])
        refused = alter(broker, {NAME: 1001})
        assert "between 1 and 1000" in (refused.error_message or "")
        refused = alter(broker, {OF_LISTENER: 11})
        assert "between 1 and 10 " in (refused.error_message or "")
        assert alter(broker, {OF_LISTENER: 9}).error_code == 0
        assert alter(broker, {NAME: 8}).error_code == 0
        wait_until(lambda: file.read_text().split()[-1] == "8")
        settle(broker)
