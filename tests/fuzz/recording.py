"""Record the requests of real clients in their tests: python -m tests.fuzz.recording.

It runs the tests of tests/compat, and some of our own clients, with a proxy before each
listener of each broker that they start, and writes what passed to corpus.jsonl. It has
those of librdkafka, kafka-python, aiokafka, franz-go, kafkajs and Java that are on this
machine; some twenty minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import pytest

from tests.fuzz.recorder import Recorder, condense, save
from tests.support.broker import Broker
from tests.support.ports import reusable_port

TESTS: Final = (
    *(
        "tests/compat",
        "tests/client/test_consumer.py",
        "tests/client/test_telemetry.py",
    ),
    *("tests/client/test_admin_client.py", "tests/client/test_secured_broker.py"),
    *("tests/producer/test_producer.py", "tests/producer/test_transactions.py"),
)
# They ask about Apache Kafka, or only wait for many clients of one kind.
_OMITTED: Final = (
    *("--ignore=tests/compat/test_reference.py", "--deselect"),
    "tests/compat/test_groups.py::test_a_thousand_groups_of_one_client_are_in_nobodys_way",
)
# What passes another listener's connections is not to be read.
_READABLE: Final = ("PLAINTEXT", "SASL_PLAINTEXT")

_recorders: list[Recorder] = []
_start = Broker.start


def _start_behind_proxies(broker: Broker) -> str:
    """Start a broker; clients are told the addresses of its proxies."""
    proxies = vars(broker).setdefault("proxies", _proxies_of(broker))
    _start(broker)
    broker.listeners = {**broker.listeners, **proxies}
    broker.bootstrap = next(iter(broker.listeners.values()))
    return broker.bootstrap


def _proxies_of(broker: Broker) -> dict[str, str]:
    """Put a proxy before each listener without TLS; return their addresses by name."""
    listeners = str(broker.config["listeners"]).split(",")
    if "advertised.listeners" in broker.config or not all(
        each.endswith("127.0.0.1:0") for each in listeners
    ):
        return {}  # the test has to know its addresses
    proxies, own, advertised = {}, [], []
    for name in (each.partition(":")[0] for each in listeners):
        port = told = reusable_port()
        if name in _READABLE:
            told = reusable_port()
            _recorders.append(Recorder(name, told, port))
            proxies[name] = f"127.0.0.1:{told}"
        own.append(f"{name}://127.0.0.1:{port}")
        advertised.append(f"{name}://127.0.0.1:{told}")
    broker.config["listeners"] = ",".join(own)
    broker.config["advertised.listeners"] = ",".join(advertised)
    return proxies


def pytest_configure(config: pytest.Config) -> None:
    """Take part as a plug-in of pytest."""
    Broker.start = _start_behind_proxies  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the corpus."""
    for recorder in _recorders:
        recorder.close()
    corpus = condense(_recorders)
    save(corpus)
    frames = sum(len(each.frames) for each in corpus.conversations)
    print(f"\nkept {frames} requests of {len(corpus.conversations)} connections")


def main(arguments: Sequence[str]) -> int:
    # In one process, which has all proxies. A test that does not like its proxy fails,
    # and what it has sent is kept all the same.
    options = ["-n", "0", "-q", "-p", "no:randomly", "-p", "tests.fuzz.recording"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # we import mpbroker
    return pytest.main([*options, *_OMITTED, *(arguments or TESTS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
