"""ProducerCode: the settings of a producer whose values are code.

Each is an argument of `Producer`, and has the name of Kafka's setting, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

from mpbroker.base.config_def import ConfigError
from mpbroker.client.code_settings import PRODUCER_CODE, load_code, take_code
from mpbroker.client.serialization import Serializer, load_serializer
from mpbroker.producer.partitioners import Partitioner, RoundRobinPartitioner
from mpbroker.producer.record import ProducerInterceptor

_PARTITIONER: Final = "partitioner.class"
_INTERCEPTORS: Final = "interceptor.classes"
_KAFKAS: Final = "org.apache.kafka.clients.producer."
_DEFAULTS: Final = (
    "org.apache.kafka.clients.producer.internals.DefaultPartitioner",
    "org.apache.kafka.clients.producer.UniformStickyPartitioner",
)


class ProducerCode(NamedTuple):
    """The serializers, partitioner and interceptors of a producer."""

    key_serializer: Serializer | None
    value_serializer: Serializer | None
    partitioner: Partitioner | None
    interceptors: Sequence[ProducerInterceptor]

    @classmethod
    def take(
        cls,
        given: Mapping[str, object],
        key_serializer: object,
        value_serializer: object,
        partitioner: Partitioner | None,
        interceptors: Sequence[ProducerInterceptor],
    ) -> tuple[dict[str, object], Self]:
        """Split the settings into plain values and code; return both.

        Raises:
            ConfigError: there is no code of a given name, or it is given twice.
        """
        plain, code = take_code(
            given,
            dict(
                zip(
                    PRODUCER_CODE,
                    (
                        key_serializer,
                        value_serializer,
                        partitioner,
                        tuple(interceptors),
                    ),
                    strict=True,
                )
            ),
        )
        of_key, of_value = (
            load_serializer(key, code[key]) if key in code else None
            for key in PRODUCER_CODE[:2]
        )
        return plain, cls(
            of_key,
            of_value,
            _partitioner(code.get(_PARTITIONER)),
            _interceptors(code.get(_INTERCEPTORS, ())),
        )


def _partitioner(value: object) -> Partitioner | None:
    if value in _DEFAULTS:
        raise ConfigError(
            f"{_PARTITIONER}={value}: Kafka has it no more; leave it out for the"
            " default, or set partitioner.ignore.keys=true"
        )
    if value == f"{_KAFKAS}RoundRobinPartitioner":
        return RoundRobinPartitioner()
    found = load_code(
        _PARTITIONER, value, "a partitioner", f"MODULE:CLASS, or {_KAFKAS}RoundRobin..."
    )
    made = found() if isinstance(found, type) else found
    if made is not None and not hasattr(made, "partition"):
        raise ConfigError(
            f"{_PARTITIONER}={value}: it has no method partition(); see Partitioner"
        )
    return made  # type: ignore[no-any-return]


def _interceptors(value: object) -> Sequence[ProducerInterceptor]:
    names = value.split(",") if isinstance(value, str) else value
    assert isinstance(names, (list, tuple)), f"{_INTERCEPTORS} is no list"
    made: list[ProducerInterceptor] = []
    for name in names:
        name = name.strip() if isinstance(name, str) else name
        if name == "":
            continue
        found = load_code(_INTERCEPTORS, name, "an interceptor", "MODULE:CLASS")
        each = found() if isinstance(found, type) else found
        if not isinstance(each, ProducerInterceptor):
            raise ConfigError(
                f"{_INTERCEPTORS}: {name} is no ProducerInterceptor; derive it from"
                " that class"
            )
        made.append(each)
    return made
