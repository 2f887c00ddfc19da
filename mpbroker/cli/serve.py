"""`mpbroker serve`: read the command line, load the configuration, run the broker.

The command line is parsed without click or argparse, whose import would delay a start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.cli.exit_codes import EXIT_CODE_HELP, CliError, ExitCode
from mpbroker.supervisor import TAKEOVER_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

# A variable of the other commands; other names MPBROKER_... are settings of a broker.
BOOTSTRAP_VARIABLE: Final = "MPBROKER_BOOTSTRAP"


class ServeOption:
    """An option of `serve`: one row for the parser, the help and the completion.

    Args:
        names: the spellings of the option; error messages use the last one.
        value: the name of its value in the help; None: the option takes no value.
        help: the help text.
    """

    __slots__ = ("help", "names", "value")

    def __init__(self, *names: str, value: str | None = None, help: str) -> None:
        self.names = names
        self.value = value
        self.help = help


OPTIONS: Final = (
    ServeOption(
        "-c",
        "--config",
        value="FILE",
        help="read settings from FILE: TOML if it ends in .toml, otherwise Java"
        " properties (a Kafka server.properties)",
    ),
    ServeOption(
        "--override",
        value="KEY=VALUE",
        help="the same as KEY=VALUE, as kafka-server-start.sh spells it",
    ),
    ServeOption(
        "--daemon",
        help="run in the background; exit with 0 when the broker is ready to answer"
        " clients, or with 1 and the reason if it cannot start; the log is mpbroker.log"
        " in the first of log.dirs",
    ),
    ServeOption(
        "--pid-file", value="FILE", help="write the supervisor's process id to FILE"
    ),
    ServeOption(
        "--enable-inject",
        help="let `mpbroker ctl inject` cause faults, for tests; the same as"
        " control.inject.enable=true",
    ),
    ServeOption(
        "--ready-fd",
        value="N",
        help="write a line to file descriptor N and close it when the broker is ready"
        " to answer clients",
    ),
    ServeOption("-h", "--help", help="show this"),
)
_OPTIONS: Final = {name: option for option in OPTIONS for name in option.names}


def serve_help() -> str:
    """Return the text that `mpbroker serve --help` shows."""
    import textwrap  # imported here: a start does not need it

    options = "\n".join(
        textwrap.fill(
            f"  {_spelling(option):<20}  {option.help}",
            79,
            subsequent_indent=" " * 24,
            break_on_hyphens=False,
        )
        for option in OPTIONS
    )
    return f"""\
Usage: mpbroker serve [OPTIONS] [KEY=VALUE]...

Run a broker in the foreground until SIGTERM or SIGINT.

Settings have Kafka's names, and Kafka's defaults unless `mpbroker config explain`
says otherwise. A KEY=VALUE here counts before the environment, which counts before the
file.

  mpbroker serve
  mpbroker serve listeners=PLAINTEXT://0.0.0.0:9092 log.dirs=/var/lib/mpbroker
  mpbroker serve --config server.properties num.io.threads=4

`mpbroker config list` names every setting, `mpbroker config explain KEY` describes one.

Options:
{options}

