"""What an authorizer costs that is asked about everybody and says yes: two brokers, one
with it and one without, measured in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.bench.brokers import Broker, CheckoutBroker
from tests.bench.cases import Case, Context
from tests.bench.load import run_load
from tests.bench.small_requests import KINDS

_CHECKOUT: Final = Path(__file__).parents[2]
# Of one principal, so that no topic is open to everybody: each sender is asked about.
GUARDED: Final = (
    "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users=User:ANONYMOUS",
)
_CONNECTIONS: Final = 16
_ROUNDS: Final = 3


def _case(kind: str) -> Case:
    def measure(context: Context, broker: Broker) -> float:
        figures = run_load(
            broker.address,
            broker.tree,
            broker.once(kind, lambda: KINDS[kind](broker)),
            connections=_CONNECTIONS,
            measure_s=context.seconds,
        )
        return figures.metrics()["cpu_us"]

    def run(context: Context) -> dict[str, float]:
        open_to_all, guarded = [], []
        with (
            CheckoutBroker(_CHECKOUT).broker() as without,
            CheckoutBroker(_CHECKOUT, settings=GUARDED).broker() as with_authorizer,
        ):
            for _ in range(_ROUNDS):
                open_to_all.append(measure(context, without))
                guarded.append(measure(context, with_authorizer))
        return {
            "cpu_us": min(guarded),
            "cpu_ratio": min(guarded) / min(open_to_all),
        }

    return Case(f"authorization/{kind}/{_CONNECTIONS}", run, starts_brokers=True)


CASES: Final = [_case(kind) for kind in ("produce-acks1", "fetch", "metadata-1")]
