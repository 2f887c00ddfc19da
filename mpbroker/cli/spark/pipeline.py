"""`mpbroker pipeline`: run pipelines between topics and tables, through Spark."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpbroker.base.errors import MpbrokerError
from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode, exit_code_of
from mpbroker.cli.options import Seconds
from mpbroker.cli.output import print_json, print_json_line, print_table
from mpbroker.cli.spark.pipeline_infer import infer

if TYPE_CHECKING:
    from mpbroker.spark.pipeline.published_status import Found


@click.group(cls=CommandGroup)
def command() -> None:
    """Run pipelines that a TOML file describes.

    Needs `pip install mpbroker-server[spark]` and Java 17 or newer.
    """


@command.command()
@click.argument("files", type=click.Path(), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--dry-run", is_flag=True, help="Check and show all; read, write nothing."
)
@click.option(
    "--master",
    metavar="URL",
    help="Spark's master: spark://HOST:PORT, local[4]... [default: local[*]]",
)
@click.option(
    "--once",
    is_flag=True,
    help="Read what is there, then stop: for cron and Airflow, whatever the trigger.",
)
@click.option("--json", "as_json", is_flag=True, help="The final report as JSON.")
def run(
    files: tuple[str, ...],
    dry_run: bool,
    master: str | None,
    once: bool,
    as_json: bool,
) -> None:
    """Run the pipelines in FILEs, side by side in one Spark.

    Killed at any moment and started again, it goes on where it was: no record is lost
    in a table, and none is in it twice. SIGTERM and Ctrl-C stop it. With exit code 1 or
    69 it may be tried again; with 78 something in FILE is wrong. One of several that
    fails does not stop the others; the code is that of the failure which another try
    may help best.
    """
    try:
        from mpbroker.spark.pipeline.run import run_files
    except ImportError as error:
        raise _without_spark(error) from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes = run_files(files, master=master, dry_run=dry_run, once=once)
    failures = [
        (each.path, str(each.error), _exit_code(each.error))
        for each in outcomes
        if each.error is not None
    ]
    if as_json and len(files) == 1 and not failures:
        print_json(outcomes[0].figures)
    elif as_json and len(files) > 1:
        print_json(
            [
                {"file": each.path, **each.figures}
                | ({"error": str(each.error)} if each.error is not None else {})
                for each in outcomes
            ]
        )
    if not failures:
        return
    code = next(code for code in _BY_HOPE if code in {each[2] for each in failures})
    if len(files) == 1:
        raise CliError(failures[0][1], code)
    told = "; ".join(f"{path}: {text}" for path, text, _ in failures)
    raise CliError(f"{len(failures)} of {len(files)} pipelines failed: {told}", code)


# The exit codes of failures, from the likeliest to succeed in another try.
_BY_HOPE: Final = (
    ExitCode.ERROR,
    ExitCode.UNAVAILABLE,
    ExitCode.NOT_FOUND,
    ExitCode.CONFIG,
)


def _exit_code(error: MpbrokerError) -> ExitCode:
    from mpbroker.spark.options import OptionError
    from mpbroker.spark.pipeline.errors import DescriptionError

    if isinstance(error, (DescriptionError, OptionError)):
        return ExitCode.CONFIG
    return exit_code_of(error)


def _without_spark(error: ImportError) -> CliError:
    return CliError(
        f"pipelines need Spark ({error}): pip install 'mpbroker-server[spark]'",
        ExitCode.UNAVAILABLE,
    )


@command.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="What was done, as JSON.")
def maintain(file: str, as_json: bool) -> None:
    """Maintain the tables of the pipeline in FILE: for cron.

    Merge small files, delete rows older than maintain.keep_rows, expire snapshots older
    than maintain.keep_snapshots, delete files that nothing names. It needs no Java, and
    may run beside the pipeline. Killed at any moment, nothing is lost or doubled.
    """
    try:
        from mpbroker.spark.pipeline.errors import DescriptionError
        from mpbroker.spark.pipeline.tables.maintain import maintain_file
    except ImportError as error:
        raise _without_spark(error) from None
    try:
        done = maintain_file(file)
    except DescriptionError as error:
        raise CliError(str(error), ExitCode.CONFIG) from error
    if as_json:
        print_json(done)


# -- status ----------------------------------------------------------------------------

# Where the systemd unit has its files, and the working directories of its pipelines.
_FILES: Final = Path("/etc/mpbroker/pipelines")
_DIRECTORIES: Final = Path("/var/lib/mpbroker-pipeline")


@command.command()
@click.argument("files", type=click.Path(), nargs=-1, metavar="[FILE...]")
@click.option(
    "--watch",
    is_flag=True,
    help="Look again and again, until Ctrl-C.",
)
@click.option(
    "-n",
    "--interval",
    "interval_s",
    type=Seconds(min=0.5, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="JSON; with --watch a line a look."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PAGE",
    help="Write a page of HTML that needs no network instead.",
)
def status(
    files: tuple[str, ...],
    watch: bool,
    interval_s: float,
    as_json: bool,
    html: Path | None,
) -> int:
    """Show how pipelines are, whether they run or were killed.

    Without FILE: those of the systemd unit, /etc/mpbroker/pipelines/*.toml. Rates are
    those of the last minute. Offsets behind are as of the last batch; their size and
    the time to catch up are estimated. "gone" is a process that was killed, "stale" one
    on another machine that has not been heard of.

    Exit code 1: a pipeline has failed, is gone or stale; 10: one has never run.
    """
    try:
        from mpbroker.spark.pipeline import status_views
    except ImportError as error:
        raise _without_spark(error) from None
    while True:
        found = _look(files)
        if html is not None:
            html.write_text(
                status_views.page(found, time.time(), interval_s if watch else None)
            )
        elif as_json:
            rows = [status_views.as_json(each, time.time()) for each in found]
            print_json_line(rows) if watch else print_json(rows)
        else:
            if watch:
                click.clear()
            print_table(status_views.HEADING, status_views.rows(found, time.time()))
            for each in found:
                if each.status is not None and each.status.error:
                    print(f"{each.name}: {each.status.error}")
        if not watch:
            break
        sys.stdout.flush()
        time.sleep(interval_s)
    if not all(each.is_well or each.state == "never" for each in found):
        return ExitCode.ERROR
    return ExitCode.OK if all(each.is_well for each in found) else ExitCode.NOT_FOUND


def _look(files: tuple[str, ...]) -> list[Found]:
    """Read the status of each file's pipeline.

    Raises:
        CliError: there is no file of a pipeline, or a file is wrong.
    """
    from mpbroker.spark.pipeline.description import load
    from mpbroker.spark.pipeline.errors import DescriptionError
    from mpbroker.spark.pipeline.published_status import find

    found = []
    paths = [Path(each) for each in files]
    for path in paths or sorted(_FILES.glob("*.toml")):
        # In the unit's files, relative paths begin where the unit runs the pipeline.
        own = _DIRECTORIES / path.stem
        at_home = path.parent == _FILES and own.is_dir()
        try:
            with contextlib.chdir(own) if at_home else contextlib.nullcontext():
                found.append(find(load(path)))
        except DescriptionError as error:
            raise CliError(str(error), ExitCode.CONFIG) from error
    if not found:
        raise CliError(
            f"there is no pipeline's file in {_FILES}: name one", ExitCode.NOT_FOUND
        )
    return found


command.add_command(infer)
