"""`mpbroker produce`: send lines of standard input, or files, with kcat's options."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import click

from mpbroker.base.errors import MpbrokerError
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    client_settings,
    complete_topic,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json
from mpbroker.cli.records.delimiter import parse_delimiter
from mpbroker.cli.records.ending import told_to_end
from mpbroker.cli.records.message_input import MessageRules, has_more, read_messages
from mpbroker.cli.records.progress_line import ProgressLine
from mpbroker.client.admin.config_admin import (
    ConfigResource,
    ConfigResourceType,
    describe_configs,
)
from mpbroker.client.cluster import Cluster
from mpbroker.producer import (
    Producer,
    ProducerError,
    RecordFuture,
    RetriableError,
    SerializationError,
)
from mpbroker.producer.config import PRODUCER_CONFIG
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.records.compression import Codec

_ACKS: Final = ("all", "-1", "1", "0")

# Batches fill up while there is more input, and are sent after so many ms without any.
# 5 ms is librdkafka's queue.buffering.max.ms and Java's linger.ms.
_LINGER_MS: Final = 5
_FULL_BATCH_LINGER_MS: Final = 500
_DEFAULT_BATCH_BYTES: Final = 1_000_000
# Memory for records that are not acknowledged yet. More than Kafka's default, because
# the batches are larger, too.
_BUFFER_BYTES: Final = 64 * 1024 * 1024
_MAX_REQUEST_BYTES: Final = 100 * 1024 * 1024  # a broker's socket.request.max.bytes
# Bytes that a batch header and compression may add to bytes that do not compress.
_BATCH_MARGIN: Final = 1024

# The codecs that have a level: those with a setting of the producer for it.
_LEVELS: Final = tuple(
    codec.name.lower()
    for codec in Codec
    if f"compression.{codec.name.lower()}.level"
    in {key.name for key in PRODUCER_CONFIG}
)

Header = tuple[str, bytes | None]
# Of a record: its future, or the error with which it was refused at once.
_Outcome = RecordFuture | ProducerError

_HELP = """\
Write records to a topic: one for each line of standard input, or one for each FILE.

A key goes to the same partition as from Kafka's Java client. Records without a key fill
a batch for one partition after another. The command exits with 0 when every record is
acknowledged. Each record is written once, even if the connection breaks. Bytes are
written as they are. At SIGTERM the lines that were read are sent, and the command ends.

\b
  echo hello | mpbroker produce -t greetings
  mpbroker produce -t events -K : -z lz4 -l events.txt
  tail -F app.log | mpbroker produce -t logs -H host=web1 -T
  mpbroker consume -t a -e -J | mpbroker produce -t copy -J
