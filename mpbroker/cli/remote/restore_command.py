"""`mpbroker restore`: make a broker's data directory from the remote store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from mpbroker.cli.exit_codes import CliError

if TYPE_CHECKING:
    from mpbroker.cli.remote.restore import Report, RestoredLog

_HELP = """\
Make a data directory from the remote store, after a machine was lost.

The new broker has the topics, settings, ACLs, users and committed offsets as of the
last copy (see remote.metadata.interval.ms), and all segments that were copied. Records
stay in the store until a client reads them. What was lost is told for each partition;
groups that had read more are set back to the end of their partition.

The store belongs to one broker, which must never run again: --take-over gives the place
to the new one. A broker of before that runs nevertheless stops writing to the store
when it next looks. Then start the new one with the same node.id, remote.storage.url and
other settings.

If the command is killed, run it again.
"""


@click.command("restore", help=_HELP)
@click.option(
    "--from",
    "url",
    required=True,
    metavar="URL",
    help="The store, as in remote.storage.url.",
)
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False),
    help="The directory to make; it must be empty.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take the store from the broker that it belongs to.",
)
def command(url: str, data_dir: str, take_over: bool) -> None:
    try:
        from mpbroker.storage.remote.object_store import ObjectStore
    except ModuleNotFoundError as error:
        raise CliError(
            f"{error.name} is missing: pip install 'mpbroker-server[tiered]'"
        ) from error
    from mpbroker.cli.remote.restore import restore

    _print(restore(ObjectStore(url), data_dir, take_over=take_over), data_dir)


def _print(report: Report, directory: str) -> None:
    for log in report.logs:
        click.echo(f"{log.topic}-{log.partition}: {_fate(log)}")
    for back in report.set_back:
        click.echo(
            f"group {back.group}: {back.topic}-{back.partition} is set back from"
            f" {back.committed} to {back.end_offset}"
        )
    when = datetime.fromtimestamp(report.time_ms / 1000, UTC).isoformat(
        timespec="seconds"
    )
    click.echo(
        f"{directory} is ready for node.id={report.owner.node_id}; its metadata and"
        f" committed offsets are those of {when} or a little later"
    )


def _fate(log: RestoredLog) -> str:
    if log.end_offset == log.start_offset:
        kept = f"empty, goes on at {log.end_offset}"
    else:
        kept = f"has {log.start_offset} to {log.end_offset - 1}"
    if log.lost_to < 0:
        return f"{kept}; was not in the store: all its records are lost"
    lost = log.lost_to - log.end_offset
    if lost <= 0:
        return f"{kept}; nothing is known to be lost"
    return f"{kept}; the last {lost} are lost, and those after the copy of the metadata"
