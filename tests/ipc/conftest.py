"""Shared memory for each test."""

from collections.abc import Iterator

import pytest

from mpbroker.ipc import ring
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.supervisor.memory import BrokerMemory
from tests.support.memory import broker_memory


@pytest.fixture
def memory() -> Iterator[BrokerMemory]:
    with broker_memory() as made:
        yield made


@pytest.fixture(params=["compiled", "python"])
def rings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both twins of the rings, one after the other; says which."""
    if request.param == "python":
        monkeypatch.setattr(ring, "core", None)
    elif not IS_COMPILED:
        pytest.skip("the compiled core is not there")
    return str(request.param)
