"""Where metrics are pushed, and how: our settings and OpenTelemetry's variables."""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.config.metrics_settings import parse_headers, parse_otlp_endpoint
from mpbroker.exporter import otlp_push
from mpbroker.exporter.otlp_push import Target


def load(environ=None, **settings):
    texts = {key.replace("_", "."): value for key, value in settings.items()}
    environ = {"HOME": "/tmp", **(environ or {})}
    return BrokerConfig.load(texts, None, environ, cores=2)


def test_unless_somebody_asks_for_it_nothing_is_pushed():
    assert load().otlp_endpoint is None
    assert otlp_push.target_of(load(), {}) is None


def test_opentelemetrys_own_variables_are_the_defaults():
    config = load(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=k%3D1",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_METRIC_EXPORT_INTERVAL": "15000",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,team=a%20b",
            "OTEL_SERVICE_NAME": "flights",
        }
    )
    assert config.otlp_interval_ms == 15_000
    target = otlp_push.target_of(config, {"cluster_id": "abc", "version": "1.2"})
    assert target == Target(
        "http://collector:4318/v1/metrics",
        {"api-key": "k=1"},
        2.5,
        {
            "service.name": "flights",
            "service.version": "1.2",
            "service.instance.id": "abc/1",
            "deployment.environment.name": "test",
            "team": "a b",
        },
        compresses=True,
    )


def test_the_more_special_variable_and_a_setting_win():
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4318",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:4318/in",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "2",
    }
    assert load(environ).otlp_endpoint == "http://metrics:4318/in"
    assert load(environ).otlp_timeout_ms == 2
    assert load(environ, otlp_endpoint="http://own/").otlp_endpoint == "http://own/"
    assert load({**environ, "OTEL_SDK_DISABLED": "true"}).otlp_endpoint is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:4318/v1/metrics", (False, "127.0.0.1", 4318, "/v1/metrics")),
        ("https://collector", (True, "collector", 443, "/")),
        ("HTTP://[::1]:80/x?y=1", (False, "::1", 80, "/x?y=1")),
    ],
)
def test_endpoints_are_urls(text, expected):
    assert parse_otlp_endpoint(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://a:99999/",
        "http://u:p@a/",
    ],
)
def test_what_is_no_url_is_refused_at_the_start(text):
    with pytest.raises(ConfigError, match=r"otlp\.endpoint"):
        load(otlp_endpoint=text)


def test_what_is_refused_as_an_endpoint_shows_no_password():
    for text in ("http://u:secret@a/", "ftp://a/?key=secret", "u:secret@a"):
        with pytest.raises(ConfigError, match=r"otlp\.endpoint") as caught:
            load(otlp_endpoint=text)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "secret",
        "a b=secret",
        "=secret",
        "a=secret%0d%0ab",
        "authorization:secret=",  # as it would be written in HTTP
        "a=secret%E2%82%AC",  # not of latin-1
        "Host=secret",
        "content-length=secret",
        "Transfer-Encoding=secret",
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match=r"otlp\.headers: item 1") as caught:
        load(otlp_endpoint="http://a/", otlp_headers=text)
    assert "secret" not in str(caught.value)
    config = load(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_HEADERS": text}
    )
    assert config.otlp_endpoint and config.otlp_headers is None
    [warning] = config.warnings
    assert warning.startswith("OTEL_EXPORTER_OTLP_HEADERS is not used: otlp.headers: ")
    assert "secret" not in warning


def test_of_a_header_that_comes_twice_the_last_counts():
    assert parse_headers("a=1, b = 2 ,,A=%C3%BC,") == {"a": "ü", "b": "2"}
    assert parse_headers(None) == {}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://u:secret@collector:4318"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "collector"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "50"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team"),
        ("OTEL_SERVICE_NAME", "a\nb"),
    ],
)
def test_what_the_environment_has_and_cannot_be_used_is_a_warning(variable, text):
    config, bare = load({variable: text}), load()
    [warning] = config.warnings
    assert warning.startswith(f"{variable} is not used: otlp.")
    assert "secret" not in warning
    assert config.broker_values() == bare.broker_values()


def test_a_setting_makes_the_variable_and_its_warning_go_away():
    assert not load({"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, otlp_timeout_ms="5").warnings


def test_the_general_variable_stands_in_for_a_special_one_that_cannot_be_used():
    config = load(
        {
            "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "10s",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        }
    )
    assert config.otlp_timeout_ms == 2500 and len(config.warnings) == 1


def test_commas_too_many_and_services_with_commas_are_no_harm():
    config = load(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a",
            "OTEL_EXPORTER_OTLP_HEADERS": "x=1,",
            "OTEL_RESOURCE_ATTRIBUTES": "team=a,,",
            "OTEL_SERVICE_NAME": "50%25, all",
        }
    )
    assert not config.warnings
    target = otlp_push.target_of(config, {})
    assert target is not None and target.headers == {"x": "1"}
    assert target.resource["team"] == "a"
    assert target.resource["service.name"] == "50%25, all"
    assert config.otlp_resource_attributes[0] == "team=a"


@pytest.mark.parametrize("exporters", ["none", "prometheus,console"])
def test_who_asks_for_other_exporters_gets_no_push(exporters):
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318",
        "OTEL_METRICS_EXPORTER": exporters,
    }
    config = load(environ)
    assert config.otlp_endpoint is None and not config.warnings
    environ["OTEL_METRICS_EXPORTER"] = "console, otlp"
    assert load(environ).otlp_endpoint == "http://a:4318/v1/metrics"


def test_an_endpoint_of_grpc_is_not_taken():
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    config = load(environ)
    assert config.otlp_endpoint is None
    [warning] = config.warnings
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is not used" in warning and "gRPC" in warning
    environ["OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"] = "http/protobuf"
    assert load(environ).otlp_endpoint == "http://a:4317/v1/metrics"


def test_a_timeout_that_no_socket_takes_is_refused():
    assert load(otlp_timeout_ms="3600000").otlp_timeout_ms == 3_600_000
    for text in ("3600001", str(1 << 62)):
        with pytest.raises(ConfigError, match=r"otlp\.timeout\.ms"):
            load(otlp_timeout_ms=text)
