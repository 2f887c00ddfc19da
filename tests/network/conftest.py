"""A processor for each test, which must have given everything back at its end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpbroker.network.security.listener_authentication import SaslSettings
from tests.network.rig import Rig
from tests.network.security.secure_rig import Certificates, SecureRig, security
from tests.support.memory import broker_memory


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Make a rig: make_rig(queued_max_requests=3, answer=...)."""
    monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 0)
    monkeypatch.setattr("mpbroker.network.processor._BLOCKED_POLL_S", 0)
    monkeypatch.setattr("mpbroker.network.processor._STARVED_POLL_S", 0)
    made: list[Rig] = []
    memories = []

    def make(
        *, queued_max_requests: int = 500, kind: type[Rig] = Rig, **options: object
    ) -> Rig:
        memory = broker_memory(queued_max_requests=queued_max_requests)
        rig = kind(memory.__enter__(), **options)
        memories.append(memory)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.end()
    for memory in memories:
        memory.__exit__(None, None, None)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_rig(
    make_rig: Callable[..., Rig], certificates: Certificates
) -> Callable[..., Rig]:
    """SSL: tls_rig(settings of it)."""

    def make(
        sasl: SaslSettings | None = None,
        options: dict[str, Any] | None = None,
        **settings: object,
    ) -> Rig:
        tls = certificates.settings(**settings)
        return make_rig(kind=SecureRig, security=security(tls, sasl, **(options or {})))

    return make
