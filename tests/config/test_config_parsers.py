"""Listeners and files of settings are parsed, or refused with the reason."""

import string

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig, EndPoint

HOSTS = st.one_of(
    st.just(""),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.text(string.ascii_lowercase, min_size=1, max_size=10),
)


def endpoints_of(listeners: str) -> tuple[EndPoint, ...]:
    environ = {"HOME": "/home/x"}
    return BrokerConfig.load({"listeners": listeners}, None, environ, cores=4).endpoints


@given(HOSTS, st.integers(0, 65535))
def test_a_listener_survives_being_parsed_and_written(host, port):
    text = f"PLAINTEXT://{host}:{port}"
    (endpoint,) = endpoints_of(text)
    assert endpoint.connection_string == text


@given(st.text(string.ascii_letters + string.digits + ":/[]%.,-\0 é", max_size=40))
def test_any_listeners_are_parsed_or_refused(text):
    try:
        endpoints = endpoints_of(text)
    except ConfigError:
        return
    assert endpoints


@given(st.text(max_size=200))
def test_any_properties_file_is_parsed_or_refused(text):
    from mpbroker.config.sources import parse_properties

    try:
        settings = parse_properties(text, "file")
    except ConfigError as error:
        assert "escape" in str(error)
        return
    assert len({setting.name for setting in settings}) == len(settings)


@given(st.text(max_size=200))
def test_any_toml_file_is_parsed_or_refused(text):
    from mpbroker.config.sources import parse_toml

    try:
        settings = parse_toml(text, "file")
    except ConfigError:
        return
    assert all(isinstance(setting.text, str) for setting in settings)


def java_escape(text: str) -> str:
    """Write every UTF-16 unit as java.util.Properties.store() may."""
    units = text.encode("utf-16-be")
    return "".join(
        f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2)
    )


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        max_size=4,
    ),
    st.sampled_from(["=", ":", " ", " = ", "\t:\f"]),
    st.sampled_from(["\n", "\r", "\r\n"]),
)
def test_escaped_properties_are_read_as_written(properties, separator, newline):
    from mpbroker.config.sources import parse_properties

    text = newline.join(
        java_escape(name) + separator + java_escape(value)
        for name, value in properties.items()
    )
    settings = parse_properties(text, "file")
    assert {setting.name: setting.text for setting in settings} == properties


def test_properties_are_continued_commented_and_separated_as_in_java():
    from mpbroker.config.sources import parse_properties

    text = (
        "# a\n ! b\n\nx=1,\\\n    2\ny : z\\\\\nkey\\ with\\=odd value with = \nempty"
    )
    settings = [setting[:2] for setting in parse_properties(text, "f")]
    assert settings == [
        ("x", "1,2"),
        ("y", "z\\"),
        ("key with=odd", "value with = "),
        ("empty", ""),
    ]
