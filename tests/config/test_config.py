"""BrokerConfig: sources, precedence, defaults and refusals."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.base.config_def import ConfigError, ConfigKey, type_of
from mpbroker.config import (
    BROKER_CONFIG_DEF,
    AdvertisedEndPoint,
    BrokerConfig,
    EndPoint,
    Source,
    explain,
)
from mpbroker.config.broker_key import BrokerKey
from mpbroker.config.cores import available_cores
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listener_security import security_settings
from mpbroker.config.sources import settings_of_environment, variable_of


def load(
    arguments: dict[str, str] | None = None,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
    cores: int = 4,
) -> BrokerConfig:
    return BrokerConfig.load(
        arguments or {}, file, environ or {"HOME": "/home/x"}, cores=cores
    )


def refusal(**arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load({name.replace("_", "."): text for name, text in arguments.items()})
    return str(caught.value)


# -- values ---------------------------------------------------------------------------


ROWS = [row for row in vars(BrokerConfig).values() if isinstance(row, BrokerKey)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_the_attribute_that_has_the_value(row):
    config = load()
    assert BROKER_CONFIG_DEF.key(row.name) is row
    value = getattr(config, row.name.replace(".", "_"))
    assert type(value) is (type(None) if value is None else type_of[row.type])
    if row.name != "log.dirs":  # which is made absolute
        assert value == config.resolved(row.name).value


def test_a_row_with_an_unknown_column_or_beside_its_name_is_no_row():
    columns = {*ConfigKey.__annotations__, *BrokerKey.__annotations__}
    for row in ROWS:
        own = {"name", "type", "default", "meaning"}
        assert vars(row).keys() <= columns | own, row.name
    # Since 3.12 the error itself; before, a RuntimeError around it.
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        type("Other", (), {"other": ROWS[0]})
    error = caught.value.__cause__ or caught.value
    assert str(error) == f"{ROWS[0].name} is in the row of other"


@pytest.mark.parametrize("key", list(BROKER_CONFIG_DEF), ids=lambda key: key.name)
def test_every_default_passes_its_own_check_and_every_key_is_documented(key):
    if key.default is not None:
        assert key.parse(key.format(key.default)) == key.default
    assert key.documentation.endswith(".")
    assert key.documentation[0].isupper()


def test_with_nothing_set_the_broker_serves_this_machine_only():
    config = load()
    assert config.endpoints == (EndPoint("PLAINTEXT", "127.0.0.1", 9092, "PLAINTEXT"),)
    assert config.advertised == {"PLAINTEXT": AdvertisedEndPoint("", 0)}
    assert config.node_id == 1
    assert config.log_dirs == ("/home/x/.local/share/mpbroker",)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("cores", "processors", "handlers"), [(1, 1, 2), (2, 1, 2), (4, 2, 4), (64, 3, 8)]
)
def test_pool_sizes_follow_the_cores(cores, processors, handlers):
    config = load(cores=cores)
    assert (config.num_network_threads, config.num_io_threads) == (processors, handlers)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "HOME": "/h"}, "/var/lib/a"),
        ({"XDG_DATA_HOME": "/data", "HOME": "/h"}, "/data/mpbroker"),
        ({}, "/var/lib/mpbroker"),
    ],
)
def test_the_data_directory_follows_the_environment(environ, directory):
    config = BrokerConfig.load({}, None, environ, cores=1)
    assert config.log_dirs == (directory,)


def test_a_configuration_cannot_be_changed():
    config = load()
    with pytest.raises(AttributeError, match="immutable"):
        config.node_id = 2
    with pytest.raises(AttributeError, match="immutable"):
        del config.node_id


# -- sources --------------------------------------------------------------------------


def test_arguments_win_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "server.properties"
    file.write_text("num.partitions=2\nnode.id=2\nqueued.max.requests=2\n")
    environ = {"MPBROKER_NUM_PARTITIONS": "3", "MPBROKER_NODE_ID": "3"}
    config = load({"num.partitions": "4"}, file, environ)
    seen = [
        config.resolved(name)[2:]
        for name in ("num.partitions", "node.id", "queued.max.requests", "log.dirs")
    ]
    assert (config.num_partitions, config.node_id, config.queued_max_requests) == (
        4,
        3,
        2,
    )
    assert seen == [
        (Source.ARGUMENT, "the command line"),
        (Source.ENVIRONMENT, "the environment variable MPBROKER_NODE_ID"),
        (Source.FILE, f"{file}:3"),
        (Source.DEFAULT, "default"),
    ]
    assert config.static_texts() == {
        "num.partitions": "4",
        "node.id": "3",
        "queued.max.requests": "2",
    }


def test_a_misspelt_argument_is_refused_with_the_right_spelling():
    assert refusal(num_io_thread="3").startswith(
        "unknown setting 'num.io.thread'; did you mean num.io.threads?"
    )


def test_what_asks_for_pure_python_is_no_unknown_setting():
    assert not load(environ={"MPBROKER_PURE_PYTHON": "1", "HOME": "/x"}).warnings


def test_a_variable_of_another_program_is_a_warning():
    config = load(environ={"MPBROKER_LOG_DIR_": "x"})
    assert "did you mean log.dir" in config.warnings[0]


LISTENERS = {
    "listeners": "SASL_PLAINTEXT://h:1,in-side://h:2",
    "listener.security.protocol.map": "SASL_PLAINTEXT:SASL_PLAINTEXT,in-side:PLAINTEXT",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256",
}


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("LOG_DIRS", "log.dirs"),
        (
            "LISTENER_NAME_SASL___PLAINTEXT_SCRAM__SHA__256_SASL_JAAS_CONFIG",
            "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config",
        ),
        (
            "LISTENER_NAME_IN__SIDE_MAX_CONNECTIONS",
            "listener.name.in-side.max.connections",
        ),
    ],
)
def test_a_variable_spells_a_setting_as_for_kafkas_images(variable, name):
    (found,) = settings_of_environment({f"MPBROKER_{variable}": "1"})
    assert found.name == name
    assert variable_of(name) == f"MPBROKER_{variable}"


def test_a_variable_sets_what_a_listener_with_a_dash_or_an_underscore_has():
    given = {
        "MPBROKER_LISTENER_NAME_IN__SIDE_MAX_CONNECTIONS": "7",
        "MPBROKER_LISTENER_NAME_SASL___PLAINTEXT_MAX_CONNECTIONS": "8",
    }
    config = load(LISTENERS, environ=given)
    assert config.for_listener("in-side", "max.connections") == 7
    assert config.for_listener("SASL_PLAINTEXT", "max.connections") == 8
    assert not [each for each in config.warnings if "no effect" in each]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        (
            "LISTENER_NAME_SASL_PLAINTEXT_MAX_CONNECTIONS",
            "LISTENER_NAME_SASL___PLAINTEXT_MAX_CONNECTIONS",
        ),
        (
            "LISTENER_NAME_SASL_PLAINTEXT_SCRAM_SHA_256_SASL_JAAS_CONFIG",
            "LISTENER_NAME_SASL___PLAINTEXT_SCRAM__SHA__256_SASL_JAAS_CONFIG",
        ),
        (
            "LISTENER_NAME_SASL___PLAINTEXT_SCRAM_SHA_256_SASL_JAAS_CONFIG",
            "LISTENER_NAME_SASL___PLAINTEXT_SCRAM__SHA__256_SASL_JAAS_CONFIG",
        ),
        (
            "LISTENER_NAME_IN_SIDE_MAX_CONNECTIONS",
            "LISTENER_NAME_IN__SIDE_MAX_CONNECTIONS",
        ),
        ("LISTENER_NAME_OTHER_MAX_CONNECTIONS", "there are in-side, sasl_plaintext"),
        (
            "LISTENER_NAME_IN__SIDE_MAX_CONNECTION",
            "LISTENER_NAME_IN__SIDE_MAX_CONNECTIONS",
        ),
    ],
)
def test_a_variable_of_no_listener_is_refused_with_the_nearest_spelling(
    variable, meant
):
    environ = {f"MPBROKER_{variable}": "1"}
    with pytest.raises(ConfigError) as refused:
        load(LISTENERS, environ=environ)
    assert meant in str(refused.value)
    assert f"the environment variable MPBROKER_{variable}" in str(refused.value)


def test_two_names_of_one_setting_must_agree(tmp_path):
    assert "two names of one setting" in refusal(node_id="1", broker_id="2")
    assert load({"node.id": "2", "broker.id": "2"}).node_id == 2
    file = tmp_path / "x.properties"
    file.write_text("broker.id=7")
    assert load({"node.id": "2"}, file).node_id == 2


def test_an_error_says_in_which_line_of_the_file(tmp_path):
    file = tmp_path / "server.properties"
    file.write_text("# pools\nnum.io.threads=none\n")
    with pytest.raises(ConfigError, match=rf"num\.io\.threads=none.*{file}:2"):
        load(file=file)


def test_a_file_written_for_kafka_works_as_it_is(tmp_path):
    file = tmp_path / "server.properties"
    file.write_text(
        "process.roles=broker,controller\n"
        "node.id=1\n"
        "controller.quorum.bootstrap.servers=localhost:9093\n"
        "listeners=PLAINTEXT://:9092,CONTROLLER://:9093\n"
        "inter.broker.listener.name=PLAINTEXT\n"
        "advertised.listeners=PLAINTEXT://localhost:9092,"
        "CONTROLLER://localhost:9093\n"
        "controller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        "num.network.threads=3\n"
        "log.dirs=/tmp/kraft-combined-logs\n"
        "share.coordinator.state.topic.min.isr=1\n"
        "transaction.state.log.min.isr=1\n"
        "log.retention.hours=168\n"
    )
    config = load(file=file)
    assert config.endpoints == (EndPoint("PLAINTEXT", "", 9092, "PLAINTEXT"),)
    assert config.advertised == {"PLAINTEXT": AdvertisedEndPoint("localhost", 9092)}
    assert len(config.warnings) == 3
    assert sum("bind it to 127.0.0.1" in warning for warning in config.warnings) == 1


@pytest.mark.parametrize("name", ["server.toml", "server.conf"])
def test_toml_may_nest_or_dot_its_keys(tmp_path, name):
    file = tmp_path / name
    file.write_text(
        'listeners = ["PLAINTEXT://127.0.0.1:0", "B://[::1]:0"]\n'
        'listener.security.protocol.map = "B:PLAINTEXT,PLAINTEXT:PLAINTEXT"\n'
        "[num]\npartitions = 3\nio.threads = 5\n"
        "[log]\npreallocate = true\ncleaner.min.cleanable.ratio = 0.25\n"
    )
    config = load(file=file)
    assert [endpoint.host for endpoint in config.endpoints] == ["127.0.0.1", "::1"]
    assert (config.num_partitions, config.num_io_threads) == (3, 5)
    assert config.resolved("log.preallocate").value is True
    assert config.resolved("log.cleaner.min.cleanable.ratio").value == 0.25


def test_a_file_without_telling_suffix_may_be_properties(tmp_path):
    file = tmp_path / "kafka.conf"
    file.write_text("log.dirs = /a, /b,\n")  # nor is what follows another
    assert load(file=file).log_dirs == ("/a", "/b")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a = ", "not valid TOML"),
        ("max.connections = 1\nmax.connections.per.ip = 2", "quote them"),
        ("node.id = 2024-01-01", "must be a string, a number"),
        ("a = [[[" * 10_000, "TOML"),
    ],
)
def test_bad_toml_is_refused_with_the_reason(tmp_path, content, complaint):
    file = tmp_path / "x.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load(file=file)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}/none"):
        load(file=tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(file=tmp_path / "binary")


# -- one key's fallbacks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "retention_ms"),
    [
        ({}, 604_800_000),
        ({"log.retention.hours": "2"}, 7_200_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "1"}, 60_000),
        ({"log.retention.minutes": "1", "log.retention.ms": "5"}, 5),
        ({"log.retention.hours": "-1"}, -1),
    ],
)
def test_the_finest_unit_of_retention_wins(settings, retention_ms):
    assert load(settings).log_defaults()["retention.ms"] == retention_ms


def test_a_listener_may_have_its_own_number_of_processors():
    config = load({"listener.name.plaintext.num.network.threads": "9"})
    assert config.warnings == ()
    assert config.for_listener("PLAINTEXT", "num.network.threads") == 9
    assert config.for_listener("OTHER", "num.network.threads") == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("listener.name.plaintext.num.io.threads", "num.io.threads cannot be set for"),
        (
            "listener.name.plaintext.socket.receive.buffer.bytes",
            "socket.receive.buffer.bytes cannot be set for one listener",
        ),
        (
            "listener.name.plaintext.plain.ssl.client.auth",
            "ssl.client.auth cannot be set for one SASL mechanism",
        ),
        (
            "listener.name.plaintext.digest.sasl.jaas.config",
            "there is no SASL mechanism 'digest'",
        ),
        (
            "listener.name.other.max.connections",
            "there is no listener other; there are plaintext",
        ),
    ],
)
def test_what_is_set_for_a_listener_without_effect_is_a_warning(name, reason):
    (warning,) = load({name: "5"}).warnings
    assert warning.startswith(f"{name} has no effect: {reason}")
    assert warning.endswith(" (the command line)")


def test_explain_says_why_a_listener_cannot_have_its_own():
    with pytest.raises(ConfigError, match=r"node\.id cannot be set for one listener"):
        explain("listener.name.x.node.id", load({}))


def test_replication_factors_above_one_are_a_warning():
    warnings = load({"offsets.topic.replication.factor": "3"}).warnings
    (warning,) = warnings
    assert warning.startswith("offsets.topic.replication.factor=3 has no effect:")


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listeners", "complaint"),
    [
        ("", "must be a comma-separated list, non-empty"),
        ("PLAINTEXT", "unable to parse 'PLAINTEXT' to a broker endpoint"),
        ("PLAINTEXT://h:x", "unable to parse"),
        ("PLAINTEXT://::1:9092", "unable to parse"),
        ("PLAINTEXT://h:65536", "port 65536 is above 65535"),
        ("PLAINTEXT://[zz]:1", "'zz' is not an IPv6 address"),
        ("PLAINTEXT://-h:1", "neither an IPv4 address nor a host name"),
        ("OTHER://h:1", "add OTHER:PLAINTEXT to listener.security.protocol.map"),
        ("PLAINTEXT://a:1,plaintext://b:2", "PLAINTEXT is there twice"),
        ("PLAINTEXT://unix:kafka.sock", "needs a whole path"),
        ("PLAINTEXT://unix:/run/", "needs a whole path"),
        ("PLAINTEXT://unix:/" + 107 * "x", "the path has 108 bytes"),
        ("OTHER://unix:/x", "add OTHER:PLAINTEXT to listener.security.protocol.map"),
        ("SSL://unix:/x", "SSL is not served on a Unix socket"),
        ("PLAINTEXT://unix:/x,SSL://unix:/x", "/x is there twice"),
    ],
)
def test_listeners_that_cannot_be_served_are_refused(listeners, complaint):
    assert complaint in refusal(listeners=listeners)


def test_a_unix_socket_is_a_listener_that_is_told_as_its_path():
    config = load(
        {
            "listeners": "plaintext://h:1,local://unix:/run/x.sock",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LOCAL:PLAINTEXT",
        }
    )
    _, endpoint = config.endpoints
    assert endpoint.path == "/run/x.sock" and endpoint.is_loopback
    assert endpoint.connection_string == "LOCAL://unix:/run/x.sock"
    assert config.advertised["LOCAL"] == ("unix:/run/x.sock", 0)
    assert config.advertised["PLAINTEXT"] == ("", 0)


@pytest.mark.parametrize(
    ("first", "second", "accepted"),
    [
        ("127.0.0.1:9092", "[::1]:9092", True),
        ("127.0.0.1:9092", "127.0.0.2:9092", False),
        ("localhost:9092", "[::1]:9092", False),
        ("127.0.0.1:9092", "[::1]:9093", True),
        ("127.0.0.1:0", "127.0.0.1:0", True),
    ],
)
def test_only_one_ipv4_and_one_ipv6_address_share_a_port(first, second, accepted):
    settings = {
        "listeners": f"A://{first},B://{second}",
        "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT",
    }
    if accepted:
        assert len(load(settings).endpoints) == 2
    else:
        with pytest.raises(ConfigError, match="each needs its own port"):
            load(settings)


@pytest.mark.parametrize(
    ("advertised", "complaint"),
    [
        ("PLAINTEXT://0.0.0.0:9092", "clients cannot connect to 0.0.0.0"),
        ("PLAINTEXT://[::]:9092", "clients cannot connect to ::"),
        ("SSL://h:1", "SSL is not among the listeners PLAINTEXT"),
        ("PLAINTEXT://a:1,PLAINTEXT://b:1", "given twice"),
    ],
)
def test_addresses_that_clients_cannot_use_are_refused(advertised, complaint):
    assert complaint in refusal(advertised_listeners=advertised)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"queued_max_request_bytes": "5"}, "below socket.request.max.bytes=104857600"),
        ({"log_dirs": "/a,/a"}, "named twice"),
        ({"log_dirs": ","}, "log.dirs: no directory is named"),
        ({"log_dirs": "/a/\udcff"}, "log.dirs: '/a/\\udcff' is not UTF-8"),
        ({"log_retention_ms": "0"}, "-1, or 1 or more"),
        ({"log_retention_hours": "0"}, "-1, or 1 or more"),
        ({"group_min_session_timeout_ms": "9999999"}, "group.max.session.timeout.ms"),
        ({"inter_broker_listener_name": "X"}, "not among the listeners PLAINTEXT"),
        ({"max_connections_per_ip_overrides": "a:b"}, "each as host:count"),
        ({"listener_security_protocol_map": "A"}, "'A' is not NAME:PROTOCOL"),
        ({"listener_security_protocol_map": "A:B"}, "unknown security protocol"),
        ({"listener_security_protocol_map": "A:SSL,a:SSL"}, "A is given twice"),
        ({"log_cleanup_policy": "keep"}, "comma-separated list of compact, delete"),
    ],
)
def test_settings_that_contradict_are_refused(settings, complaint):
    assert complaint in refusal(**settings)


TWO_LISTENERS = {
    "listeners": "A://127.0.0.1:0,B://127.0.0.1:0",
    "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT",
}


@pytest.mark.parametrize(
    ("more", "name", "limit"),
    [
        ({}, "num.io.threads", "between 1 and 119"),
        ({"control.plane.listener.name": "B"}, "num.io.threads", "between 1 and 118"),
        (
            {},
            "num.network.threads",
            "between 1 and 32, since 2 listeners share at most",
        ),
        (
            {"listener.name.a.num.network.threads": "10"},
            "num.network.threads",
            "between 1 and 54, since 2 listeners share at most 64",
        ),
    ],
)
def test_all_that_is_said_about_a_setting_names_one_limit(more, name, limit):
    settings = {**TWO_LISTENERS, **more}
    for text in ("0", "99999", "four"):
        with pytest.raises(ConfigError, match=f"^{name}={text}: .*{limit}"):
            load({**settings, name: text})
    assert limit in explain(name, load(settings)).limit


def test_a_listeners_own_processors_may_be_more_than_each_may_have():
    config = load({**TWO_LISTENERS, "listener.name.a.num.network.threads": "14"})
    assert config.own_processors() == {"A": 14}
    now = DynamicConfig(
        config, lambda name: {"listener.name.a.num.network.threads": "12"}
    )
    assert now.own_of_listener("A", "num.network.threads") == 12
    with pytest.raises(ConfigError, match=r"^listener\.name\.a\..*between 1 and 64"):
        load({**TWO_LISTENERS, "listener.name.a.num.network.threads": "65"})


def test_listeners_with_too_many_processors_of_their_own_are_refused():
    with pytest.raises(ConfigError, match="64 processors for 1 of 2 listeners"):
        load({**TWO_LISTENERS, "listener.name.a.num.network.threads": "64"})


# -- cores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("1000000 100000", 8),
        ("garbage", 8),
    ],
)
def test_a_cgroup_quota_limits_the_cores(tmp_path, quota, cores):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text(quota)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    found = available_cores(
        affinity=8, cgroup_root=tmp_path, cgroup_of_process=membership
    )
    assert found == cores


def test_a_cgroup_quota_of_version_1_limits_the_cores(tmp_path):
    group = tmp_path / "cpu,cpuacct" / "x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000")
    (group / "cpu.cfs_period_us").write_text("100000")
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/x\n2:cpu,cpuacct:/x\n")
    found = available_cores(
        affinity=8, cgroup_root=tmp_path, cgroup_of_process=membership
    )
    assert found == 3


def test_without_cgroups_the_affinity_decides(tmp_path):
    found = available_cores(
        affinity=5, cgroup_root=tmp_path, cgroup_of_process=tmp_path / "none"
    )
    assert found == 5
    assert available_cores() >= 1


# -- explain --------------------------------------------------------------------------


def test_explain_tells_meaning_limits_and_where_the_value_comes_from():
    config = load({"log.retention.ms": "5"})
    text = explain("log.retention.ms", config).text()
    assert "5, from the command line" in text
    assert "topic key   retention.ms" in text
    assert explain("retention.ms").related == (
        "log.retention.ms",
        "log.retention.minutes",
        "log.retention.hours",
    )
    assert explain("broker.id").name == "node.id"


@pytest.mark.parametrize("cores", [1, 2, 4, 64])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("num.network.threads", "half the cores available, at least 1 and at most 3"),
        ("num.io.threads", "the cores available, at least 2 and at most 8"),
        ("log.dirs", "$STATE_DIRECTORY, which systemd sets, else"),
        ("otlp.timeout.ms", "$OTEL_EXPORTER_OTLP_METRICS_TIMEOUT, else"),
    ],
)
def test_explain_tells_a_computed_default_and_the_rule_behind_it(cores, name, rule):
    config = load(cores=cores)
    explained = explain(name, config)
    assert explained.default == explained.value
    assert f"Default: {rule}" in explained.documentation
    assert f"default     {explained.default} on this machine\n" in explained.text()
    assert f"Default: {rule}" in BROKER_CONFIG_DEF.key(name).documentation


@pytest.mark.parametrize("prefix", ["", "listener.name.x."])
def test_explain_says_of_which_machine_a_computed_default_is(prefix):
    name = f"{prefix}num.network.threads"
    text = explain(name).text()
    assert "default     1 on a machine with one core\n" in text
    assert "default     2 on this machine\n" in explain(name, load(cores=4)).text()
    assert "this machine" not in text


def test_explain_tells_what_counts_where_a_setting_is_not_set():
    text = explain("log.retention.ms", load({})).text()
    assert "if not set  log.retention.minutes, then log.retention.hours" in text
    assert explain("log.retention.minutes").instead == ("log.retention.hours",)
    assert explain("log.retention.hours").instead == ()
    assert explain("log.segment.bytes").instead == ()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("listener.name.x.ssl.keystore.location", "ssl.keystore.location"),
        ("listener.name.x.plain.sasl.jaas.config", "sasl.jaas.config"),
        (
            "listener.name.x.plain.connections.max.reauth.ms",
            "connections.max.reauth.ms",
        ),
    ],
)
def test_explain_knows_a_key_by_what_sets_it_for_one_listener(name, key):
    explained = explain(name, load({}))
    assert (explained.name, explained.value) == (key, None)


def test_explain_says_what_has_no_effect_here():
    with pytest.raises(ConfigError, match=r"^zookeeper\.connect has no effect in"):
        explain("zookeeper.connect", load({}))
    with pytest.raises(ConfigError, match=r"unknown setting .listener\.name\.x\.foo."):
        explain("listener.name.x.foo", load({}))


def test_metrics_of_kafkas_have_no_effect_and_ours_are_not_misspelt_unseen():
    (warning,) = load({"metrics.num.samples": "2"}).warnings
    assert warning.startswith("metrics.num.samples has no effect")
    with pytest.raises(ConfigError, match=r"did you mean metrics\.listeners\?"):
        load({"metrics.listener": "HTTP://127.0.0.1:0"})


def test_explain_hides_what_a_url_lets_in_with():
    given = {"otlp.endpoint": "http://collector/v1/metrics?token=hunter2"}
    by_environment = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": given["otlp.endpoint"]}
    for config in (load(given), load(environ=by_environment)):
        explained = explain("otlp.endpoint", config)
        assert explained.value == "http://collector/v1/metrics?token=[hidden]"
        assert "hunter2" not in str(explained)
    assert explain("otlp.endpoint", load({})).value is None


def test_explain_hides_passwords_and_offers_near_spellings():
    config = load({"ssl.key.password": "hunter2"})
    assert "hunter2" not in explain("ssl.key.password", config).text()
    config = load(environ={"OTEL_EXPORTER_OTLP_HEADERS": "x=hunter2"})
    explained = explain("otlp.headers", config)
    assert explained.default == explained.value == "[hidden]"
    assert "hunter2" not in explained.text()
    assert explain("ssl.key.password", config).default is None
    with pytest.raises(ConfigError, match=r"did you mean retention\.ms\?"):
        explain("retention.mss")


def test_loading_the_configuration_imports_nothing_slow():
    code = (
        "import sys; from mpbroker.config import BrokerConfig;"
        "BrokerConfig.load({}, None, {}, cores=1);"
        "print([m for m in ('asyncio', 'dataclasses', 'difflib', 'inspect',"
        " 'textwrap', 'tomllib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


# -- security -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listeners", "warning"),
    [
        ("PLAINTEXT://127.0.0.1:1,SASL_PLAINTEXT://[::1]:2,SSL://:3", None),
        ("PLAINTEXT://localhost:1,SASL_SSL://0.0.0.0:2", None),
        ("PLAINTEXT://:9092", "may read and write everything, unencrypted"),
        ("PLAINTEXT://192.0.2.1:9092", "may read and write everything, unencrypted"),
        ("SASL_PLAINTEXT://[::]:9092", "nothing that is sent there is encrypted"),
    ],
)
def test_a_listener_that_is_open_to_others_is_warned_of(listeners, warning):
    warnings = load({"listeners": listeners}).warnings
    assert len(warnings) == (warning is not None)
    assert warning is None or (warning in warnings[0] and listeners in warnings[0])


def test_a_setting_of_sasl_may_be_of_one_mechanism_of_one_listener():
    config = load(
        {
            **TWO_LISTENERS,
            "connections.max.reauth.ms": "1000",
            "listener.name.a.connections.max.reauth.ms": "2000",
            "listener.name.a.scram-sha-256.connections.max.reauth.ms": "3000",
            "listener.name.a.plain.sasl.jaas.config": "secret",
        }
    )
    key = "connections.max.reauth.ms"
    assert config.for_mechanism("A", "SCRAM-SHA-256", key) == 3000
    assert config.for_mechanism("A", "PLAIN", key) == 2000
    assert config.for_mechanism("B", "PLAIN", key) == 1000
    assert config.for_mechanism("A", "PLAIN", "sasl.jaas.config") == "secret"
    assert config.for_mechanism("A", "OAUTHBEARER", "sasl.jaas.config") is None
    assert not config.warnings


def security_of(settings, dynamic=()):
    listener = {
        "listeners": "A://127.0.0.1:0",
        "listener.security.protocol.map": "A:SASL_PLAINTEXT",
        "listener.name.a.sasl.enabled.mechanisms": "PLAIN,OAUTHBEARER",
    }
    config = load({**listener, **settings})
    now = DynamicConfig(config, lambda name: {} if name else dict(dynamic))
    sasl = security_settings(now, config.endpoints[0]).sasl
    assert sasl is not None and sasl.jwt is not None
    return sasl


def test_whose_tokens_are_good_may_be_said_of_the_mechanism_alone():
    of_listener, of_mechanism = "listener.name.a", "listener.name.a.oauthbearer"
    audience = "sasl.oauthbearer.expected.audience"
    settings = {
        f"{of_mechanism}.sasl.oauthbearer.jwks.endpoint.url": "file:///keys",
        f"{of_listener}.{audience}": "others",
        f"{of_mechanism}.{audience}": "mpbroker",
        f"{of_mechanism}.sasl.oauthbearer.expected.issuer": "https://issuer",
        "listener.name.a.plain.sasl.plain.users.file": "/users",
    }
    sasl = security_of(settings)
    assert sasl.jwt.jwks_url == "file:///keys"
    assert sasl.jwt.expected_audience == ("mpbroker",)
    assert sasl.jwt.expected_issuer == "https://issuer"
    assert sasl.plain_users_file == "/users"
    sasl = security_of(settings, {f"{of_mechanism}.{audience}": "now"})
    assert sasl.jwt.expected_audience == ("now",)
