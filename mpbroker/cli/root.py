"""The click commands, each of which is imported when it is named.

`serve` is here for its help and for completion only: see `mpbroker.cli.main`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import click

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import (
    EXIT_CODE_HELP,
    CliError,
    ExitCode,
    exit_code_of,
)
from mpbroker.cli.standard_streams import abandon, complain

# command -> (module that holds `command`, one line for --help).
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "acl": ("mpbroker.cli.acl", "Add, list and remove ACLs."),
    "api-table": ("mpbroker.cli.api_table", "Compare the APIs with Kafka's."),
    "cluster": (
        "mpbroker.cli.cluster_command",
        "Set up and show the database of a cluster.",
    ),
    "completion": ("mpbroker.cli.completion", "Print a shell completion script."),
    "config": ("mpbroker.cli.config_command", "List, explain and change settings."),
    "consume": ("mpbroker.cli.records.consume", "Read records to stdout."),
    "ctl": ("mpbroker.cli.ctl.ctl", "Watch and change a running broker."),
    "dump": ("mpbroker.cli.dump", "Show log segments and index files."),
    "group": ("mpbroker.cli.group", "List, describe, delete, reset groups."),
    "log-dirs": ("mpbroker.cli.log_dirs", "List log directories; forget a lost one."),
    "mirror": ("mpbroker.cli.records.mirror", "Copy topics from another cluster."),
    "pipeline": (
        "mpbroker.cli.spark.pipeline",
        "Move topics to a lake, and back (Spark).",
    ),
    "produce": ("mpbroker.cli.records.produce", "Write records from stdin or files."),
    "quota": ("mpbroker.cli.quota", "List and set the quotas of clients."),
    "restore": (
        "mpbroker.cli.remote.restore_command",
        "Make a lost broker's directory from the remote store.",
    ),
    "serve": ("mpbroker.cli.serve_command", "Run a broker."),
    "sql": ("mpbroker.cli.spark.sql", "Query topics and lake tables with SQL (Spark)."),
    "store": ("mpbroker.cli.remote.store_command", "Check a remote store."),
    "topic": ("mpbroker.cli.topic", "Create, list, describe, alter, delete topics."),
    "user": ("mpbroker.cli.user", "List, add and delete users (SCRAM)."),
}


# The errors if a disk is full or broken, a quota is used up, or a descriptor is closed.
_UNWRITABLE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
)


class LazyGroup(CommandGroup):
    """A group that imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Caught before click catches it and exits with 1.
            return _stopped_reading()

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        # From the table, because click would import every module for its help line.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    epilog="\b\n" + EXIT_CODE_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-V", "--version", message="mpbroker %(version)s")
def root() -> None:
    """A Kafka-compatible broker, and tools for it.

    mpbroker COMMAND --help explains a command.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    try:
        result = root.main(list(arguments), prog_name="mpbroker", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        return ExitCode.USAGE
    except click.ClickException as error:
        return _failed(error.format_message(), ExitCode.ERROR)
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", ExitCode.ERROR)
    except CliError as error:
        return _failed(str(error), error.exit_code)
    except MpbrokerError as error:
        return _failed(str(error), exit_code_of(error))
    except BrokenPipeError:
        return _stopped_reading()
    except OSError as error:
        return _failed(_what_failed(error), ExitCode.ERROR)
    return result if isinstance(result, int) else ExitCode.OK


def _what_failed(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    # An error of a file has the file's name; without one, it is of standard output.
    return f"standard output: {reason}" if error.errno in _UNWRITABLE else reason


def _failed(message: str, exit_code: ExitCode) -> ExitCode:
    # Flush first: in a terminal the output comes before the error.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _stopped_reading()
    except OSError:  # a full disk, and perhaps the error itself
        abandon(1)
    complain(message)
    return exit_code


def _stopped_reading() -> ExitCode:
    """Drop the rest of the output after the pipe's reader, such as `head`, has ended.

    Return OK, since this is a normal end of a pipeline.
    """
    abandon(1)
    return ExitCode.OK
