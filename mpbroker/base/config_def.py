"""Definitions of configuration keys: type, default, limits, documentation.

A small version of Kafka's ConfigDef. A value is given as text (command line, file,
request, metadata log), and its key parses it into the key's type. An error names the
key, the value and the limits.

Source: Kafka's ConfigDef; the "Configuration" chapter of its documentation, for the
texts that each type accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Final, Self, TypedDict, Unpack

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple

LONG_MAX: Final = 2**63 - 1
INT_MAX: Final = 2**31 - 1
HIDDEN: Final = "[hidden]"  # shown in the place of a password


class ConfigError(MpbrokerError):
    """A setting cannot be used; the text names it and says what to do."""


class ConfigType(Enum):
    """The type of a key's value, with its number in DescribeConfigs v3 and later."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class UpdateMode(Enum):
    """How a value may change while the broker serves, in Kafka's words."""

    READ_ONLY = "read-only"  # not at all
    PER_BROKER = "per-broker"  # for one listener of one broker
    CLUSTER_WIDE = "cluster-wide"  # for one broker or for all


class Importance(Enum):
    """How often users need the key."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


# The types that parse() returns.
type_of: Final[Mapping[ConfigType, type]] = {
    ConfigType.BOOLEAN: bool,
    ConfigType.STRING: str,
    ConfigType.INT: int,
    ConfigType.SHORT: int,
    ConfigType.LONG: int,
    ConfigType.DOUBLE: float,
    ConfigType.LIST: tuple,
    ConfigType.CLASS: str,
    ConfigType.PASSWORD: str,
}

ConfigValue = bool | int | float | str | tuple[str, ...] | None

_BITS: Final = {ConfigType.SHORT: 16, ConfigType.INT: 32, ConfigType.LONG: 64}


class Validator(NamedTuple):
    """A limit of a key's values.

    Attributes:
        limit: the limit in words, as the end of the sentence "it must be ...".
        accepts: returns whether a value is within the limit.
    """

    limit: str
    accepts: Callable[[ConfigValue], bool]


def at_least(lowest: int) -> Validator:
    """Return a validator that accepts ``lowest`` and larger numbers."""
    return Validator(f"{lowest} or more", lambda value: _number(value) >= lowest)


def between(lowest: float, highest: float) -> Validator:
    """Return a validator that accepts numbers from ``lowest`` up to ``highest``.

    Both are included.
    """
    return Validator(
        f"between {lowest} and {highest}",
        lambda value: lowest <= _number(value) <= highest,
    )


def one_of(*choices: str) -> Validator:
    """Return a validator that accepts the strings in ``choices`` only."""
    return Validator("one of " + ", ".join(choices), lambda value: value in choices)


def list_of(*choices: str) -> Validator:
    """Return a validator that accepts lists of ``choices``, the empty list too."""
    return Validator(
        "a comma-separated list of " + ", ".join(choices),
        lambda value: isinstance(value, tuple) and set(value) <= set(choices),
    )


def some_of(*choices: str) -> Validator:
    """Return a validator that accepts lists of one or more of ``choices``."""
    either = list_of(*choices)
    return Validator(
        f"{either.limit}, one at least",
        lambda value: bool(value) and either.accepts(value),
    )


def not_empty() -> Validator:
    """Return a validator that accepts strings and lists that are not empty."""
    return Validator("non-empty", lambda value: bool(value))


def utf8(most_bytes: int = 0x7FFF) -> Validator:
    """Return a validator that accepts strings which Kafka's protocol can carry."""
    return Validator(
        f"UTF-8 of at most {most_bytes} bytes",
        # Python turns a byte of an argument that is not UTF-8 into a lone surrogate.
        lambda value: (
            len(str(value).encode("utf-8", "replace")) <= most_bytes
            and not any("\ud800" <= letter <= "\udfff" for letter in str(value))
        ),
    )


