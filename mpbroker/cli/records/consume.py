"""`mpbroker consume`: write records to standard output, with kcat's options."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    client_settings,
    complete_group,
    complete_topic,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.records.delimiter import parse_delimiter
from mpbroker.cli.records.ending import until_told
from mpbroker.cli.records.progress_line import ERASE, ProgressLine
from mpbroker.cli.records.record_format import (
    FORMAT_HELP,
    RecordWriter,
    format_writer,
    json_writer,
    plain_writer,
)
from mpbroker.cli.records.start_offset import (
    Bounds,
    OffsetRange,
    parse_offsets,
    resolve_bounds,
)
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer, ConsumerRecord
from mpbroker.client.consumer.consumer_config import CONSUMER_CONFIG
from mpbroker.client.consumer.fetcher import (
    FetchedBatch,
    LeaderLostError,
    LogTruncationError,
    OffsetOutOfRangeError,
)
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.records.record_batch import Record, iter_records

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_ENDS_SHOWN: Final = 5  # partitions in an error

_HELP = """\
Write the records of topics to standard output, from all partitions at once.

Without -e, -c or -o e@ it goes on until it is interrupted. With -e it stops at the
offsets that are the ends when it starts, and exits with 10 if there was no record.

\b
  mpbroker consume -t events -e
  mpbroker consume -t events -p 0 -o -10 -e -K :
  mpbroker consume -t events -o s@1700000000000 -f '%p/%o %k: %s\\n'
  mpbroker consume -t events -J -e | jq .payload
  mpbroker consume -G readers events
  mpbroker consume --share jobs -t events --ack accept

With -G it reads as a member of a consumer group: the partitions that the group assigns
to it, from the group's positions on. Positions are committed after records are written.
For a partition without a position, -o is beginning or end. With -e it stops when all
its partitions are read.

With --share it reads as a member of a share group, which delivers each record to one
of its members. Records are acknowledged after they are written, as --ack says. A new
group begins at the end, unless -o beginning sets its share.auto.offset.reset. With -e
it stops when the group is done with all records, those of other members included.

