"""Definitions of configuration keys: type, default, limits, documentation.

Kafka's ConfigDef, kept small. A value travels as text (command line, file, wire,
metadata log) and is parsed once, here, into the type its key declares; everything
that refuses a value names the key, the value, the limit and the way out.

Source: the "Configuration" chapter of the Apache Kafka documentation, for what the
types accept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypedDict, Unpack

from mpbroker.base.errors import MpbrokerError

LONG_MAX: Final = 2**63 - 1
INT_MAX: Final = 2**31 - 1
HIDDEN: Final = "[hidden]"  # what is shown of a password


class ConfigError(MpbrokerError):
    """A setting that cannot be used; the text says which one and what to do."""


class ConfigType(Enum):
    """Type of a key's value; the number is the one DescribeConfigs v3+ answers."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    PASSWORD = 9


class UpdateMode(Enum):
    """When a new value takes effect, in the words of Kafka's documentation."""

    READ_ONLY = "read-only"
    PER_BROKER = "per-broker"  # and of a listener only
    CLUSTER_WIDE = "cluster-wide"


class Importance(Enum):
    """How often people need the key."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


# What parse() returns: tuple for LIST, None for a key without a value.
type_of: Final[Mapping[ConfigType, type]] = {
    ConfigType.BOOLEAN: bool,
    ConfigType.STRING: str,
    ConfigType.INT: int,
    ConfigType.SHORT: int,
    ConfigType.LONG: int,
    ConfigType.DOUBLE: float,
    ConfigType.LIST: tuple,
    ConfigType.PASSWORD: str,
}

ConfigValue = bool | int | float | str | tuple[str, ...] | None

_BITS: Final = {ConfigType.SHORT: 16, ConfigType.INT: 32, ConfigType.LONG: 64}


class Validator(NamedTuple):
    """A limit on values: its wording, and the test.

    ``limit`` completes the sentence "it must be ...".
    """

    limit: str
    accepts: Callable[[ConfigValue], bool]


def at_least(lowest: int) -> Validator:
    """Accept numbers from ``lowest`` up."""
    return Validator(f"{lowest} or more", lambda value: _number(value) >= lowest)


def between(lowest: float, highest: float) -> Validator:
    """Accept numbers in the closed range."""
    return Validator(
        f"between {lowest} and {highest}",
        lambda value: lowest <= _number(value) <= highest,
    )


def one_of(*choices: str) -> Validator:
    """Accept exactly these strings."""
    return Validator("one of " + ", ".join(choices), lambda value: value in choices)


def list_of(*choices: str) -> Validator:
    """Accept lists all of whose members are among ``choices``."""
    return Validator(
        "a comma-separated list of " + ", ".join(choices),
        lambda value: isinstance(value, tuple) and set(value) <= set(choices),
    )


def some_of(*choices: str) -> Validator:
    """Accept lists of one or more of ``choices``."""
    either = list_of(*choices)
    return Validator(
        f"{either.limit}, one at least",
        lambda value: bool(value) and either.accepts(value),
    )


def not_empty() -> Validator:
    """Accept any string or list that holds something."""
    return Validator("non-empty", lambda value: bool(value))


def utf8(most_bytes: int = 0x7FFF) -> Validator:
    """Accept strings that a message of the protocol can carry."""
    return Validator(
        f"UTF-8 of at most {most_bytes} bytes",
        # What the command line has that is none is half of a pair of surrogates here.
        lambda value: (
            len(str(value).encode("utf-8", "replace")) <= most_bytes
            and not any("\ud800" <= letter <= "\udfff" for letter in str(value))
        ),
    )


def minus_one_or(other: Validator) -> Validator:
    """Accept -1, which in Kafka's keys means "no limit" or "the default"."""
    return Validator(
        f"-1, or {other.limit}", lambda value: value == -1 or other.accepts(value)
    )


def _number(value: ConfigValue) -> float:
    assert isinstance(value, int | float)
    return value


if TYPE_CHECKING:

    class Columns(TypedDict, total=False):
        """The columns that a row may leave out; see ConfigKey for what they mean."""

        validator: Validator | None
        not_above: str
        importance: Importance
        update_mode: UpdateMode
        aliases: tuple[str, ...]
        since: str
        is_url: bool
        has_effect: bool
        per_listener: bool | Validator
        per_mechanism: bool


NO_EFFECT: Final = "Has no effect, and is accepted for files and tools made for Kafka."