{EXIT_CODE_HELP}"""


def _spelling(option: ServeOption) -> str:
    names = ", ".join(option.names)
    return names if option.value is None else f"{names} {option.value}"


class ServeArguments(NamedTuple):
    """The parsed command line of `serve`; values of settings are not checked yet."""

    overrides: dict[str, str]
    config_file: Path | None
    ready_fd: int | None
    daemon: bool
    pid_file: Path | None
    help: bool


def parse_serve_arguments(arguments: Sequence[str]) -> ServeArguments:
    """Parse the command line's arguments after `serve`.

    Raises:
        CliError: with exit code 2, if an option is unknown, repeated or lacks its
            value, or an argument is not `key=value`.
    """
    overrides: dict[str, str] = {}
    options: dict[str, str] = {}
    flags: set[str] = set()
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if not argument.startswith("-"):
            _add_override(overrides, argument)
            continue
        name, equals, value = argument.partition("=")
        option = _OPTIONS.get(name)
        if option is None or (option.value is None and equals):
            raise _usage(f"no such option: {name}{_hint(name)}")
        if option.value is None:
            flags.add(option.names[-1])
            continue
        if not equals:
            if not rest:
                raise _usage(f"{name} needs a value")
            value = rest.pop()
        name = option.names[-1]
        if name == "--override":
            _add_override(overrides, value)
        elif name in options:
            raise _usage(f"{name} is given twice")
        else:
            options[name] = value
    if "--enable-inject" in flags:
        _add_override(overrides, "control.inject.enable=true")
    return ServeArguments(
        overrides=overrides,
        config_file=_path(options, "--config"),
        ready_fd=_file_descriptor(options),
        daemon="--daemon" in flags,
        pid_file=_path(options, "--pid-file"),
        help="--help" in flags,
    )


def _hint(name: str) -> str:
    """Return what the user of an unknown option may have meant, as a clause, or ""."""
    if name == "--data-dir":  # as the commands of `ctl` call it
        return "; the directory is a setting: log.dirs=DIR"
    from difflib import get_close_matches  # imported here: only errors need it

    near = get_close_matches(name, _OPTIONS, n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != name else ""


def _usage(message: str) -> CliError:
    return CliError(f"{message} (see: mpbroker serve --help)", ExitCode.USAGE)


def _add_override(overrides: dict[str, str], argument: str) -> None:
    key, equals, value = argument.partition("=")
    key = key.strip()
    if not equals or not key:
        raise _usage(
            f"{argument!r} is not KEY=VALUE; a file is given as --config {argument}"
        )
    if key in overrides:
        raise _usage(f"{key} is given twice")  # without the values: they may be secret
    overrides[key] = value


def _path(options: dict[str, str], name: str) -> Path | None:
    if name not in options:
        return None
    if not options[name]:
        raise _usage(f"{name} needs a file name")
    from pathlib import Path  # imported here: it takes 5 ms, and is seldom needed

    return Path(options[name])


def _file_descriptor(options: dict[str, str]) -> int | None:
    text = options.get("--ready-fd")
    if text is None:
        return None
    # Checked now: when the broker is ready, it would be too late to refuse it.
    if not text.isascii() or not text.isdigit():
        raise _usage(f"--ready-fd {text!r} is not a file descriptor number")
    try:
        os.fstat(int(text))
    except (OSError, OverflowError, ValueError):  # the last two: too many digits
        raise _usage(f"--ready-fd {text}: no such open file descriptor") from None
    return int(text)


def run_serve(arguments: Sequence[str]) -> int:
    """Run `mpbroker serve` to its end and return the exit code."""
    try:
        parsed = parse_serve_arguments(arguments)
        if parsed.help:
            from mpbroker.cli.root import run  # which handles output that fails

            return run(["serve", "--help"])
        return _serve(parsed)
    except MpbrokerError as error:
        # The error of a setting names the value, the limits and what to do.
        print(f"mpbroker: {error}", file=sys.stderr)
        if TAKEOVER_VARIABLE in os.environ:
            from mpbroker.supervisor.upgrade.predecessor import refuse_takeover

            refuse_takeover(str(error))
        return _exit_code(error)


def _exit_code(error: MpbrokerError) -> int:
    if isinstance(error, CliError):
        return error.exit_code
    # CONFIG tells a service manager that starting the broker again cannot help.
    if isinstance(error, ConfigError) and "NOTIFY_SOCKET" in os.environ:
        return ExitCode.CONFIG
    from mpbroker.config.resolution import ArgumentError

    return ExitCode.USAGE if isinstance(error, ArgumentError) else ExitCode.ERROR


def broker_environment() -> dict[str, str]:
    """Return the environment without MPBROKER_BOOTSTRAP, which is no broker setting."""
    return {k: v for k, v in os.environ.items() if k != BOOTSTRAP_VARIABLE}


def _serve(parsed: ServeArguments) -> int:
    from mpbroker.config import BrokerConfig

    config = BrokerConfig.load(
        parsed.overrides, parsed.config_file, broker_environment()
    )
    from mpbroker.broker import serve

    return serve(
        config,
        ready_fd=parsed.ready_fd,
        daemon=parsed.daemon,
        pid_file=parsed.pid_file,
    )
