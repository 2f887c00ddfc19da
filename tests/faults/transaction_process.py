"""A producer in a process of its own, for tests that kill it in a transaction.

    python -m tests.faults.transaction_process BOOTSTRAP TRANSACTIONAL_ID

Reads lines of JSON: the records of a transaction, and whether to commit it. Writes
"asked" before it asks for the end, and "committed" or "aborted" behind it; "failed" if
it was refused. Ends then, so that its successor begins anew.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Final

from confluent_kafka import KafkaException, Producer

_CALL_S: Final = 20


def main(bootstrap: str, transactional_id: str) -> None:
    """Serve until the input ends, or a transaction fails."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
        }
    )
    try:
        producer.init_transactions(_CALL_S)
        for line in sys.stdin:
            request = json.loads(line)
            producer.begin_transaction()
            for topic, partition, value in request["records"]:
                producer.produce(topic, value, partition=partition)
            producer.flush(_CALL_S)
            print("asked", flush=True)
            if request["commits"]:
                producer.commit_transaction(_CALL_S)
                print("committed", flush=True)
            else:
                producer.abort_transaction(_CALL_S)
                print("aborted", flush=True)
    except KafkaException:
        with contextlib.suppress(BrokenPipeError):
            print("failed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
