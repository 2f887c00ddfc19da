"""Loggers that import ``logging`` with the first line that is logged.

It and what it needs (traceback, tokenize, threading, string...) take a tenth of the
time from exec to the first answer, and until then there is nothing to say. The name is
the standard one, so whoever configures or captures logging finds the loggers as ever.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import logging

_FORMAT: Final = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


class _State:
    to_stderr = False


class _LateLogger:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        import logging

        if _State.to_stderr:
            _State.to_stderr = False
            logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr)
        return getattr(logging.getLogger(self._name), attribute)


def get_logger(name: str) -> logging.Logger:
    """The logger of that name, when it is first used."""
    return cast("logging.Logger", _LateLogger(name))


def log_to_stderr() -> None:
    """Write what is logged there, from INFO up, in this process and its children."""
    _State.to_stderr = True


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
