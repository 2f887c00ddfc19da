"""What quotas cost that are set and not hit: one broker, with and without, in turn."""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.messages import alter_client_quotas as alter
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.load import Template, run_load
from tests.bench.small_requests import api_versions, produce_acks_1

_API: Final = (49, 1)
_ENOUGH: Final = {
    "producer_byte_rate": 1e15,
    "request_percentage": 1e9,
    "controller_mutation_rate": 1e9,
}
_ROUNDS: Final = 3


def _set_quotas(broker: Broker, *, wanted: bool) -> None:
    """Give every client id a quota of each kind that nobody reaches, or none."""
    entry = alter.EntryData(
        entity=[alter.EntityData(entity_type="client-id", entity_name=None)],
        ops=[
            alter.OpData(key=key, value=value if wanted else 0.0, remove=not wanted)
            for key, value in _ENOUGH.items()
        ],
    )
    message = alter.AlterClientQuotasRequest(entries=[entry], validate_only=False)
    with broker.connect() as connection:
        payload = connection.ask(wire.request(_API, message.encode(1)))
    answer = alter.AlterClientQuotasResponse.decode(1, memoryview(payload)[5:])
    if answer.entries[0].error_code:
        raise wire.AnswerError(f"no quotas: {answer.entries[0].error_message}")


def _measure(context: Context, templates: list[Template], connections: int) -> float:
    broker = context.broker
    figures = run_load(
        broker.address,
        broker.tree,
        templates,
        connections=connections,
        measure_s=context.seconds,
    )
    return figures.metrics()["cpu_us"]


def _case(kind: str, connections: int) -> Case:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        prepare = produce_acks_1 if kind == "produce-acks1" else api_versions
        templates = broker.once(f"requests/{kind}", lambda: prepare(broker))
        without, with_quotas = [], []
        for _ in range(_ROUNDS):
            without.append(_measure(context, templates, connections))
            _set_quotas(broker, wanted=True)
            try:
                with_quotas.append(_measure(context, templates, connections))
            finally:
                _set_quotas(broker, wanted=False)
        return {
            "cpu_us": min(with_quotas),
            "cpu_ratio": min(with_quotas) / min(without),
        }

    return Case(f"quotas/{kind}/{connections}", run)


CASES: Final = [_case("produce-acks1", 16), _case("api-versions", 16)]
