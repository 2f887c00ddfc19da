"""What all of it together costs that watches and limits clients: metrics that are
scraped and a status page that is looked at every second, and quotas of each kind that
nobody reaches. And the same with an authorizer that says yes.

Two brokers, one with all that and one bare, are loaded in turn and not at the same
time: what a scrape costs is so much a second, whatever else there is to do, and so a
larger share of half a machine. The CPU of the metrics' own process counts, too. What is
given is the median of the pairs of runs, and the quartiles beside it.
"""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Iterator
from typing import Final

from mpbroker.protocol.messages import alter_client_quotas as alter
from tests.bench import wire
from tests.bench.authorization import GUARDED
from tests.bench.brokers import Broker, CheckoutBroker, free_port
from tests.bench.cases import Case, Context
from tests.bench.load import Template, run_load
from tests.bench.machinery import CHECKOUT, figures_of
from tests.bench.small_requests import KINDS

_API: Final = (49, 1)
_CONNECTIONS: Final = 16
_INTERVAL_S: Final = 1.0
_PAIRS: Final = 10
_LEAST_S: Final = 3.0  # with as many scrapes
_MANY: Final = 1_000_000_000
_OF_CLIENTS: Final = {
    "producer_byte_rate": 1e15,
    "consumer_byte_rate": 1e15,
    "request_percentage": 1e9,
    "controller_mutation_rate": 1e9,
}
# Of whom, and what: "" is everybody who has none of his own.
_QUOTAS: Final = (
    ({"client-id": ""}, _OF_CLIENTS),
    ({"user": ""}, _OF_CLIENTS),
    ({"user": "", "client-id": ""}, _OF_CLIENTS),
    ({"ip": ""}, {"connection_creation_rate": 1e9}),
)
_LIMITS: Final = (
    f"max.connections={_MANY}",
    f"max.connections.per.ip={_MANY}",
    f"max.connection.creation.rate={_MANY}",
)


def _set_quotas(broker: Broker) -> None:
    message = alter.AlterClientQuotasRequest(
        entries=[
            alter.EntryData(
                entity=[
                    alter.EntityData(entity_type=kind, entity_name=name or None)
                    for kind, name in entity.items()
                ],
                ops=[
                    alter.OpData(key=key, value=value, remove=False)
                    for key, value in limits.items()
                ],
            )
            for entity, limits in _QUOTAS
        ],
        validate_only=False,
    )
    with broker.connect() as connection:
        payload = connection.ask(wire.request(_API, message.encode(1)))
    answer = alter.AlterClientQuotasResponse.decode(1, memoryview(payload)[5:])
    for entry in answer.entries:
        if entry.error_code:
            raise wire.AnswerError(f"no quotas: {entry.error_message}")


@contextlib.contextmanager
def _watched(port: int) -> Iterator[None]:
    """Ask for metrics and the status page's figures once a second."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_INTERVAL_S):
            for path in ("metrics", "api/status"):
                # Whoever starves is asked again the next time.
                with contextlib.suppress(OSError):
                    address = f"http://127.0.0.1:{port}/{path}"
                    with urllib.request.urlopen(address, timeout=60) as page:
                        page.read()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _measure(broker: Broker, templates: list[Template], seconds: float) -> float:
    figures = run_load(
        broker.address,
        broker.tree,
        templates,
        connections=_CONNECTIONS,
        measure_s=max(_LEAST_S, seconds),
    )
    return figures.metrics()["cpu_us"]


def _case(name: str, kind: str, settings: tuple[str, ...]) -> Case:
    def run(context: Context) -> dict[str, float]:
        port = free_port()
        metrics = f"metrics.listeners=HTTP://127.0.0.1:{port}"
        full = CheckoutBroker(CHECKOUT, settings=(metrics, *_LIMITS, *settings))
        with full.broker() as loaded, CheckoutBroker(CHECKOUT).broker() as bare:
            _set_quotas(loaded)
            brokers = [(each, KINDS[kind](each)) for each in (loaded, bare)]
            pairs = []
            with _watched(port):
                for number in range(_PAIRS):
                    # Who is first this time is second the next.
                    turn = -1 if number % 2 else 1
                    runs = [
                        _measure(*each, context.seconds) for each in brokers[::turn]
                    ]
                    pairs.append((runs[::turn][0], runs[::turn][1]))
        return figures_of(pairs)

    return Case(f"{name}/{kind}/{_CONNECTIONS}", run, starts_brokers=True)


CASES: Final = [
    *(_case("everything", kind, ()) for kind in ("produce-acks1", "api-versions")),
    *(
        _case("everything-guarded", kind, GUARDED)
        for kind in ("produce-acks1", "api-versions")
    ),
]
