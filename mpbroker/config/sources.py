"""Read settings from their sources: key=value arguments, the environment, a file.

Each source gives texts by key, and says where each text was found. Keys parse the texts
later (resolution.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from mpbroker.base.config_def import ConfigError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.compiled import PURE_PYTHON_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT_PREFIX: Final = "MPBROKER_"
_UNDERSCORES: Final = re.compile("_{1,3}")


class Source(IntEnum):
    """The kind of a source; a higher number counts before a lower one."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    ARGUMENT = 3


class Setting(NamedTuple):
    """The text of a setting, as one source gives it.

    Attributes:
        origin: the place for people: a file and a line, or a variable.
    """

    name: str
    text: str
    source: Source
    origin: str


def settings_of_arguments(arguments: Mapping[str, str]) -> list[Setting]:
    """Return the settings given on the command line as key=value."""
    return [
        Setting(name, text, Source.ARGUMENT, "the command line")
        for name, text in arguments.items()
    ]


def settings_of_environment(environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings in MPBROKER_* variables: MPBROKER_LOG_DIRS is log.dirs.

    As for Kafka's container images, "_" stands for ".", "__" for "-", and "___" for
    "_", which names of listeners and of SASL mechanisms have.
    """
    return [
        Setting(
            _UNDERSCORES.sub(
                _stands_for, variable.removeprefix(ENVIRONMENT_PREFIX)
            ).lower(),
            text,
            Source.ENVIRONMENT,
            f"the environment variable {variable}",
        )
        for variable, text in sorted(environ.items())
        if variable.startswith(ENVIRONMENT_PREFIX)
        and variable != PURE_PYTHON_VARIABLE  # no setting
    ]


def _stands_for(underscores: re.Match[str]) -> str:
    return ".-_"[len(underscores[0]) - 1]


def variable_of(name: str) -> str:
    """Return the environment variable that sets a setting."""
    spelled = name.replace("_", "___").replace("-", "__").replace(".", "_")
    return ENVIRONMENT_PREFIX + spelled.upper()


def settings_of_file(path: Path) -> list[Setting]:
    """Read a file of settings: TOML or Java properties (Kafka's server.properties).

    The suffix of the file's name decides between the two; if it is neither .toml nor
    .properties, the content decides.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or not in its format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
    return _parser_for(path, text)(text, str(path))


def _parser_for(path: Path, text: str) -> Callable[[str, str], list[Setting]]:
    if path.suffix == ".toml":
        return parse_toml
    if path.suffix == ".properties":
        return parse_properties
    # Try TOML first, because nearly any text is a properties file. A line like the
    # header of a table makes no sense in properties: then the error of TOML helps more.
    if any(line.lstrip().startswith("[") for line in text.splitlines()):
        return parse_toml
    try:
        parse_toml(text, "")
    except ConfigError:
        return parse_properties
    return parse_toml


def parse_toml(text: str, origin: str) -> list[Setting]:
    """Read TOML; nested tables and dotted keys both spell Kafka's dotted names.

    Raises:
        ConfigError: the text is not TOML, or has a value that no key can have (a date,
            a table in a list).
    """
    import tomllib  # imported here: it takes 4 ms, and most brokers do not need it

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = ""
        if "Cannot" in str(error) or "overwrite" in str(error):
            hint = (
                "; where one key continues another (max.connections and"
                ' max.connections.per.ip), quote them: "max.connections.per.ip" = 10'
            )
        raise ConfigError(f"{origin}: not valid TOML: {error}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: TOML nested too deeply") from None
    return [
        Setting(name, value, Source.FILE, origin)
        for name, value in _flatten(document, "", origin)
    ]


def _flatten(
    table: Mapping[str, object], prefix: str, origin: str
) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.", origin)
        elif isinstance(value, list):
            yield name, ",".join(_scalar(name, item, origin) for item in value)
        else:
            yield name, _scalar(name, value, origin)


def _scalar(name: str, value: object, origin: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str):
        return str(value)
    raise ConfigError(
        f"{origin}: {name} is a {type(value).__name__}; it must be a string, a number,"
        " true or false, or a list of those"
    )


def parse_properties(text: str, origin: str) -> list[Setting]:
    """Read Java's properties format; if a key is there twice, the last one counts.

    Raises:
        ConfigError: there is a malformed \\u escape.

    Source: java.util.Properties.load(Reader), Java SE 21 API documentation.
    """
    settings = {}
    for number, line in _logical_lines(text):
        place = f"{origin}:{number}"
        raw_name, raw_value = _split_property(line)
        name = _unescape(raw_name, place)
        value = _unescape(raw_value, place)
        settings[name] = Setting(name, value, Source.FILE, place)
    return list(settings.values())


_BLANKS: Final = " \t\f"


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield logical lines, each with the number of its first line in the text.

    A logical line is a line joined with those that continue it. Comments and blank
    lines are left out.
    """
    lines = iter(enumerate(_natural_lines(text), start=1))
    for number, line in lines:
        line = line.lstrip(_BLANKS)
        if not line or line[0] in "#!":
            continue
        while _ends_in_odd_backslashes(line):
            _, following = next(lines, (0, ""))
            line = line[:-1] + following.lstrip(_BLANKS)
        yield number, line


def _natural_lines(text: str) -> Iterable[str]:
    # Not splitlines(): Java ends a line at CR and LF only, so a form feed or U+2028 is
    # a part of the value.
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _ends_in_odd_backslashes(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _split_property(line: str) -> tuple[str, str]:
    """Cut a line at the first unescaped '=', ':' or blank, and strip blanks there."""
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return line[:end], rest


_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _unescape(text: str, place: str) -> str:
    if "\\" not in text:
        return text
    parts = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character != "\\":
            parts.append(character)
            continue
        character = text[position : position + 1]
        position += 1
        if character == "u":
            parts.append(_unicode_escape(text[position : position + 4], place))
            position += 4
        else:
            parts.append(_ESCAPES.get(character, character))
    # Java's escapes are UTF-16 units: two of them may make one character.
    joined = "".join(parts)
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unicode_escape(digits: str, place: str) -> str:
    if len(digits) != 4 or not set(digits) <= set("0123456789abcdefABCDEF"):
        raise ConfigError(
            f"{place}: malformed escape \\u{digits}; it takes 4 hex digits"
        )
    return chr(int(digits, 16))
