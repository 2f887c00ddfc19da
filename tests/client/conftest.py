from collections.abc import Iterator

import pytest

from mpbroker.client.cluster import Cluster
from tests.client.fake_broker import FakeBroker


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    broker = FakeBroker({"t": 3})
    yield broker
    broker.close()


@pytest.fixture
def cluster(fake_broker: FakeBroker) -> Iterator[Cluster]:
    with Cluster([fake_broker.address], timeout_s=30) as cluster:
        yield cluster
