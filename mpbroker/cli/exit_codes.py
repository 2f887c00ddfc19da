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
  2   the command line was wrong, or a setting that it gives
  10  not found: no such topic, partition, group, user, setting or record; or no match
  69  no broker, or no database of a cluster, could be reached
  78  the settings are wrong, so starting it again cannot help: those of a pipeline, or
      those of serve, if a service manager runs it
"""


class CliError(MpbrokerError):
    """An error that ends the command with one line on stderr and an exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: MpbrokerError) -> ExitCode:
    """Return the exit code for an error that ends a command."""
    # Imported here: only a command that has imported them can have raised the error.
    from mpbroker.client.errors import BrokerUnavailableError
    from mpbroker.protocol.error_code import ErrorCode
    from mpbroker.protocol.errors import ApiError

    if isinstance(error, BrokerUnavailableError):
        return ExitCode.UNAVAILABLE
    if isinstance(error, ApiError) and error.error_code in (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
    ):
        return ExitCode.NOT_FOUND
    return ExitCode.ERROR