def minus_one_or(other: Validator) -> Validator:
    """Return a validator that accepts -1 and all values that ``other`` accepts.

    In Kafka -1 stands for no limit, or for the default.
    """
    return Validator(
        f"-1, or {other.limit}", lambda value: value == -1 or other.accepts(value)
    )


def _number(value: ConfigValue) -> float:
    assert isinstance(value, int | float)
    return value


if TYPE_CHECKING:

    class Columns(TypedDict, total=False):
        """The arguments of a ConfigKey that may be left out; it has their meanings."""

        validator: Validator | None
        not_above: str
        importance: Importance
        update_mode: UpdateMode
        aliases: tuple[str, ...]
        since: str
        is_url: bool
        has_effect: bool
        holds_anyway: str
        per_listener: bool | Validator
        per_mechanism: bool
        only_per_listener: bool


NO_EFFECT: Final = "Has no effect, and is accepted for files and tools made for Kafka."


class ConfigKey:
    """One key: its name, type, default and meaning.

    A key is one row of a table of settings. The columns that a row may leave out:

        validator: limits of the value, beside those of the type.
        not_above: the key whose value this key's value must not exceed.
        importance: how often users need the key.
        update_mode: how the value may change while the broker serves.
        aliases: other names of the key.
        since: the release that had the key first.
        is_url: whether the value is a URL, which may hold a password or a token.
        has_effect: whether anything reads the value. If not, the meaning is the reason,
            and the documentation says first that there is no effect.
        holds_anyway: for a key without effect, the value that describes what the broker
            does anyway; if it is set, no warning is logged.
        per_listener: whether ``listener.name.NAME.KEY`` sets a value for one listener;
            a validator if that value has other limits.
        per_mechanism: whether ``listener.name.NAME.MECHANISM.KEY`` sets a value for one
            SASL mechanism of a listener.
        only_per_listener: whether a running broker takes a new value for one listener
            only, and not for all (Kafka's DYNAMIC_SECURITY_CONFIGS).
    """

    validator: Validator | None = None
    not_above: str = ""
    importance: Importance = Importance.MEDIUM
    update_mode: UpdateMode = UpdateMode.READ_ONLY
    aliases: tuple[str, ...] = ()
    since: str = "0.1"
    is_url: bool = False
    has_effect: bool = True
    holds_anyway: str = ""
    per_listener: bool | Validator = False
    per_mechanism: bool = False
    only_per_listener: bool = False

    def __init__(
        self,
        name: str,
        type: ConfigType,
        default: ConfigValue,
        documentation: str,
        **columns: Unpack[Columns],
    ) -> None:
        self.name = name
        self.type = type
        self.default = default
        self.meaning = documentation
        if columns:
            self.__dict__.update(columns)

    @property
    def documentation(self) -> str:
        """The text for users: the meaning, behind a notice if the key has no effect."""
        return self.meaning if self.has_effect else f"{NO_EFFECT} {self.meaning}"

    @property
    def attribute(self) -> str:
        """The name as a Python attribute, such as num_io_threads for num.io.threads."""
        return self.name.replace(".", "_")

    @property
    def is_sensitive(self) -> bool:
        """Whether the value must never be shown."""
        return self.type is ConfigType.PASSWORD

    @property
    def limit(self) -> str:
        """The limits of a value, as the end of the sentence "it must be ..."."""
        told = kind = _KIND[self.type]
        if self.validator is not None:
            limit = self.validator.limit
            told = limit if limit.startswith(kind) else f"{kind}, {limit}"
        return f"{told}, not above {self.not_above}" if self.not_above else told

    def parse(self, text: str) -> ConfigValue:
        """Return the value that a text stands for.

        Raises:
            ConfigError: the text is not of the key's type, or the value is outside its
                limits.
        """
        value = self._parse_type(text)
        self.check(value)
        return value

    def check(self, value: ConfigValue) -> None:
        """Raise ConfigError if a value of the right type is outside the limits."""
        if self.validator is not None and not self.validator.accepts(value):
            raise self._refusal(self.format(value))

    def format(self, value: ConfigValue) -> str | None:
        """Return the text that parse() turns into ``value``; None for None."""
        if value is None:
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)

    def shown(self, text: str) -> str:
        """Return a value's text as it may be shown: secrets in it are hidden."""
        if self.is_sensitive:
            return HIDDEN
        return without_credentials(text) if self.is_url else text

    def with_default(self, default: ConfigValue) -> Self:
        """Return this key with another default."""
        return self._with(default=default)

    def with_validator(self, validator: Validator) -> Self:
        """Return this key with other limits."""
        return self._with(validator=validator)

    def of_listener(self) -> Self:
        """Return this key with the limits of a value for one listener."""
        if isinstance(self.per_listener, Validator):
            return self.with_validator(self.per_listener)
        return self

    def _with(self, **columns: object) -> Self:
        key = object.__new__(type(self))
        key.__dict__.update(self.__dict__, **columns)
        return key

    def _parse_type(self, text: str) -> ConfigValue:
        text = text.strip()
        if self.type is ConfigType.BOOLEAN:
            return self._parse_boolean(text)
        if self.type in _BITS:
            return self._parse_integer(text, _BITS[self.type])
        if self.type is ConfigType.DOUBLE:
            return self._parse_double(text)
        if self.type is ConfigType.LIST:
            return tuple(item.strip() for item in text.split(",")) if text else ()
        return text

    def _parse_boolean(self, text: str) -> bool:
        lowered = text.lower()
        if lowered not in ("true", "false"):
            raise self._refusal(text)
        return lowered == "true"

    def _parse_integer(self, text: str, bits: int) -> int:
        # int() alone accepts "1_000", " 5" and Arabic digits, too, and takes long for a
        # megabyte of digits.
        digits = text[1:] if text[:1] in ("-", "+") else text
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise self._refusal(text)
        value = int(text)
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise self._refusal(text)
        return value

    def _parse_double(self, text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else None
        except ValueError:
            value = None
        if value is None or not isfinite(value):
            raise self._refusal(text)
        return value

    def _refusal(self, text: str | None) -> ConfigError:
        if text is not None and len(text) > 100:
            text = text[:100] + "..."
        default = "" if self.default is None else f" (default {self._default_text})"
        return ConfigError(
            f"{self.name}={self.shown(str(text))}: not accepted;"
            f" it must be {self.limit}{default}"
        )

    @property
    def _default_text(self) -> str:
        if self.default in ("", ()):
            return "empty"
        return self.shown(str(self.format(self.default)))


def without_credentials(url: str) -> str:
    """Return a URL with its user, its password and the values of its query hidden."""
    where, asks, query = url.partition("?")
    scheme, slashes, rest = where.partition("://")
    if not slashes:
        scheme, rest = "", where
    # The last "@": a password that was not encoded may contain one, too.
    user, at, place = rest.rpartition("@")
    items = [
        name + equals + HIDDEN if equals else item and HIDDEN
        for item in query.split("&")
        for name, equals, _ in [item.partition("=")]
    ]
    shown = HIDDEN + at + place if user else rest
    return scheme + slashes + shown + asks + "&".join(items)


_KIND: Final[Mapping[ConfigType, str]] = {
    ConfigType.BOOLEAN: "true or false",
    ConfigType.STRING: "a string",
    ConfigType.INT: "a whole number of 32 bits",
    ConfigType.SHORT: "a whole number of 16 bits",
    ConfigType.LONG: "a whole number of 64 bits",
    ConfigType.DOUBLE: "a number",
    ConfigType.LIST: "a comma-separated list",
    ConfigType.CLASS: "the name of a class",
    ConfigType.PASSWORD: "a password",
}


LISTENER_PREFIX: Final = "listener.name."


# A check of all dynamic configs together. Its arguments: the texts set for one broker
# by key, those set for all brokers, and the names whose values are new or removed.
Together = Callable[[Mapping[str, str], Mapping[str, str], Collection[str]], None]


class UnusableConfigError(ConfigError):
    """A value has the right form, and cannot be used: a file does not exist, say."""


def _nothing_to_check(
    own: Mapping[str, str], of_all: Mapping[str, str], touched: Collection[str]
) -> None:
    """Check nothing: for groups of keys without rules across several keys."""


class ListenerSetting(NamedTuple):
    """A key that is set for one listener.

    Attributes:
        listener: the listener's name, as it is written in the setting.
        key: the key, with the limits of a value for one listener.
        mechanism: the SASL mechanism for which the key is set; "": all mechanisms.
    """

    listener: str
    key: ConfigKey
    mechanism: str


class ConfigDef:
    """The configuration keys of one kind of object, such as a broker or a topic."""

    def __init__(self, what: str, keys: Iterable[ConfigKey]) -> None:
        """Make a definition of some keys.

        Args:
            what: the word for a key in errors, such as "topic config".
            keys: the keys.
        """
        self._what = what
        self.check_together: Together = _nothing_to_check
        self._keys = {key.name: key for key in keys}
        self._aliases = {
            alias: key.name for key in self._keys.values() for alias in key.aliases
        }

    def __iter__(self) -> Iterator[ConfigKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys or name in self._aliases

    def get(self, name: str) -> ConfigKey | None:
        """Return the key with this name or alias, or None."""
        return self._keys.get(self._aliases.get(name, name))

    def key(self, name: str) -> ConfigKey:
        """Return the key with this name or alias.

        Raises:
            ConfigError: there is no such key; the text offers the nearest spelling.
        """
        key = self.get(name)
        if key is None:
            raise ConfigError(self._unknown(name))
        return key

    def of_listener(self, name: str) -> ListenerSetting | None:
        """Parse a name of the form ``listener.name.NAME.[MECHANISM.]KEY``.

        Returns:
            The listener, the key and the mechanism; None if the name has another form,
            or if the key cannot be set for a listener.
        """
        if not name.startswith(LISTENER_PREFIX):
            return None
        listener, _, rest = name.removeprefix(LISTENER_PREFIX).partition(".")
        key, mechanism = self._keys.get(rest), ""
        if key is None:
            mechanism, _, rest = rest.partition(".")
            key = self._keys.get(rest)
            if key is not None and not key.per_mechanism:
                return None
        if not listener or key is None or not key.per_listener:
            return None
        return ListenerSetting(listener, key.of_listener(), mechanism)

    def check_order(self, value: Callable[[str], ConfigValue]) -> None:
        """Check each value that must not exceed another value.

        Args:
            value: returns a key's value by its name.

        Raises:
            ConfigError: a value is above the other one.
        """
        for key in self._keys.values():
            if not key.not_above:
                continue
            low, high = value(key.name), value(key.not_above)
            if isinstance(low, int) and isinstance(high, int) and low > high:
                raise ConfigError(
                    f"{key.name}={low}: above {key.not_above}={high}; lower the first"
                    " or raise the second"
                )

    def with_check(self, check: Together) -> ConfigDef:
        """Return a definition with the same keys and a check across several keys.

        Args:
            check: raises ConfigError if dynamic configs, taken together, cannot be
                used.
        """
        definition = ConfigDef(self._what, self)
        definition.check_together = check
        return definition

    def with_keys(self, keys: Iterable[ConfigKey]) -> ConfigDef:
        """Return a definition in which ``keys`` replace the keys of the same names.

        Keys with new names are added.
        """
        replaced = {**self._keys, **{key.name: key for key in keys}}
        return ConfigDef(self._what, replaced.values())

    def _unknown(self, name: str) -> str:
        import difflib  # imported here: it takes 2 ms, and is needed for errors only

        shown = name if len(name) <= 100 else name[:100] + "..."
        text = f"unknown {self._what} {shown!r}"
        names = [*self._keys, *self._aliases]
        near = difflib.get_close_matches(shown, names, n=1, cutoff=0.75)
        return f"{text}; did you mean {near[0]}?" if near else text
