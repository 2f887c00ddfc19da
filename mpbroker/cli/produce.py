"""`mpbroker produce`: records from standard input or files, in kcat's letters."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import click

from mpbroker.cli.delimiter import parse_delimiter
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.message_input import MessageRules, has_more, read_messages
from mpbroker.cli.options import (
    bootstrap_option,
    complete_topic,
    format_option,
    timeout_option,
)
from mpbroker.cli.output import print_json
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import describe_topic_configs
from mpbroker.client.cluster import Cluster
from mpbroker.client.partitioner import partition_for_key
from mpbroker.client.record_sender import Header, RecordSender
from mpbroker.errors import MpbrokerError
from mpbroker.protocol.compression import Codec

_ACKS: Final = {"all": -1, "-1": -1, "1": 1, "0": 0}

# While more input is at hand, batches fill up; after this long without any, what there
# is goes out. The 5 ms are librdkafka's queue.buffering.max.ms and Java's linger.ms.
_LINGER_MS: Final = 5
_DEFAULT_BATCH_BYTES: Final = 1_000_000
# What compression may add to bytes that cannot be compressed, batch header included.
_BATCH_MARGIN: Final = 1024

# From a record's key to its partition; None is any partition.
_Chooser = Callable[[bytes | None], int | None]

_HELP = """\
Write records to a topic: one for each line of standard input, or one for each FILE.

Keys go to the partitions where Kafka's Java client puts them; records without a key
to one partition a batch. Every record is acknowledged before this exits with 0, and is
written once even if the connection breaks. Bytes go through as they are.

\b
  echo hello | mpbroker produce -t greetings
  mpbroker produce -t events -K : -z lz4 -l events.txt
  tail -F app.log | mpbroker produce -t logs -H host=web1 -T