-J writes kcat's JSON, one object a line. Keys, values and headers are strings if they
are UTF-8, and otherwise {"base64": "..."}. Without -J bytes are written as they are.
"""


def _format(text: str) -> str:
    try:
        format_writer(text, b"")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


@click.command("consume", help=_HELP)
@click.option(
    "-t",
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topic,
    help="A topic to read; may be repeated.",
)
@click.option(
    "-G",
    "--group",
    "group_id",
    metavar="GROUP",
    shell_complete=complete_group,
    help="Read as a member of this group.",
)
@click.option(
    "--share",
    "share_group",
    metavar="GROUP",
    shell_complete=complete_group,
    help="Read as a member of this share group.",
)
@click.option(
    "--ack",
    type=click.Choice(["accept", "release", "reject"]),
    help="With --share: records are done (accept, the default), are delivered again"
    " (release), or are not delivered any more (reject).",
)
@click.argument(
    "group_topics", nargs=-1, metavar="[TOPIC]...", shell_complete=complete_topic
)
@bootstrap_option
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; may be repeated. Default: all partitions.",
)
@click.option(
    "-o",
    "--offset",
    "offsets",
    multiple=True,
    metavar="OFFSET",
    help="beginning (default), end, an offset, -N (the last N records of each"
    " partition), s@TIME (from that time on, in ms or"
    " ISO 8601), e@TIME (up to that time).",
)
@click.option("-e", "--exit-at-end", is_flag=True, help="Stop at the end.")
@click.option(
    "-c", "--count", type=click.IntRange(min=1), help="Stop after so many records."
)
@click.option("-f", "record_format", type=_format, metavar="FORMAT", help=FORMAT_HELP)
@click.option("-J", "--json", "as_json", is_flag=True, help="Write JSON lines.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json is the same as -J.",
)
@click.option(
    "-D",
    "--delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    default="\\n",
    show_default=True,
    help="Written after each record.",
)
@click.option(
    "-K",
    "--key-delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    help="Write keys, too, with this after each.",
)
@click.option("-O", "--print-offset", is_flag=True, help="With -K: write offsets, too.")
@click.option("-Z", "--null", is_flag=True, help="Write NULL for null values and keys.")
@click.option("-u", "--unbuffered", is_flag=True, help="Flush after every record.")
@click.option(
    "-q", "--quiet", is_flag=True, help="No warnings and no progress on stderr."
)
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_committed leaves out records of open and aborted transactions.",
)
@timeout_option
def command(
    topics: Sequence[str],
    group_id: str | None,
    share_group: str | None,
    ack: str | None,
    group_topics: Sequence[str],
    bootstrap: str,
    partitions: Sequence[int],
    offsets: Sequence[str],
    exit_at_end: bool,
    count: int | None,
    record_format: str | None,
    as_json: bool,
    output_format: str,
    delimiter: bytes,
    key_delimiter: bytes | None,
    print_offset: bool,
    null: bool,
    unbuffered: bool,
    quiet: bool,
    isolation: str,
    timeout_s: float,
) -> int:
    as_json = as_json or output_format == "json"
    if as_json and record_format is not None:
        raise click.UsageError("-J and -f exclude each other")
    if print_offset and key_delimiter is None:
        raise click.UsageError("-O needs -K: offsets are written before that delimiter")
    wanted = parse_offsets(offsets)
    topics = list(dict.fromkeys((*topics, *group_topics)))
    if not topics:
        raise click.UsageError("no topic is named; give -t TOPIC")
    if group_id is None and share_group is None and group_topics:
        raise click.UsageError(f"give -t {group_topics[0]}, or -G with a group")
    if group_id is not None:
        _check_group_options(wanted, partitions)
    if share_group is not None:
        _check_share_options(group_id, wanted, partitions, ack, exit_at_end, count)
    elif ack is not None:
        raise click.UsageError("--ack needs --share")
    null_text = b"NULL" if null else b""
    make_writer: MakeWriter
    if as_json:
        make_writer = json_writer
    elif record_format is not None:
        make_writer = _same(format_writer(record_format, null_text))
    else:
        make_writer = _same(
            plain_writer(delimiter, key_delimiter, print_offset, null_text)
        )
    reading = _Reading(
        topics,
        wanted,
        exit_at_end,
        isolation == "read_committed",
        make_writer,
        count,
        unbuffered,
        quiet,
    )
    if share_group is not None:
        share = _Share(share_group, ack or "accept", bool(offsets))
        return _read_as_share_member(bootstrap, timeout_s, reading, share)
    settings = _settings(bootstrap, isolation, timeout_s)
    with open_cluster(bootstrap, timeout_s, CONSUMER_CONFIG) as cluster:
        if group_id is None:
            return _read_partitions(cluster, reading, partitions, settings)
        return _read_as_member(cluster, reading, {**settings, "group.id": group_id})


def _settings(bootstrap: str, isolation: str, timeout_s: float) -> dict[str, object]:
    return {
        # Large responses, because the whole topic may be wanted.
        "fetch.max.bytes": 32 * 1024 * 1024,
        "max.partition.fetch.bytes": 4 * 1024 * 1024,
        "request.timeout.ms": int(timeout_s * 1000),
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "allow.auto.create.topics": False,
        **client_settings(bootstrap),
    }


# Makes a writer, given a function that returns the broker of a partition.
MakeWriter = Callable[[Callable[[TopicPartition], int]], RecordWriter]


def _same(writer: RecordWriter) -> MakeWriter:
    return lambda broker_of: writer


class _Reading(NamedTuple):
    """The topics to read, the offsets to stop at, and how to write the records."""

    topics: Sequence[str]
    wanted: OffsetRange
    exit_at_end: bool
    read_committed: bool
    make_writer: MakeWriter
    max_records: int | None
    unbuffered: bool
    quiet: bool

    @contextmanager
    def output(self, broker_of: Callable[[TopicPartition], int]) -> Iterator[_Output]:
        progress = ProgressLine(
            "read", is_wanted=not (self.quiet or sys.stdout.isatty())
        )
        writer = self.make_writer(broker_of)
        try:
            yield _Output(writer, self.max_records, self.unbuffered, progress)
        finally:
            progress.erase()


def _nothing(reading: _Reading, where: str) -> ExitCode:
    """Say that there was no record; return the exit code for that."""
    if not reading.quiet:
        text = f"no record in {', '.join(reading.topics)}{where}"
        raise CliError(text, ExitCode.NOT_FOUND)
    return ExitCode.NOT_FOUND


def _read_as_member(
    cluster: Cluster, reading: _Reading, settings: dict[str, object]
) -> ExitCode:
    """Write records as a member of the consumer group that the settings name."""
    from mpbroker.cli.records.consume_group import read_as_member

    reset = "latest" if reading.wanted.from_end == 0 else "earliest"
    with reading.output(_LeaderOf(cluster)) as output, until_told():
        read_as_member(
            cluster,
            {"auto.offset.reset": reset, **settings},
            reading.topics,
            output.write_records,
            exit_at_end=reading.exit_at_end,
            count=reading.max_records,
            quiet=reading.quiet,
        )
    if reading.exit_at_end and not output.written:
        return _nothing(
            reading, f" behind the positions of group {settings['group.id']!r}"
        )
    return ExitCode.OK


class _Share(NamedTuple):
    """A share group, how to acknowledge its records, and whether -o is given."""

    group_id: str
    ack: str
    sets_offset: bool


def _read_as_share_member(
    bootstrap: str, timeout_s: float, reading: _Reading, share: _Share
) -> ExitCode:
    from mpbroker.cli.records.consume_share import begin_at, read_as_share_member
    from mpbroker.client.share.share_consumer import AcknowledgeType
    from mpbroker.client.share.share_consumer_config import SHARE_CONSUMER_CONFIG

    with open_cluster(bootstrap, timeout_s, SHARE_CONSUMER_CONFIG) as cluster:
        if share.sets_offset:
            is_end = reading.wanted.from_end == 0
            begin_at(cluster, share.group_id, "latest" if is_end else "earliest")
        with reading.output(_LeaderOf(cluster)) as output, until_told():
            read_as_share_member(
                cluster,
                {
                    "request.timeout.ms": int(timeout_s * 1000),
                    **client_settings(bootstrap),
                    "group.id": share.group_id,
                },
                reading.topics,
                output.write_records,
                kind=AcknowledgeType[share.ack.upper()],
                exit_at_end=reading.exit_at_end,
                count=reading.max_records,
                quiet=reading.quiet,
            )
    if reading.exit_at_end and not output.written:
        return _nothing(reading, f" that group {share.group_id!r} is not done with")
    return ExitCode.OK


def _read_partitions(
    cluster: Cluster,
    reading: _Reading,
    partitions: Sequence[int],
    settings: dict[str, object],
) -> ExitCode:
    """Write the records of partitions between the wanted offsets."""
    with Consumer({**settings, "auto.offset.reset": "none"}) as consumer:
        reader = _Reader(cluster, consumer, reading.topics, partitions, reading.quiet)
        bounds = resolve_bounds(
            cluster,
            reader.leaders,
            reading.wanted,
            stop_at_end=reading.exit_at_end,
            settings=settings,
        )
        try:
            with reading.output(reader.leaders.__getitem__) as output:
                for batches in reader.read(bounds):
                    if not output.write(batches, bounds.stops):
                        break
        except KeyboardInterrupt:
            return ExitCode.OK  # the usual end of a consumer without -e or -c
    if not bounds.stops or output.written:
        return ExitCode.OK
    if reading.wanted.offset is not None:
        raise CliError(_nothing_at(reading.wanted.offset, bounds), ExitCode.NOT_FOUND)
    is_whole = reading.wanted == OffsetRange()
    return _nothing(reading, "" if is_whole else " between the offsets that -o means")


def _nothing_at(offset: int, bounds: Bounds) -> str:
    """Return the error text for an offset that lies beyond the partitions' ends."""
    ends = [f"{where} ends at {stop}" for where, stop in sorted(bounds.stops.items())]
    more = len(ends) - _ENDS_SHOWN
    shown = ends[:_ENDS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return f"no record at offset {offset} or behind it: {', '.join(shown)}"


def _check_group_options(wanted: OffsetRange, partitions: Sequence[int]) -> None:
    if partitions:
        raise click.UsageError(
            "-G and -p exclude each other: a group assigns partitions"
        )
    if wanted not in (OffsetRange(), OffsetRange(from_end=0)):
        raise click.UsageError(
            "a group goes on at its positions: with -G, -o is beginning or end, and"
            " `mpbroker group reset-offsets` sets other positions"
        )


def _check_share_options(
    group_id: str | None,
    wanted: OffsetRange,
    partitions: Sequence[int],
    ack: str | None,
    exit_at_end: bool,
    count: int | None,
) -> None:
    if group_id is not None:
        raise click.UsageError("-G and --share exclude each other")
    if partitions:
        raise click.UsageError(
            "--share and -p exclude each other: a group assigns partitions"
        )
    if wanted not in (OffsetRange(), OffsetRange(from_end=0)):
        raise click.UsageError(
            "with --share, -o is beginning or end; `mpbroker group reset-offsets` sets"
            " other positions"
        )
    if ack == "release" and exit_at_end and count is None:
        raise click.UsageError(
            "-e with --ack release never ends: released records come again; give -c"
        )
    context = click.get_current_context()
    given = context.get_parameter_source("isolation")
    if given is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError(
            "--isolation and --share exclude each other: the group's setting"
            " share.isolation.level counts"
        )


class _LeaderOf:
    """Looks up the node id of a partition's leader; asks once for each topic."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leaders: dict[TopicPartition, int] = {}

    def __call__(self, where: TopicPartition) -> int:
        if where not in self._leaders:
            topic = self._cluster.topic(where.topic, needed=[where.partition])
            for row in topic.partitions:
                partition = TopicPartition(where.topic, row.partition_index)
                self._leaders[partition] = row.leader_id
        return self._leaders[where]


class _Output:
    """Writes records to stdout, until as many as -c asks for are written."""

    def __init__(
        self,
        writer: RecordWriter,
        count: int | None,
        unbuffered: bool,
        progress: ProgressLine,
    ) -> None:
        self.written = 0
        self.progress = progress
        self._writer = writer
        self._left = sys.maxsize if count is None else count
        self._unbuffered = unbuffered

    def write(
        self, batches: Iterable[FetchedBatch], stops: dict[TopicPartition, int]
    ) -> bool:
        """Write batches' records below the stop offsets; return whether to go on."""
        stdout = sys.stdout.buffer
        _check_reader()
        for batch in batches:
            stop = stops.get(batch.partition, sys.maxsize)
            records = _wanted(batch, stop)
            lines = self._writer(batch.partition, batch.header, records)[: self._left]
            self.progress.add(len(lines), sum(map(len, lines)))
            if self._unbuffered:
                for line in lines:
                    stdout.write(line)
                    stdout.flush()
            else:
                stdout.write(b"".join(lines))
            self.written += len(lines)
            self._left -= len(lines)
            if not self._left:
                break
        stdout.flush()
        return self._left > 0

    def write_records(
        self, where: TopicPartition, records: Sequence[ConsumerRecord]
    ) -> bool:
        """Write records of one partition; return whether to go on."""
        _check_reader()
        stdout = sys.stdout.buffer
        for record in records:
            line = Record(
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                record.headers,
            )
            written = self._writer(where, record, (line,))
            stdout.writelines(written)
            self.progress.add(1, sum(map(len, written)))
            if self._unbuffered:
                stdout.flush()
        stdout.flush()
        self.written += len(records)
        self._left -= len(records)
        return self._left > 0


def _check_reader() -> None:
    """Raise BrokenPipeError if stdout is a pipe whose reader has ended.

    A write would fail, too, but in `consume | head -1` the next one may be hours away.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # poll() always reports errors
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        raise BrokenPipeError


def _wanted(batch: FetchedBatch, stop: int) -> Iterable[Record]:
    records = iter_records(batch.data)
    header = batch.header
    if header.base_offset >= batch.first_offset and header.last_offset < stop:
        return records  # nearly always, and without a test for each record
    return [record for record in records if batch.first_offset <= record.offset < stop]


class _Reader:
    """Reads partitions between two offsets each, also across a broker's restart."""

    def __init__(
        self,
        cluster: Cluster,
        consumer: Consumer,
        topics: Sequence[str],
        partitions: Sequence[int],
        quiet: bool,
    ) -> None:
        self._cluster = cluster
        self._consumer = consumer
        self._quiet = quiet
        self.leaders = self._find_leaders(topics, frozenset(partitions))

    def _find_leaders(
        self, topics: Sequence[str], only: frozenset[int]
    ) -> dict[TopicPartition, int]:
        leaders = {}
        for name in topics:
            topic = self._cluster.topic(name, needed=only)
            found = {
                partition.partition_index: partition.leader_id
                for partition in topic.partitions
            }
            for partition in sorted(only or found):
                if partition not in found:
                    raise CliError(
                        f"topic {name!r} has no partition {partition}, only"
                        f" 0..{len(found) - 1}",
                        ExitCode.NOT_FOUND,
                    )
                leaders[TopicPartition(name, partition)] = found[partition]
        return leaders

    def read(self, bounds: Bounds) -> Iterator[list[FetchedBatch]]:
        """Yield the batches of each fetch, until all stop offsets are reached.

        A partition without a stop offset is read for ever.
        """
        consumer = self._consumer
        consumer.assign(bounds.starts)
        for partition, offset in bounds.starts.items():
            consumer.seek(partition, offset)
        left = set(bounds.starts)
        self._drop_finished(left, bounds.stops)
        started: set[TopicPartition] = set()
        give_up_at: float | None = None
        while left:
            try:
                batches = consumer.poll_batches()
            except OffsetOutOfRangeError as error:
                self._put_right(error, error.partition in started)
                continue
            except (BrokerUnavailableError, LeaderLostError) as error:
                now = time.monotonic()
                give_up_at = give_up_at or now + self._cluster.timeout_s
                if now > give_up_at:
                    raise
                self._warn(f"{error}; trying again")
                time.sleep(_RETRY_INTERVAL_S)
                continue
            give_up_at = None
            started.update(batch.partition for batch in batches)
            yield batches
            self._drop_finished(left, bounds.stops)

    def _drop_finished(
        self, left: set[TopicPartition], stops: dict[TopicPartition, int]
    ) -> None:
        for partition in [where for where in left if where in stops]:
            if self._consumer.position(partition) >= stops[partition]:
                left.discard(partition)
                self._consumer.pause([partition])

    def _put_right(self, error: OffsetOutOfRangeError, started: bool) -> None:
        """Move a partition's position to an offset that exists, after a failed fetch.

        If records were deleted before they were read, the new position is the start of
        the log. If a new leader has other records, it is the first of them.

        Args:
            error: names the partition and the offset that it does not have.
            started: whether records of the partition have been read.

        Raises:
            CliError: neither is the case; the offset of -o may not exist, for example.
        """
        partition, consumer = error.partition, self._consumer
        if isinstance(error, LogTruncationError) and error.divergent_offset is not None:
            self._warn(
                f"{partition}: a new leader has other records from offset"
                f" {error.divergent_offset} on; going on there"
            )
            consumer.seek(partition, error.divergent_offset)
            return
        first = consumer.offsets_for([partition], EARLIEST)[partition]
        if started and error.offset < first:
            self._warn(
                f"{partition}: records {error.offset}..{first - 1} were deleted"
                " before they were read"
            )
            consumer.seek(partition, first)
            return
        last = consumer.offsets_for([partition], LATEST)[partition]
        raise CliError(
            f"{error}: the partition has {first}..{last}", ExitCode.NOT_FOUND
        )

    def _warn(self, message: str) -> None:
        if not self._quiet:
            # On a terminal, the line of progress has to go first.
            erase = ERASE if sys.stderr.isatty() else ""
            print(f"{erase}mpbroker: {message}", file=sys.stderr)
