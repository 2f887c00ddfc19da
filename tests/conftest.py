"""What all tests share: a broker per worker, fresh topics, the broker's last words."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import settings

from mpbroker.ipc.named_segment import remove_leftovers
from tests.gate.heavy import is_heavy, token
from tests.support.broker import Broker

BOOTSTRAP_VARIABLE: Final = "MPBROKER_TEST_BOOTSTRAP"

# Few examples by default: the suite is run often. More with --hypothesis-profile=deep.
settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile("quick")

_running: list[Broker] = []


class OtherBroker(NamedTuple):
    """A broker that somebody else runs, for example Apache Kafka."""

    bootstrap: str


@pytest.fixture(scope="session", autouse=True)
def no_names_left() -> Iterator[None]:
    """Remove what killed brokers leave in /dev/shm until the next broker starts."""
    yield
    remove_leftovers()


@pytest.fixture(scope="session")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker of ours, shared by this worker's tests: for tests that see its files."""
    broker = Broker(tmp_path_factory.mktemp("broker") / "data")
    broker.start()
    _running.append(broker)
    yield broker
    _running.remove(broker)
    broker.close()


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Broker | OtherBroker:
    """The broker under test: ours, or the one at $MPBROKER_TEST_BOOTSTRAP."""
    if bootstrap := os.environ.get(BOOTSTRAP_VARIABLE):
        return OtherBroker(bootstrap)
    return request.getfixturevalue("own_broker")


@pytest.fixture(scope="session")
def bootstrap(broker: Broker | OtherBroker) -> str:
    """HOST:PORT of the broker under test."""
    return broker.bootstrap


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Start brokers with a test's own settings; all are stopped after the test.

    make_broker({"num.io.threads": 1}, name="data"): the name tells directories apart.
    """
    made: list[Broker] = []

    def make(config: dict[str, object] | None = None, name: str = "data") -> Broker:
        broker = Broker(tmp_path / name, config)
        made.append(broker)
        _running.append(broker)
        broker.start()
        return broker

    yield make
    for broker in made:
        _running.remove(broker)
        broker.close()


@pytest.fixture
def topic_name() -> str:
    """A name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.hookimpl(trylast=True)  # after they were shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Spark's: one worker's JVM will do, and the longest of all come first.

    Each worker has a stretch of the list, and takes from the ends of others' stretches.
    Those that need no JVM come where chance has put them.
    """
    spark = Path(__file__).with_name("spark")
    items.sort(key=lambda item: spark not in item.path.parents or not is_heavy(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time-out's clock starts
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    with token() if is_heavy(item) else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.failed:
        for broker in _running:
            title = f"log of the broker in {broker.data_dir}"
            report.sections.append((title, broker.log_tail()))
            if boxes := broker.black_boxes():
                report.sections.append(("its black boxes of dead processes", boxes))
    return report
