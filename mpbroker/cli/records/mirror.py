"""`mpbroker mirror`: copy topics and groups from a running cluster, with offsets."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    Seconds,
    bootstrap_option,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json

if TYPE_CHECKING:
    from mpbroker.client.mirror.topic_mirror import Progress, Report

_HELP = """\
Copy topics, their configs and groups' offsets from a running cluster.

Records keep their offsets and timestamps, so a group goes on in the copy where it was.
Records of aborted transactions are left out. At the end all records are read again on
both sides, and compared by their number and a checksum.

A topic that is being mirrored refuses producers, until the mirror is complete: first
stop the producers, then wait for this command to end, then start them with the new
brokers. With --follow it goes on copying until it is stopped by Ctrl-C or SIGTERM, and
the topics stay mirrored; run it without --follow to complete them.

It may be killed at any time; the same command goes on where it was.

\b
  mpbroker mirror --from kafka1:9092 --topics 'orders.*' -b localhost:9092
  mpbroker mirror --from kafka1:9092 --topics '.*' --follow
  mpbroker mirror --from kafka1:9093 --from-setting security.protocol=SSL --topics x
"""
_SHOW_S: Final = 0.5
_LINE_S: Final = 10.0


@click.command("mirror", help=_HELP)
@click.option(
    "--from",
    "source",
    metavar="HOST:PORT[,...]",
    required=True,
    help="Brokers of the cluster to copy from: Apache Kafka's, or others that speak its"
    " protocol.",
)
@click.option(
    "--topics",
    "pattern",
    metavar="REGEX",
    required=True,
    help="Copy the topics whose whole name matches. Internal topics are left out.",
)
@click.option(
    "--follow", is_flag=True, help="Go on until stopped, and leave topics mirrored."
)
@click.option(
    "--from-setting",
    "source_settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A client setting for the brokers of --from, as -X is for those of -b; may be"
    " repeated.",
)
@click.option(
    "--from-config",
    "source_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file of client settings for the brokers of --from, as -F for those of -b.",
)
@click.option(
    "--retry",
    "retry_s",
    type=Seconds(min=0),
    default=300.0,
    show_default=True,
    help="Seconds to try again while a cluster cannot be reached.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@bootstrap_option
@timeout_option
@format_option
def command(
    source: str,
    pattern: str,
    follow: bool,
    source_settings: Sequence[str],
    source_file: Path | None,
    retry_s: float,
    quiet: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    from mpbroker.client.mirror.topic_mirror import Mirror

    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise CliError(f"--topics: {error}", ExitCode.USAGE) from error
    given = _settings_of(source_settings, source_file)
    watcher = Console(quiet=quiet)
    with (
        open_cluster(source, timeout_s, given=given) as origin,
        open_cluster(bootstrap, timeout_s) as target,
        watcher,
    ):
        report = Mirror(
            origin,
            target,
            compiled,
            origin=source,
            watcher=watcher,
            follow=follow,
            retry_s=retry_s,
        ).run()
    if output_format == "json":
        print_json({**report._asdict(), "checksum": f"{report.checksum:08x}"})
    else:
        print(_told(report))


def _settings_of(items: Sequence[str], path: Path | None) -> dict[str, str]:
    """Return the source's client settings; --from-setting overrides --from-config."""
    found: dict[str, str] = {}
    if path is not None:
        from mpbroker.config.sources import settings_of_file

        found = {setting.name: setting.text for setting in settings_of_file(path)}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"--from-setting: {item!r} is not KEY=VALUE")
        found[name.strip()] = value
    return found


def _told(report: Report) -> str:
    return (
        f"{report.topics} topics with {report.partitions} partitions are equal:"
        f" {report.records} records, checksum {report.checksum:08x};"
        f" {report.copied} copied by this run; offsets of {report.groups} groups."
        + (
            " Producers may write to them."
            if report.is_complete
            else " They stay mirrored, and refuse producers."
        )
    )


class Console:
    """Shows a mirror's progress on standard error, and stops it at SIGINT or SIGTERM.

    On a terminal the progress is one line, which is overwritten; elsewhere it is a new
    line every ten seconds.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._width = 0
        self._is_stopped = False
        self._shown_at = time.monotonic()
        self._shown_bytes = 0
        self._step = ""

    def __enter__(self) -> Console:
        self._before = [
            (number, signal.signal(number, self._stop))
            for number in (signal.SIGINT, signal.SIGTERM)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        self._erase()

    def _stop(self, number: int, frame: object) -> None:
        if self._is_stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._is_stopped = True

    def stopped(self) -> bool:
        return self._is_stopped

    def say(self, line: str) -> None:
        if not self._quiet:
            self._erase()
            print(f"mpbroker: {line}", file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.step != self._step:
            self._step, self._shown_at = progress.step, now
            self._shown_bytes = progress.bytes
        passed = now - self._shown_at
        if self._quiet or passed < (_SHOW_S if self._is_terminal else _LINE_S):
            return
        rate = (progress.bytes - self._shown_bytes) / passed
        self._shown_at, self._shown_bytes = now, progress.bytes
        text = describe(progress, rate)
        if self._is_terminal:
            padding = " " * (self._width - len(text))
            print(f"\r{text}{padding}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(f"mpbroker: {text}", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._width:
            blank = " " * self._width
            print(f"\r{blank}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def describe(progress: Progress, rate: float) -> str:
    """Return a mirror's progress as a line of text.

    Args:
        progress: the mirror's progress.
        rate: its recent rate, in bytes a second.
    """
    text = f"{progress.step}: {progress.bytes / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s"
    if progress.step != "verifying":
        text += (
            f", {progress.records:,} records, {progress.left:,} to go in"
            f" {progress.partitions_left} of {progress.partitions} partitions"
        )
    return text
