"""The exit codes of all `mpbroker` commands.

Scripts depend on them, so a number never changes its meaning.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from mpbroker.base.errors import MpbrokerError


class ExitCode(IntEnum):
    """Exit codes; 69 and 78 are EX_UNAVAILABLE and EX_CONFIG of BSD's sysexits.h."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 10
    UNAVAILABLE = 69
    CONFIG = 78


EXIT_CODE_HELP: Final = """\
Exit codes:
  0   done
  1   an error, which stderr names; also if a broker refuses, with its reason
  2   the command line was wrong
  10  not found: no such topic, partition, group, user, setting or record; or no match
  69  no broker could be reached
  78  instead of 1, if a service manager runs serve: the settings are wrong, so
      starting it again cannot help
"""


class CliError(MpbrokerError):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code
