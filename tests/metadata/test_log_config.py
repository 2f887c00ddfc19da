"""LogConfig: what a topic's settings are, and which are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import type_of
from mpbroker.metadata.log_config import (
    LogConfig,
    check_still_shared,
    defaults_of_broker,
)
from mpbroker.metadata.log_config_def import (
    BROKER_LOG_DEF,
    BROKER_SYNONYMS,
    LOG_CONFIG_DEF,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


def refusal(**overrides: str) -> str:
    with pytest.raises(ApiError) as caught:
        LogConfig.from_overrides(
            {}, {name.replace("_", "."): text for name, text in overrides.items()}
        )
    assert caught.value.error_code is ErrorCode.INVALID_CONFIG
    return str(caught.value)


def test_every_key_is_an_attribute_with_kafkas_default_and_the_type_mypy_knows():
    config = LogConfig()
    annotations = dict(LogConfig.__annotations__)
    del annotations["overrides"], annotations["_others"]
    expected = {}
    for key in LOG_CONFIG_DEF:
        kind = type_of[key.type]
        name = "tuple[str, ...]" if kind is tuple else kind.__name__
        if key.attribute in annotations:
            expected[key.attribute] = name
        assert getattr(config, key.attribute) == key.default
    assert annotations == expected


@pytest.mark.parametrize("key", list(LOG_CONFIG_DEF), ids=lambda key: key.name)
def test_every_default_passes_its_own_check(key):
    assert key.parse(key.format(key.default)) == key.default


def test_a_topics_own_values_win_over_the_brokers():
    defaults = defaults_of_broker({"log.segment.bytes": 100, "log.preallocate": True})
    config = LogConfig.from_overrides(defaults, {"segment.bytes": "200"})
    assert (config.segment_bytes, config.preallocate) == (200, True)
    assert config.overrides == {"segment.bytes": "200"}
    assert config.value("segment.bytes") == 200


def test_both_cleanup_policies_may_be_given():
    config = LogConfig.from_overrides({}, {"cleanup.policy": "compact, delete"})
    assert config.cleanup_policy == ("compact", "delete")
    assert LogConfig().cleanup_policy == ("delete",)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"retention_m": "5"}, "did you mean retention.ms?"),
        ({"retention_ms": "-2"}, "-1 or more"),
        ({"cleanup_policy": "burn"}, "comma-separated list of compact, delete"),
        ({"compression_type": "brotli"}, "one of uncompressed, zstd"),
        ({"compression_gzip_level": "0"}, "-1, or between 1 and 9"),
        ({"segment_bytes": "1e9"}, "a whole number of 32 bits"),
        ({"remote_storage_enable": "true"}, "remote.log.storage.system.enable=false"),
        ({"min_compaction_lag_ms": "9", "max_compaction_lag_ms": "8"}, "above max"),
    ],
)
def test_what_a_topic_cannot_be_is_refused_as_invalid_config(overrides, complaint):
    assert complaint in refusal(**overrides)


@given(
    st.dictionaries(
        st.sampled_from([key.name for key in LOG_CONFIG_DEF]), st.text(max_size=10)
    )
)
def test_any_overrides_are_taken_or_refused_as_invalid_config(overrides):
    try:
        config = LogConfig.from_overrides({}, overrides)
    except ApiError as error:
        assert error.error_code is ErrorCode.INVALID_CONFIG
        return
    assert config == LogConfig.from_overrides({}, overrides)


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError, match="immutable"):
        LogConfig().segment_bytes = 5
    with pytest.raises(AttributeError, match="immutable"):
        del LogConfig().segment_bytes


def test_configs_are_equal_by_value():
    made = LogConfig.from_overrides({}, {"segment.bytes": "200"})
    assert made == LogConfig.from_overrides({}, {"segment.bytes": "200"})
    assert made != LogConfig()
    assert len({made, LogConfig.from_overrides({}, {"segment.bytes": "200"})}) == 1
    assert repr(made) == "LogConfig({'segment.bytes': '200'})"


def test_every_synonym_belongs_to_a_topic_key_and_to_one_only():
    names = [synonym.name for group in BROKER_SYNONYMS.values() for synonym in group]
    assert set(BROKER_SYNONYMS) <= {key.name for key in LOG_CONFIG_DEF}
    assert sorted(names) == sorted(set(names))
    assert sorted(key.name for key in BROKER_LOG_DEF) == sorted(names)


def test_the_brokers_defaults_are_the_topics_defaults():
    broker = {key.name: key.default for key in BROKER_LOG_DEF}
    topic = {key.name: key.default for key in LOG_CONFIG_DEF}
    assert defaults_of_broker(broker).items() <= topic.items()


@pytest.mark.parametrize(
    ("values", "segment_ms", "jitter_ms"),
    [
        ({"log.roll.hours": 1, "log.roll.jitter.hours": 2}, 3_600_000, 7_200_000),
        ({"log.roll.hours": 1, "log.roll.ms": 7, "log.roll.jitter.ms": 0}, 7, 0),
    ],
)
def test_hours_count_only_where_no_milliseconds_are_set(values, segment_ms, jitter_ms):
    defaults = defaults_of_broker(values)
    assert (defaults["segment.ms"], defaults["segment.jitter.ms"]) == (
        segment_ms,
        jitter_ms,
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({}, ""),
        ({"local.retention.ms": "5", "retention.ms": "-1"}, ""),
        ({"cleanup.policy": "compact,delete"}, "cleanup.policy must be delete"),
        ({"local.retention.ms": "5", "retention.ms": "4"}, "above retention.ms=4"),
        ({"local.retention.bytes": "-1", "retention.bytes": "4"}, "above retention"),
        ({"remote.log.copy.disable": "true"}, ""),
        ({"remote.copy.lag.ms": "604800000", "remote.copy.lag.bytes": "-1"}, ""),
        (
            {"remote.copy.lag.ms": "604800001"},
            "604800001: above local.retention.ms, which is 604800000",
        ),
        (
            {"remote.copy.lag.bytes": "6", "local.retention.bytes": "5"},
            "remote.copy.lag.bytes=6: above local.retention.bytes, which is 5",
        ),
        ({"remote.copy.lag.bytes": "6", "local.retention.bytes": "-1"}, ""),
        (
            {
                "remote.log.copy.disable": "true",
                "local.retention.ms": "5",
                "retention.ms": "5",
            },
            "",
        ),
        (
            {"remote.log.copy.disable": "true", "local.retention.ms": "5"},
            "local.retention.ms=5 has to be -2, or retention.ms=604800000",
        ),
    ],
)
def test_what_a_topic_with_remote_storage_may_be(overrides, says):
    defaults = defaults_of_broker({"remote.log.storage.system.enable": True})
    wanted = {"remote.storage.enable": "true", **overrides}
    if not says:
        assert LogConfig.from_overrides(defaults, wanted).remote_storage_enable
        return
    with pytest.raises(ApiError, match=re.escape(says)) as refused:
        LogConfig.from_overrides(defaults, wanted)
    assert refused.value.error_code == ErrorCode.INVALID_CONFIG


IN_CLUSTER = {"cluster.database.url": "postgresql://here/cluster"}


def test_a_topic_is_shared_only_in_a_cluster():
    assert "set cluster.database.url" in refusal(diskless_enable="true")
    defaults = defaults_of_broker(IN_CLUSTER)
    shared = LogConfig.from_overrides(defaults, {"diskless.enable": "true"})
    assert shared.diskless_enable
    assert not LogConfig.from_overrides(defaults, {}).diskless_enable


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cleanup.policy", "compact"),
        ("remote.storage.enable", "true"),
        ("mirror.source", "other:9092"),
    ],
)
def test_a_shared_topic_cannot_have_what_a_local_log_is_needed_for(key, value):
    defaults = {
        **defaults_of_broker({**IN_CLUSTER, "remote.log.storage.system.enable": True})
    }
    with pytest.raises(ApiError, match=f"diskless.enable=true: {key}") as caught:
        LogConfig.from_overrides(defaults, {"diskless.enable": "true", key: value})
    assert caught.value.error_code is ErrorCode.INVALID_CONFIG


def test_a_topic_stays_shared_or_local_for_as_long_as_it_exists():
    defaults = defaults_of_broker(IN_CLUSTER)
    local = LogConfig.from_overrides(defaults, {})
    shared = LogConfig.from_overrides(defaults, {"diskless.enable": "true"})
    check_still_shared(local, local)
    check_still_shared(shared, shared)
    with pytest.raises(ApiError, match=r"diskless\.enable is false for as long"):
        check_still_shared(local, shared)
    with pytest.raises(ApiError, match=r"diskless\.enable is true for as long"):
        check_still_shared(shared, local)
