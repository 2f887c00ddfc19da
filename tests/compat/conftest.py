"""A client of each library, and topics made by none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.compat.adapters import ADAPTERS, Adapter
from tests.support.children import wait_until


@pytest.fixture(params=sorted(ADAPTERS))
def client(request: pytest.FixtureRequest, bootstrap: str) -> Iterator[Adapter]:
    """Each library in turn."""
    with ADAPTERS[request.param](bootstrap) as adapter:
        yield adapter


@pytest.fixture
def make_topic(bootstrap: str, topic_name: str) -> Iterator[Callable[..., str]]:
    """Create a topic that is gone after the test: make_topic(partitions, **config)."""
    made: list[str] = []
    with ADAPTERS["confluent-kafka"](bootstrap) as admin:

        def make(partitions: int = 1, **config: str) -> str:
            name = f"{topic_name}-{len(made)}"
            settings = {key.replace("_", "."): value for key, value in config.items()}
            admin.create_topic(name, partitions, settings)
            made.append(name)
            # Apache Kafka's broker learns of it a moment after its controller.
            wait_until(lambda: admin.topics().get(name) == partitions)
            return name

        yield make
        for name in made:
            if name in admin.topics():
                admin.delete_topic(name)
