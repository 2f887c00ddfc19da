"""Make loggers that import the module ``logging`` when the first line is logged.

That module and those that it needs (traceback, tokenize, threading, string...) take a
tenth of the time from exec to the first response, and before that nothing is logged.
Loggers have their standard names, so code that configures or captures logging finds
them as usual.

A logger here also compares the version of the log levels before every line. So each
process of the broker applies changed levels before its next line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    import logging

ROOT: Final = "root"
# Kafka's names of levels, and the numbers they have here.
LEVELS: Final[Mapping[str, int]] = {
    "TRACE": 5,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "ERROR": 40,
    "FATAL": 50,
}
DEFAULT_LEVEL: Final = LEVELS["INFO"]
DEBUG: Final = LEVELS["DEBUG"]
_FORMAT: Final = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


class Levels(Protocol):
    """The log levels that were set while the broker runs; they are in shared memory."""

    @property
    def version(self) -> int:
        """A number that grows with each change of a log level; 0: none was changed."""

    def read(self) -> Mapping[str, int]:
        """Return the log levels that were set, by the logger's name."""


class _State:
    to_stderr = False
    levels: Levels | None = None
    version = 0  # of the levels that are applied in this process
    applied: Mapping[str, int] = {}


class _LateLogger:
    __slots__ = ("_logger", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger: logging.Logger | None = None

    def __getattr__(self, attribute: str) -> object:
        if self._logger is None or _State.to_stderr:
            self._logger = _logger(self._name)
        if _State.levels is not None and _State.levels.version != _State.version:
            _obey(_State.levels)
        return getattr(self._logger, attribute)


def _logger(name: str) -> logging.Logger:
    import logging

    if _State.to_stderr:
        _State.to_stderr = False
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_formatter())
        logging.basicConfig(level=DEFAULT_LEVEL, handlers=[handler])
    return logging.getLogger(name)


def _formatter() -> logging.Formatter:
    import logging

    # Clients choose names, even before they have authenticated. A name must neither
    # begin a new line of the log, nor send control codes to a terminal that shows it.
    class OneLine(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
            return printable(super().formatMessage(record))

        def formatException(self, ei: Any) -> str:  # noqa: N802
            return quoted(super().formatException(ei))

        def formatStack(self, stack_info: str) -> str:  # noqa: N802
            return quoted(super().formatStack(stack_info))

    return OneLine(_FORMAT)


def printable(text: str) -> str:
    """Return a text as one line, in which unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def quoted(text: str) -> str:
    """Return a text of several lines, such as a traceback, with each line marked."""
    return "\n".join(f"  | {printable(line)}" for line in text.split("\n"))


def get_logger(name: str) -> logging.Logger:
    """Return a logger that is looked up when it is first used."""
    return cast("logging.Logger", _LateLogger(name))


def log_to_stderr() -> None:
    """Log to stderr, at INFO and above, in this process and its children."""
    _State.to_stderr = True


def follow(levels: Levels | None) -> None:
    """Apply changed log levels from now on, in this process and its children.

    Args:
        levels: the levels in shared memory; None: levels are not followed any more.
    """
    _State.levels, _State.version = levels, 0


def _obey(levels: Levels) -> None:
    import logging

    logging.addLevelName(LEVELS["TRACE"], "TRACE")
    # Before read(): a change in between is then read twice, and not missed.
    _State.version = levels.version
    wanted = levels.read()
    for name in {**_State.applied, **wanted}:
        default = DEFAULT_LEVEL if name == ROOT else logging.NOTSET
        logger = logging.getLogger(None if name == ROOT else name)
        logger.setLevel(wanted.get(name, default))
    _State.applied = wanted


def load() -> None:
    """Import ``logging`` now, before the first fork.

    A process without free descriptors cannot import, and must be able to log that.
    """
    import logging

    assert logging


def shut_down() -> None:
    """Flush the handlers, as ``logging`` does at the end of a process."""
    if "logging" in sys.modules:
        import logging

        logging.shutdown()
