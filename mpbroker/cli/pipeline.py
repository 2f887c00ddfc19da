"""`mpbroker pipeline`: run pipelines between topics and tables, through Spark."""

from __future__ import annotations

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.output import print_json


@click.group()
def command() -> None:
    """Run pipelines that a TOML file describes.

    Needs `pip install mpbroker[spark]` and Java 17 or newer.
    """


@command.command()
@click.argument("file", type=click.Path())
@click.option(
    "--dry-run", is_flag=True, help="Check and show all; read, write nothing."
)
@click.option(
    "--master",
    metavar="URL",
    help="Spark's master: spark://HOST:PORT, local[4]... [default: local[*]]",
)
@click.option("--json", "as_json", is_flag=True, help="The final report as JSON.")
def run(file: str, dry_run: bool, master: str | None, as_json: bool) -> None:
    """Run the pipeline in FILE.

    Killed at any moment and started again, it goes on where it was: no record is lost
    in a table, and none is in it twice.
    """
    try:
        from mpbroker.spark.pipeline.run import run_file
    except ImportError as error:
        raise CliError(
            f"pipelines need Spark ({error}): pip install 'mpbroker[spark]'",
            ExitCode.UNAVAILABLE,
        ) from None
    report = run_file(file, master=master, dry_run=dry_run)
    if as_json:
        print_json(report)