"""


def _parse_header(text: str) -> Header:
    name, equals, value = text.partition("=")
    if not name:
        raise click.BadParameter(f"{text!r} has no name; a header is NAME=VALUE")
    # As in kcat, the value is null if there is no "=".
    return name, value.encode("utf-8", "surrogateescape") if equals else None


@click.command("produce", help=_HELP)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "-t",
    "--topic",
    required=True,
    shell_complete=complete_topic,
    help="The topic; it is created if auto.create.topics.enable is set.",
)
@bootstrap_option
@click.option(
    "-p",
    "--partition",
    type=int,
    default=-1,
    help="Write to this partition; -1 (default): the partitioner chooses.",
)
@click.option(
    "-D",
    "--delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    default="\\n",
    show_default=True,
    help="Stands between messages; may have \\n \\t \\r \\0 \\xNN.",
)
@click.option(
    "-K",
    "--key-delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    help="Stands between key and value; a message without it has no key.",
)
@click.option("-k", "--key", help="Key of all messages that have no key.")
@click.option(
    "-J",
    "--json",
    "as_json",
    is_flag=True,
    help="Read JSON lines as `consume -J` writes them: keys, values, headers, times.",
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header for all messages; may be repeated.",
)
@click.option(
    "-z",
    "--compression",
    "codec",
    type=click.Choice([codec.name.lower() for codec in Codec]),
    default="none",
    show_default=True,
    help="How batches are compressed.",
)
@click.option("--level", type=int, help="Compression level; default: the codec's.")
@click.option(
    "-Z", "--empty-is-null", is_flag=True, help="Send empty values and keys as null."
)
@click.option(
    "-l", "--lines", is_flag=True, help="Cut FILE into messages, like standard input."
)
@click.option("-T", "--tee", is_flag=True, help="Also write the messages to stdout.")
@click.option(
    "-c", "--count", type=click.IntRange(min=1), help="Stop after so many messages."
)
@click.option(
    "-a",
    "--acks",
    type=click.Choice(_ACKS),
    default="all",
    show_default=True,
    help="When a record is acknowledged: all: on disk; 1: in the log; 0: when sent.",
)
@click.option(
    "--batch-bytes",
    type=click.IntRange(min=1, max=100_000_000),
    default=None,
    help=f"Uncompressed size of a batch. Default: {_DEFAULT_BATCH_BYTES}, or the"
    " topic's max.message.bytes if that is less.",
)
@timeout_option
@format_option
def command(
    files: Sequence[Path],
    topic: str,
    bootstrap: str,
    partition: int,
    delimiter: bytes,
    key_delimiter: bytes | None,
    key: str | None,
    as_json: bool,
    headers: Sequence[str],
    codec: str,
    level: int | None,
    empty_is_null: bool,
    lines: bool,
    tee: bool,
    count: int | None,
    acks: str,
    batch_bytes: int | None,
    timeout_s: float,
    output_format: str,
) -> None:
    if lines and len(files) != 1:
        raise click.UsageError("-l takes exactly one FILE to cut into messages")
    if as_json and (key_delimiter, key, empty_is_null) != (None, None, False):
        raise click.UsageError("-J excludes -K, -k and -Z: its lines have the keys")
    if as_json and files and not lines:
        raise click.UsageError("-J reads lines: give -l with FILE")
    if tee and output_format == "json":
        raise click.UsageError(
            "-T and --format json exclude each other: both use stdout"
        )
    if level is not None and codec not in _LEVELS:
        raise click.UsageError(f"--level: with -z, one of {', '.join(_LEVELS)}")
    rules = MessageRules(
        key_delimiter,
        None if key is None else key.encode("utf-8", "surrogateescape"),
        empty_is_null,
        as_json,
    )
    record_headers = tuple(_parse_header(text) for text in headers)
    with open_cluster(bootstrap, timeout_s, PRODUCER_CONFIG) as cluster:
        _check_partition(cluster, topic, partition)
        batch_bytes = batch_bytes or _fitting_batch_bytes(cluster, topic)
    settings = _settings(codec, level, acks, batch_bytes, timeout_s)
    if files and not lines:
        # Each file is one record, and the largest has to fit.
        largest = max(path.stat().st_size for path in files)
        settings["buffer.memory"] = _BUFFER_BYTES + 2 * largest
        settings["max.request.size"] = max(_MAX_REQUEST_BYTES, 2 * largest)
    # A terminal shows messages that are typed or written there: no line of progress.
    is_typed = not files and sys.stdin.isatty()
    progress = ProgressLine("sent", is_wanted=not (is_typed or tee))
    with Producer({**settings, **client_settings(bootstrap)}) as producer:
        sender = _Sender(
            producer,
            topic,
            None if partition < 0 else partition,
            rules,
            record_headers,
            delimiter if tee else None,
            progress,
        )
        try:
            if files and not lines:
                sender.send_whole(files, count)
            else:
                with told_to_end() as told:
                    sender.send_lines(files, delimiter, count, told)
        finally:
            progress.erase()
    if output_format == "json":
        print_json({"topic": topic, "records": sender.written})


def _settings(
    codec: str, level: int | None, acks: str, batch_bytes: int, timeout_s: float
) -> dict[str, object]:
    timeout_ms = int(timeout_s * 1000)
    settings: dict[str, object] = {
        "acks": acks,
        "batch.size": batch_bytes,
        "buffer.memory": max(_BUFFER_BYTES, 4 * batch_bytes),
        "max.request.size": _MAX_REQUEST_BYTES,
        "compression.type": codec,
        "linger.ms": _FULL_BATCH_LINGER_MS,
        "request.timeout.ms": timeout_ms,
        "max.block.ms": timeout_ms,
        "delivery.timeout.ms": timeout_ms + _FULL_BATCH_LINGER_MS,
    }
    if level is not None:
        settings[f"compression.{codec}.level"] = level
    if acks not in ("all", "-1"):
        # Without a producer id, a record that is sent twice would be written twice.
        settings["retries"] = 0
    return settings


def _fitting_batch_bytes(cluster: Cluster, topic: str) -> int:
    try:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        configs = describe_configs(cluster, resource, ["max.message.bytes"])
        limit = int(configs[0].value or _DEFAULT_BATCH_BYTES)
    except (MpbrokerError, IndexError, ValueError):
        return _DEFAULT_BATCH_BYTES  # the broker did not tell, and may refuse a batch
    return max(min(_DEFAULT_BATCH_BYTES, limit - _BATCH_MARGIN), 1)


def _check_partition(cluster: Cluster, topic: str, partition: int) -> None:
    """Raise CliError if a topic lacks a partition; the broker may create the topic."""
    found = cluster.topic(topic, auto_create=True, needed=[partition])
    count = len(found.partitions)
    if partition >= count or partition < -1:
        raise CliError(
            f"no partition {partition}: the topic has 0..{count - 1}",
            ExitCode.NOT_FOUND,
        )


class _Sender:
    """Sends messages through a producer, and checks the outcome of each."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        partition: int | None,
        rules: MessageRules,
        headers: tuple[Header, ...],
        tee_delimiter: bytes | None,
        progress: ProgressLine,
    ) -> None:
        self.written = 0
        self._progress = progress
        self._producer = producer
        self._topic = topic
        self._partition = partition
        self._rules = rules
        self._headers = headers
        self._tee_delimiter = tee_delimiter
        self._sent = 0
        self._failed = 0
        self._told = 0
        self._error: ProducerError | None = None  # the first one
        self._is_stopped = False  # an error would meet all later messages, too
        self._is_whole = False  # nothing of the input is left
        # Messages sent together, with the number of the first one in the input.
        self._pending: deque[tuple[int, list[_Outcome]]] = deque()

    def send_whole(self, files: Sequence[Path], count: int | None) -> None:
        """Send each file as one message."""
        for path in files[:count]:
            try:
                message = path.read_bytes()
            except OSError as error:
                self._end()
                raise CliError(f"{path}: {(error.strerror or '').lower()}") from error
            self._send([message])
        self._is_whole = True
        self._end()

    def send_lines(
        self, files: Sequence[Path], delimiter: bytes, count: int | None, told: int
    ) -> None:
        """Send the messages of a file or standard input, cut at a delimiter.

        When the descriptor ``told`` is readable, only what was read is sent.
        """
        fd = os.open(files[0], os.O_RDONLY) if files else sys.stdin.fileno()
        left = sys.maxsize if count is None else count
        for messages in self._read(fd, delimiter, told):
            taken = messages[:left]
            self._send(taken)
            left -= len(taken)
            if not left:
                break
            if not has_more(fd, _LINGER_MS):
                self._flush()
        self._is_whole = True
        self._end()

    def _read(self, fd: int, delimiter: bytes, told: int) -> Iterator[list[bytes]]:
        try:
            yield from read_messages(fd, delimiter, told)
        except OSError as error:
            self._end()
            raise CliError(f"cannot read input: {error.strerror}") from error

    def _send(self, messages: Sequence[bytes]) -> None:
        now_ms = int(time.time() * 1000)
        record_of, send = self._rules.record, self._producer.send
        topic, partition, fixed = self._topic, self._partition, self._headers
        outcomes: list[_Outcome] = []
        for message in messages:
            try:
                key, value, headers, timestamp_ms = record_of(message)
                outcome: _Outcome = send(
                    topic,
                    value,
                    key,
                    headers=(*headers, *fixed) if headers else fixed,
                    partition=partition,
                    timestamp_ms=now_ms if timestamp_ms is None else timestamp_ms,
                )
            except ValueError as error:
                outcome = SerializationError(str(error))
            except ProducerError as error:
                outcome = error
            outcomes.append(outcome)
        self._pending.append((self._sent + 1, outcomes))
        self._sent += len(outcomes)
        self._progress.add(len(outcomes), sum(map(len, messages)))
        while self._pending and all(map(_is_done, self._pending[0][1])):
            self._settle(*self._pending.popleft())
        if self._is_stopped:
            self._end()
        if self._tee_delimiter is not None and messages:
            delimiter = self._tee_delimiter
            sys.stdout.buffer.write(delimiter.join(messages) + delimiter)
            sys.stdout.buffer.flush()

    def _flush(self) -> None:
        self._producer.flush()
        while self._pending:
            self._settle(*self._pending.popleft())
        if self._is_stopped:
            self._raise()

    def _end(self) -> None:
        """Wait for all messages that were sent; raise CliError if some failed."""
        self._flush()
        if self._error is not None:
            self._raise()

    def _raise(self) -> NoReturn:
        assert self._error is not None
        text = f"{self._topic}: {self._failed} of {self._sent} records not written"
        if self._is_stopped and not self._is_whole:
            text += "; what follows them in the input was not sent"
        raise CliError(text, _exit_code(self._error))

    def _settle(self, first: int, outcomes: Sequence[_Outcome]) -> None:
        """Count the written records; name those that could not be written at once.

        The messages behind them are sent, unless they would fail in the same way.

        Args:
            first: the first record's number in the input, from 1 on.
            outcomes: the outcome of each record.
        """
        failed: dict[str, list[int]] = {}
        errors: list[ProducerError] = []
        for number, outcome in enumerate(outcomes, first):
            error = _error_of(outcome)
            if error is not None:
                failed.setdefault(str(error), []).append(number)
                errors.append(error)
        self.written += len(outcomes) - len(errors)
        self._failed += len(errors)
        self._error = self._error or next(iter(errors), None)
        self._is_stopped |= any(map(_meets_all, errors))
        for text, numbers in failed.items():
            self._tell(f"{self._topic}: {_records(numbers)} not written: {text}")

    def _tell(self, text: str) -> None:
        self._told += 1
        if self._told > _MOST_TOLD:
            return
        if self._told == _MOST_TOLD:
            text += "; later ones are only counted"
        self._progress.erase()
        print(f"mpbroker: {text}", file=sys.stderr, flush=True)


def _meets_all(error: ProducerError) -> bool:
    """Return whether an error is not about its own record alone."""
    if isinstance(error, SerializationError):
        return False
    return error.error_code not in _OF_A_RECORD


def _error_of(outcome: _Outcome) -> ProducerError | None:
    return outcome if isinstance(outcome, ProducerError) else outcome.exception()


def _is_done(outcome: _Outcome) -> bool:
    return isinstance(outcome, ProducerError) or outcome.done()


def _records(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"1 record (number {numbers[0]} of the input)"
    return (
        f"{len(numbers)} records (of numbers {numbers[0]}-{numbers[-1]} of the input)"
    )


def _exit_code(error: ProducerError) -> ExitCode:
    code = error.error_code
    if isinstance(error, RetriableError) and (code is None or code.name in _GONE):
        return ExitCode.UNAVAILABLE
    return ExitCode.ERROR


_GONE: Final = frozenset({"NETWORK_EXCEPTION", "REQUEST_TIMED_OUT"})
# Errors of a record or its batch; others are of the topic, the client or the broker.
_OF_A_RECORD: Final = frozenset(
    {
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.RECORD_LIST_TOO_LARGE,
    }
)
_MOST_TOLD: Final = 20  # lines about records that were not written