"""


def _parse_header(text: str) -> Header:
    name, equals, value = text.partition("=")
    if not name:
        raise click.BadParameter(f"{text!r} has no name; a header is NAME=VALUE")
    # Without "=" the value is null, as in kcat.
    return name, value.encode("utf-8", "surrogateescape") if equals else None


@click.command("produce", help=_HELP)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("-t", "--topic", required=True, shell_complete=complete_topic)
@bootstrap_option
@click.option(
    "-p",
    "--partition",
    type=int,
    default=-1,
    help="Only this partition; -1 (default) chooses one.",
)
@click.option(
    "-D",
    "--delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    default="\\n",
    show_default=True,
    help="Between messages; \\n \\t \\r \\0 \\xNN are understood.",
)
@click.option(
    "-K",
    "--key-delimiter",
    type=parse_delimiter,
    metavar="DELIM",
    help="Ends the key of a message; one without it has no key of its own.",
)
@click.option("-k", "--key", help="Key of all messages that have none of their own.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE")
@click.option(
    "-z",
    "--compression",
    "codec",
    type=click.Choice([codec.name.lower() for codec in Codec]),
    default="none",
    show_default=True,
)
@click.option("--level", type=int, help="Compression level; default: the codec's.")
@click.option(
    "-Z", "--empty-is-null", is_flag=True, help="Send empty values and keys as null."
)
@click.option(
    "-l", "--lines", is_flag=True, help="Cut FILE into messages, as standard input is."
)
@click.option("-T", "--tee", is_flag=True, help="Also write what is sent to stdout.")
@click.option(
    "-c", "--count", type=click.IntRange(min=1), help="Stop after so many messages."
)
@click.option(
    "-a",
    "--acks",
    type=click.Choice(list(_ACKS)),
    default="all",
    show_default=True,
    help="all: on disk; 1: in the log; 0: sent, and no answer waited for.",
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
    if tee and output_format == "json":
        raise click.UsageError("-T and --format json both want stdout")
    rules = MessageRules(
        key_delimiter,
        None if key is None else key.encode("utf-8", "surrogateescape"),
        empty_is_null,
    )
    record_headers = tuple(_parse_header(text) for text in headers)
    with Cluster(parse_addresses(bootstrap), timeout_s) as cluster:
        sender = RecordSender(
            cluster,
            topic,
            acks=_ACKS[acks],
            codec=Codec.from_name(codec),
            level=level,
            batch_bytes=batch_bytes or _fitting_batch_bytes(cluster, topic),
        )
        producer = _Producer(sender, rules, record_headers, _chooser(sender, partition))
        tee_delimiter = delimiter if tee else None
        if files and not lines:
            producer.send_whole(files, count, tee_delimiter)
        else:
            producer.send_lines(files, delimiter, count, tee_delimiter)
    if output_format == "json":
        print_json({"topic": topic, "records": sender.written})


def _fitting_batch_bytes(cluster: Cluster, topic: str) -> int:
    try:
        cluster.topic(topic, auto_create=True)
        configs = describe_topic_configs(cluster, [topic], ["max.message.bytes"])
        limit = int(configs[topic][0].value or _DEFAULT_BATCH_BYTES)
    except (MpbrokerError, IndexError, ValueError):
        return _DEFAULT_BATCH_BYTES  # a broker may refuse to tell; it judges anyway
    return max(min(_DEFAULT_BATCH_BYTES, limit - _BATCH_MARGIN), 1)


def _chooser(sender: RecordSender, partition: int) -> _Chooser:
    """Return what chooses the partition of a key."""
    count = sender.partition_count
    if partition >= count or partition < -1:
        raise CliError(
            f"no partition {partition}: the topic has 0..{count - 1}",
            ExitCode.NOT_FOUND,
        )
    if partition >= 0:
        return lambda key: partition

    @lru_cache(maxsize=1 << 16)
    def choose(key: bytes | None) -> int | None:
        return None if key is None else partition_for_key(key, count)

    return choose


class _Producer:
    """Feeds messages to a RecordSender."""

    def __init__(
        self,
        sender: RecordSender,
        rules: MessageRules,
        headers: tuple[Header, ...],
        choose: _Chooser,
    ) -> None:
        self._sender = sender
        self._rules = rules
        self._headers = headers
        self._choose = choose

    def send_whole(
        self, files: Sequence[Path], count: int | None, tee_delimiter: bytes | None
    ) -> None:
        """Send each file as one message."""
        for path in files[:count]:
            try:
                message = path.read_bytes()
            except OSError as error:
                raise CliError(f"{path}: {(error.strerror or '').lower()}") from error
            self._send([message])
            _tee([message], tee_delimiter)
        self._sender.flush()

    def send_lines(
        self,
        files: Sequence[Path],
        delimiter: bytes,
        count: int | None,
        tee_delimiter: bytes | None,
    ) -> None:
        """Send what stands between delimiters, in a file or on standard input."""
        fd = os.open(files[0], os.O_RDONLY) if files else sys.stdin.fileno()
        left = sys.maxsize if count is None else count
        for messages in self._read(fd, delimiter):
            taken = messages[:left]
            self._send(taken)
            _tee(taken, tee_delimiter)
            left -= len(taken)
            if not left:
                break
            if not has_more(fd, _LINGER_MS):
                self._sender.flush()
        self._sender.flush()

    def _read(self, fd: int, delimiter: bytes) -> Iterator[list[bytes]]:
        try:
            yield from read_messages(fd, delimiter)
        except OSError as error:
            self._sender.flush()
            raise CliError(f"cannot read input: {error.strerror}") from error

    def _send(self, messages: Sequence[bytes]) -> None:
        timestamp = int(time.time() * 1000)
        split, choose, headers = self._rules.split, self._choose, self._headers
        append = self._sender.append
        for message in messages:
            key, value = split(message)
            append(choose(key), timestamp, key, value, headers)


def _tee(messages: Sequence[bytes], delimiter: bytes | None) -> None:
    if delimiter is not None and messages:
        sys.stdout.buffer.write(delimiter.join(messages) + delimiter)
        sys.stdout.buffer.flush()
