"""ConfigDef: texts become checked values, and refusals say what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
    list_of,
    minus_one_or,
    one_of,
    type_of,
)

KEYS = {
    kind: ConfigKey(f"some.{kind.name.lower()}", kind, None, "Some key.")
    for kind in ConfigType
}


def parse(kind: ConfigType, text: str) -> object:
    return KEYS[kind].parse(text)


@given(st.sampled_from(ConfigType), st.text(max_size=30))
def test_any_text_gives_a_value_of_the_keys_type_or_a_config_error(kind, text):
    try:
        value = parse(kind, text)
    except ConfigError as error:
        assert KEYS[kind].name in str(error)
    else:
        assert type(value) is type_of[kind]


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_long_survives_being_written_and_read(value):
    assert parse(ConfigType.LONG, KEYS[ConfigType.LONG].format(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_survives_being_written_and_read(value):
    assert parse(ConfigType.DOUBLE, KEYS[ConfigType.DOUBLE].format(value)) == value


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (ConfigType.INT, " 5 ", 5),
        (ConfigType.INT, "+5", 5),
        (ConfigType.INT, "-2147483648", -(2**31)),
        (ConfigType.BOOLEAN, "TRUE", True),
        (ConfigType.BOOLEAN, "false", False),
        (ConfigType.LIST, "", ()),
        (ConfigType.LIST, " a , b", ("a", "b")),
        (ConfigType.DOUBLE, "1e3", 1000.0),
        (ConfigType.STRING, " text ", "text"),
    ],
)
def test_texts_mean_what_they_mean_to_kafka(kind, text, value):
    assert parse(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConfigType.INT, "2147483648"),
        (ConfigType.SHORT, "32768"),
        (ConfigType.LONG, "9223372036854775808"),
        (ConfigType.INT, "1_000"),
        (ConfigType.INT, "٣"),
        (ConfigType.INT, "5.0"),
        (ConfigType.INT, "9" * 100_000),
        (ConfigType.BOOLEAN, "yes"),
        (ConfigType.DOUBLE, "nan"),
        (ConfigType.DOUBLE, "inf"),
    ],
)
def test_what_the_type_cannot_hold_is_refused(kind, text):
    with pytest.raises(ConfigError, match=KEYS[kind].name) as refusal:
        parse(kind, text)
    assert len(str(refusal.value)) < 300


def test_a_refusal_names_key_value_limit_and_default():
    key = ConfigKey("num.io.threads", ConfigType.INT, 8, "", validator=at_least(1))
    with pytest.raises(ConfigError) as refusal:
        key.parse("0")
    assert str(refusal.value) == (
        "num.io.threads=0: not accepted; it must be a whole number of 32 bits,"
        " 1 or more (default 8)"
    )


def test_a_list_of_names_is_said_to_be_one_once():
    names = list_of("a", "b")
    key = ConfigKey("some.list", ConfigType.LIST, None, "Names.", validator=names)
    assert key.limit == "a comma-separated list of a, b"


def test_a_password_is_never_in_an_error():
    key = ConfigKey(
        "secret", ConfigType.PASSWORD, None, "", validator=list_of("nothing")
    )
    with pytest.raises(ConfigError) as refusal:
        key.parse("hunter2")
    assert "hunter2" not in str(refusal.value)


def test_minus_one_passes_a_limit_that_allows_it():
    key = ConfigKey("x", ConfigType.INT, -1, "", validator=minus_one_or(at_least(10)))
    assert (key.parse("-1"), key.parse("10")) == (-1, 10)
    with pytest.raises(ConfigError, match="-1, or 10 or more"):
        key.parse("9")


def test_an_unknown_key_is_told_its_nearest_spelling():
    definition = ConfigDef(
        "setting",
        [ConfigKey("log.dirs", ConfigType.LIST, (), "", aliases=("log.dir",))],
    )
    with pytest.raises(ConfigError, match=r"did you mean log\.dirs\?"):
        definition.key("logs.dirs")
    with pytest.raises(ConfigError) as refusal:
        definition.key("utterly different")
    assert "did you mean" not in str(refusal.value)
    assert definition.key("log.dir").name == "log.dirs"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host:4318/v1", "https://host:4318/v1"),
        ("https://host/v1?a=b&c", "https://host/v1?a=[hidden]&[hidden]"),
        ("https://host/?a=b=c&&d=", "https://host/?a=[hidden]&&d=[hidden]"),
        ("https://me:pass@host/v1", "https://[hidden]@host/v1"),
        ("https://me:p/a@ss://@host?t", "https://[hidden]@host?[hidden]"),
        ("me:pass@host", "[hidden]@host"),
        ("file:///etc/keys.json", "file:///etc/keys.json"),
        ("", ""),
    ],
)
def test_of_a_url_who_and_with_what_is_hidden(url, shown):
    key = ConfigKey("u", ConfigType.STRING, None, "", is_url=True)
    assert key.shown(url) == key.with_default("").shown(url) == shown


def test_a_refusal_shows_neither_a_password_nor_the_one_that_is_the_default():
    key = ConfigKey("p", ConfigType.PASSWORD, "hunter2", "", validator=one_of("a"))
    with pytest.raises(ConfigError) as caught:
        key.parse("hunter3")
    assert str(caught.value) == (
        "p=[hidden]: not accepted; it must be a password, one of a (default [hidden])"
    )