class ConfigKey:
    """One key: what it means, what it accepts, and what it is when nobody sets it.

    A key is one row of a table. The columns that a row may leave out:

        validator: limits on values, besides those of the type.
        not_above: the key whose value this one's must not exceed.
        importance: how often people need the key.
        update_mode: when a new value takes effect.
        aliases: other names of the key.
        since: the release that had it first.
        is_url: whether the value is a URL, which may hold a password or a token.
        has_effect: whether anything reads the value. If not, the documentation says
            so before what the row gives as the reason.
        per_listener: whether ``listener.name.NAME.KEY`` sets it for one listener; a
            validator if the limits are others there.
        per_mechanism: whether ``listener.name.NAME.MECHANISM.KEY`` sets it for one
            SASL mechanism of a listener.
    """

    validator: Validator | None = None
    not_above: str = ""
    importance: Importance = Importance.MEDIUM
    update_mode: UpdateMode = UpdateMode.READ_ONLY
    aliases: tuple[str, ...] = ()
    since: str = "0.1"
    is_url: bool = False
    has_effect: bool = True
    per_listener: bool | Validator = False
    per_mechanism: bool = False

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
        """What people are told: the meaning, and if the value has no effect, that."""
        return self.meaning if self.has_effect else f"{NO_EFFECT} {self.meaning}"

    @property
    def attribute(self) -> str:
        """The name as a Python attribute: num.io.threads is num_io_threads."""
        return self.name.replace(".", "_")

    @property
    def is_sensitive(self) -> bool:
        """Whether the value must never be shown."""
        return self.type is ConfigType.PASSWORD

    @property
    def limit(self) -> str:
        """What a value must be, as the end of the sentence "it must be ..."."""
        told = kind = _KIND[self.type]
        if self.validator is not None:
            limit = self.validator.limit
            told = limit if limit.startswith(kind) else f"{kind}, {limit}"
        return f"{told}, not above {self.not_above}" if self.not_above else told

    def parse(self, text: str) -> ConfigValue:
        """Turn text into a checked value.

        Raises:
            ConfigError: not of the key's type, or outside its limits.
        """
        value = self._parse_type(text)
        self.check(value)
        return value

    def check(self, value: ConfigValue) -> None:
        """Raise ConfigError if a value of the right type is outside the limits."""
        if self.validator is not None and not self.validator.accepts(value):
            raise self._refusal(self.format(value))

    def format(self, value: ConfigValue) -> str | None:
        """Return the text that parse() would turn into ``value``; None for None."""
        if value is None:
            return None
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value)

    def shown(self, text: str) -> str:
        """Return a text of this key as people may see it."""
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
        """Return this key as it is for one listener, whose limits may be others."""
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
        # int() alone would also take "1_000", " 5" and Arabic digits, and is slow on
        # a megabyte of digits.
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
    """Hide what of a URL lets somebody in: its user, and the values it asks with."""
    where, asks, query = url.partition("?")
    scheme, slashes, rest = where.partition("://")
    if not slashes:
        scheme, rest = "", where
    # The last: a password may hold one, too, where it was not written as it should be.
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
    ConfigType.PASSWORD: "a password",
}


LISTENER_PREFIX: Final = "listener.name."


# Of what is set of one broker, of all, and the names whose values are new, or gone.
Together = Callable[[Mapping[str, str], Mapping[str, str], Collection[str]], None]


class UnusableConfigError(ConfigError):
    """A value of the right form that cannot be used, such as a key of another file."""


def _nothing_to_check(
    own: Mapping[str, str], of_all: Mapping[str, str], touched: Collection[str]
) -> None:
    """Any values that are good alone are good together."""


class ListenerSetting(NamedTuple):
    """A key that is set for one listener, with the limits that it has there.

    ``mechanism`` is the SASL mechanism that it is set for; "" for all of them.
    """

    listener: str
    key: ConfigKey
    mechanism: str


class ConfigDef:
    """A set of keys that may be set in one place (a broker, a topic)."""

    def __init__(self, what: str, keys: Iterable[ConfigKey]) -> None:
        """Collect keys; ``what`` names their place in errors ("topic config")."""
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
        """Return the key of that name or alias, or None."""
        return self._keys.get(self._aliases.get(name, name))

    def key(self, name: str) -> ConfigKey:
        """Return the key of that name or alias.

        Raises:
            ConfigError: there is none; the text offers the nearest spelling.
        """
        key = self.get(name)
        if key is None:
            raise ConfigError(self._unknown(name))
        return key

    def of_listener(self, name: str) -> ListenerSetting | None:
        """Return what ``listener.name.NAME.[MECHANISM.]KEY`` sets.

        None: it is no such name, or a listener has no such key.
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
        """Check values against those that they must not exceed.

        Args:
            value: gives a key's value by its name.

        Raises:
            ConfigError: one is above another.
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
        """Return these keys with a check of what is set of one broker and of all.

        ``check`` gets the texts of both, by key, and what is new, and raises
        ConfigError.
        """
        definition = ConfigDef(self._what, self)
        definition.check_together = check
        return definition

    def with_keys(self, keys: Iterable[ConfigKey]) -> ConfigDef:
        """Return these keys with some replaced by others of the same names."""
        replaced = {**self._keys, **{key.name: key for key in keys}}
        return ConfigDef(self._what, replaced.values())

    def _unknown(self, name: str) -> str:
        import difflib  # only ever needed on the way to an error: 2 ms of import

        shown = name if len(name) <= 100 else name[:100] + "..."
        text = f"unknown {self._what} {shown!r}"
        names = [*self._keys, *self._aliases]
        near = difflib.get_close_matches(shown, names, n=1, cutoff=0.75)
        return f"{text}; did you mean {near[0]}?" if near else text
