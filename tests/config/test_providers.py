"""Kafka's config providers: values come from files, directories and variables."""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig

PACKAGE = "org.apache.kafka.common.config.provider"
PROVIDERS = {
    "config.providers": "file, dir,env",
    "config.providers.file.class": f"{PACKAGE}.FileConfigProvider",
    "config.providers.dir.class": f"{PACKAGE}.DirectoryConfigProvider",
    "config.providers.env.class": f"{PACKAGE}.EnvVarConfigProvider",
}


def load(settings, **environ) -> BrokerConfig:
    return BrokerConfig.load(
        {**PROVIDERS, **settings}, None, {"HOME": "/h", **environ}, cores=2
    )


@pytest.fixture
def secrets(tmp_path):
    (tmp_path / "tls.properties").write_text("# ours\nrack: a=b\nport=9192\n")
    (tmp_path / "rack").write_text("from a file")
    return tmp_path


def test_a_value_comes_from_a_file_a_directory_and_a_variable(secrets):
    file = f"{secrets}/tls.properties"
    assert load({"broker.rack": f"${{file:{file}:rack}}"}).broker_rack == "a=b"
    assert (
        load({"broker.rack": f"${{dir:{secrets}:rack}}"}).broker_rack == "from a file"
    )
    for variable in ("${env:RACK}", "${env::RACK}"):
        assert load({"broker.rack": variable}, RACK="r1").broker_rack == "r1"


def test_several_may_be_a_part_of_one_value(secrets):
    config = load(
        {
            "listeners": f"A://127.0.0.1:${{file:{secrets}/tls.properties:port}},${{env:B}}"
        }
        | {"listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT"},
        B="B://127.0.0.1:1",
    )
    assert config.listeners == ("A://127.0.0.1:9192", "B://127.0.0.1:1")


def test_a_value_is_read_again_with_the_configuration(secrets):
    config = load({"broker.rack": f"${{dir:{secrets}:rack}}"})
    (secrets / "rack").write_text("${env:HOME}")
    assert config.load_again().broker_rack == "${env:HOME}"  # which is not searched


def test_what_is_no_provider_stays_as_it_is():
    assert load({"broker.rack": "${vault:/a:b}"}).broker_rack == "${vault:/a:b}"
    alone = BrokerConfig.load(
        {"broker.rack": "${env:HOME}"}, None, {"HOME": "/h"}, cores=2
    )
    assert alone.broker_rack == "${env:HOME}"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${file:DIR/none:rack}", "cannot read DIR/none: No such file or directory"),
        ("${file:DIR/tls.properties:other}", "DIR/tls.properties has no key other"),
        ("${file:rack}", "there is no path"),
        ("${dir:DIR:other}", "cannot read DIR/other: No such file or directory"),
        ("${dir:DIR:../rack}", "'../rack' is not the name of a file"),
        ("${env:NONE}", "the variable is not set"),
        ("${env:DIR:HOME}", "a variable has no path"),
    ],
)
def test_a_value_that_is_not_there_is_named(secrets, value, reason):
    value = value.replace("DIR", str(secrets))
    with pytest.raises(ConfigError) as caught:
        load({"broker.rack": value})
    assert str(caught.value).startswith(f"broker.rack: {value}: ")
    assert reason.replace("DIR", str(secrets)) in str(caught.value)
    assert str(caught.value).endswith("(the command line)")


def test_what_a_provider_may_read_can_be_limited(secrets, tmp_path):
    limits = {
        "config.providers.file.param.allowed.paths": f"/nowhere, {secrets}",
        "config.providers.env.param.allowlist.pattern": "RACK|B.*",
    }
    inside = f"${{file:{secrets}/../{secrets.name}/tls.properties:port}}"
    assert load({**limits, "broker.rack": inside}).broker_rack == "9192"
    assert load({**limits, "broker.rack": "${env:B1}"}, B1="r").broker_rack == "r"
    for value, reason in (
        (f"${{file:{secrets}/../x:port}}", "is not below one of allowed.paths"),
        ("${env:XRACK}", "allowlist.pattern does not match the variable"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load({**limits, "broker.rack": value}, XRACK="r")


def test_other_classes_and_unknown_ones_are_refused():
    with pytest.raises(
        ConfigError, match=r"classes of Java are not loaded; .* are here"
    ):
        load({"config.providers.env.class": "com.example.Vault"})
    with pytest.raises(ConfigError, match=r"config\.providers\.more\.class is not set"):
        load({"config.providers": "more"})
    with pytest.raises(ConfigError, match=r"allowlist\.pattern=\(: "):
        load({"config.providers.env.param.allowlist.pattern": "("})
