"""A metadata log of Apache Kafka 4.3.1, and what its kafka-dump-log printed of it.

The node had metadata.version 30. Admin clients created, altered and deleted topics,
configs of topics, brokers and groups, ACLs, SCRAM users and quotas; then the node was
stopped.
"""

import gzip
import json
from pathlib import Path
from typing import Any, Final

_GOLDEN: Final = Path(__file__).parents[1] / "metadata" / "golden"


def kafka_log() -> bytes:
    """Return the segment that Kafka wrote."""
    return gzip.decompress((_GOLDEN / "kafka-4.3.1-metadata.log.gz").read_bytes())


def kafka_dump_text() -> bytes:
    """Return what `kafka-dump-log --cluster-metadata-decoder` printed of the segment.

    Without its first line, which names the file.
    """
    return gzip.decompress((_GOLDEN / "kafka-4.3.1-metadata.txt.gz").read_bytes())


def kafka_dump() -> list[dict[str, Any]]:
    """Return its records in order: {"type": ..., "version": ..., "data": ...}."""
    lines = kafka_dump_text().decode().splitlines()
    found = [line.partition(" payload: ")[2] for line in lines]
    return [json.loads(payload) for payload in found if payload]
