"""What a reload says of the settings that have changed."""

from __future__ import annotations

import logging

import pytest

from mpbroker.config import BrokerConfig
from mpbroker.supervisor.control.control_reload import Reload


class _NoPools:
    def resize(self, handlers, processors):
        raise AssertionError("no pool has another size")


def test_a_reload_says_that_passwords_are_others_and_not_which(tmp_path, caplog):
    file = tmp_path / "server.properties"
    file.write_text("ssl.key.password=oldpw\notlp.headers=a=oldpw\n")
    used = []
    config = BrokerConfig.load({}, file, {"HOME": "/tmp"}, cores=2)
    reload = Reload(config, _NoPools(), used.append)
    file.write_text("ssl.key.password=newpw\notlp.headers=a=newpw\n")
    with caplog.at_level(logging.INFO, "mpbroker"):
        said = reload.run({})
    hidden = {"from": "[hidden]", "to": "[hidden]"}
    assert said == {
        "applied": [{"setting": "ssl.key.password", **hidden}],
        "needs_restart": [{"setting": "otlp.headers", **hidden}],
    }
    assert caplog.messages == ["reload: ssl.key.password: [hidden] is now [hidden]"]
    assert used[0].ssl_key_password == "newpw"


@pytest.mark.parametrize("text", ["", "ssl.key.password=newpw\n"])
def test_that_a_password_is_set_or_gone_is_told(tmp_path, text):
    file = tmp_path / "server.properties"
    other = "" if text else "ssl.key.password=newpw\n"
    file.write_text(other)
    config = BrokerConfig.load({}, file, {"HOME": "/tmp"}, cores=2)
    reload = Reload(config, _NoPools(), lambda new: None)
    file.write_text(text)
    [entry] = reload.run({})["applied"]
    assert (entry["from"], entry["to"]) == (
        "[hidden]" if other else "",
        "[hidden]" if text else "",
    )
