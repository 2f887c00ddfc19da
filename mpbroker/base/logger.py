"""Loggers that import ``logging`` with the first line that is logged.

It and what it needs (traceback, tokenize, threading, string...) take a tenth of the
time from exec to the first answer, and until then there is nothing to say. The name is
the standard one, so whoever configures or captures logging finds the loggers as ever.

Since every line passes here, this is also where a process finds out that somebody has
set other levels: whatever it is and whenever it was forked, before its next line.
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
    """Where the levels are that were set while the broker runs."""

    @property
    def version(self) -> int:
        """Grows with each change; 0: there was none."""

    def read(self) -> Mapping[str, int]:
        """Return them by logger."""


class _State:
    to_stderr = False
    levels: Levels | None = None
    version = 0  # of what was applied here
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

    # Clients choose names, and some before they have said who they are: none may write
    # a line of its own here, or to the terminal of who reads it.
    class OneLine(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
            return printable(super().formatMessage(record))

        def formatException(self, ei: Any) -> str:  # noqa: N802
            return quoted(super().formatException(ei))

        def formatStack(self, stack_info: str) -> str:  # noqa: N802
            return quoted(super().formatStack(stack_info))

    return OneLine(_FORMAT)


def printable(text: str) -> str:
    """The text on one line, with what a terminal would obey escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def quoted(text: str) -> str:
    """A text of several lines, such as a traceback, none of which can be another's."""
    return "\n".join(f"  | {printable(line)}" for line in text.split("\n"))


def get_logger(name: str) -> logging.Logger:
    """The logger of that name, when it is first used."""
    return cast("logging.Logger", _LateLogger(name))


def log_to_stderr() -> None:
    """Write what is logged there, from INFO up, in this process and its children."""
    _State.to_stderr = True


def follow(levels: Levels | None) -> None:
    """Obey levels that may change, in this process and its children; None: no more."""
    _State.levels, _State.version = levels, 0


def _obey(levels: Levels) -> None:
    import logging

    logging.addLevelName(LEVELS["TRACE"], "TRACE")
    # Before it is read: what comes in between is read twice rather than not at all.
    _State.version = levels.version
    wanted = levels.read()
    for name in {**_State.applied, **wanted}:
        default = DEFAULT_LEVEL if name == ROOT else logging.NOTSET
        logger = logging.getLogger(None if name == ROOT else name)
        logger.setLevel(wanted.get(name, default))
    _State.applied = wanted


def load() -> None:
    """Import it now, before the first fork.

    A process that is out of descriptors can import nothing, and has something to say.
    """
    import logging

    assert logging


def shut_down() -> None:
    """Write out what is buffered, as at the end of a process."""
    if "logging" in sys.modules:
        import logging

        logging.shutdown()
