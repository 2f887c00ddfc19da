"""Apache Kafka's kafka-dump-log reads the files that we wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.adapters import ADAPTERS, Outgoing
from tests.compat.adapters.adapter import CODECS
from tests.compat.records import T0, some_records
from tests.compat.test_java_tools import run_java
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools

pytestmark = pytest.mark.skipif(
    not have_java_tools(),
    reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
)

# What the tool says of a batch or an index entry that it does not believe.
COMPLAINT = re.compile(
    r"(?i)isvalid: false|mismatch|out of order|found timestamp|does not match|not ok"
    r"|exception|corrupt|invalid|failed|skipped|error"
)


def dump(files: list[Path], *options: str) -> str:
    assert files, "nothing to dump"
    names = ",".join(str(file) for file in sorted(files))
    printed = run_java(
        "org.apache.kafka.tools.DumpLogSegments", "--files", names, *options
    )
    assert not COMPLAINT.search(printed), COMPLAINT.search(printed)
    return printed


def batches(printed: str) -> list[dict[str, str]]:
    """Return the batch lines as words by name."""
    lines = [line for line in printed.splitlines() if line.startswith("baseOffset:")]
    return [dict(re.findall(r"(\w+): (\S+)", line)) for line in lines]


def fill(broker: Broker, topic: str, config: dict[str, str], rounds: int) -> Path:
    """Publish with every codec, idempotently and not; return the partition's folder."""
    with ADAPTERS["confluent-kafka"](broker.bootstrap) as client:
        client.create_topic(topic, 1, config)
        for number in range(rounds):
            for codec in CODECS:
                client.produce(
                    topic, some_records(30), codec=codec, idempotent=number % 2 == 1
                )
    return Path(str(broker.config["log.dirs"])) / f"{topic}-0"


def test_segments_of_every_codec_are_valid(
    make_broker: Callable[..., Broker], topic_name: str
) -> None:
    broker = make_broker()
    folder = fill(broker, topic_name, {}, rounds=2)
    printed = dump([folder / f"{0:020}.log"], "--deep-iteration", "--print-data-log")
    found = batches(printed)
    assert {batch["compresscodec"] for batch in found} == set(CODECS)
    assert all(batch["isvalid"] == "true" for batch in found)
    assert all(batch["magic"] == "2" for batch in found)
    assert {batch["producerId"] == "-1" for batch in found} == {True, False}
    assert sum(int(batch["count"]) for batch in found) == 300
    offsets = re.findall(r"^\| offset: (\d+) CreateTime: (\d+)", printed, re.MULTILINE)
    assert offsets == [(str(i), str(T0 + i % 30)) for i in range(300)]


def test_indexes_agree_with_their_segments(
    make_broker: Callable[..., Broker], topic_name: str
) -> None:
    broker = make_broker()
    # Small segments and dense indexes: many files, many entries.
    config = {"segment.bytes": "16384", "index.interval.bytes": "512"}
    folder = fill(broker, topic_name, config, rounds=10)
    logs = sorted(folder.glob("*.log"))
    assert len(logs) > 2
    printed = dump(logs)
    ends = [int(batch["lastOffset"]) for batch in batches(printed)]
    starts = [int(batch["baseOffset"]) for batch in batches(printed)]
    assert starts == [0, *(end + 1 for end in ends[:-1])]
    # The tool compares each entry with the segment beside it.
    indexes = list(folder.glob("*.index")) + list(folder.glob("*.timeindex"))
    assert len(indexes) == 2 * len(logs)
    assert re.search(r"^offset: \d+ position: \d+", dump(indexes), re.MULTILINE)
    broker.stop()
    dump([*folder.glob("*.index")], "--index-sanity-check")
    dump([*folder.glob("*.timeindex")], "--verify-index-only")


def test_producer_snapshots_are_read(
    make_broker: Callable[..., Broker], topic_name: str
) -> None:
    broker = make_broker()
    folder = fill(broker, topic_name, {}, rounds=2)
    broker.stop()  # a clean stop leaves a snapshot at the end of the log
    snapshots = [file for file in folder.glob("*.snapshot") if int(file.stem) > 0]
    printed = dump(snapshots)
    assert re.search(r"producerId: \d+ producerEpoch: 0 ", printed)


def test_a_compacted_segment_is_valid(
    make_broker: Callable[..., Broker], topic_name: str
) -> None:
    broker = make_broker({"log.cleaner.backoff.ms": 50})
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "segment.bytes": "16384",
        "min.cleanable.dirty.ratio": "0.01",
    }
    records = [
        Outgoing(b"value %d" % i * 20, b"key %d" % (i % 5), (), T0 + i)
        for i in range(1000)
    ]
    with ADAPTERS["confluent-kafka"](broker.bootstrap) as client:
        client.create_topic(topic_name, 1, config)
        for start in range(0, 1000, 50):
            client.produce(topic_name, records[start : start + 50], codec="lz4")
    folder = Path(str(broker.config["log.dirs"])) / f"{topic_name}-0"
    broker.stop()
    dump([*folder.glob("*.log")], "--deep-iteration", "--print-data-log")
    dump([*folder.glob("*.index"), *folder.glob("*.timeindex")])
