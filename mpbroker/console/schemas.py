"""Show values in the format of Confluent's serializers, by a schema registry.

A zero byte and four bytes of a schema id stand before such a value. The operator names
the registry in the broker's settings; a browser gives no address, and no id but that in
a message.

One thread asks the registry, for one schema at a time, and remembers each. A page waits
for schemas for a bounded time in all, however slow the registry is. Then it shows bytes
with a sentence, and the next look finds the schema.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.console.schema_values import Reader, Value
    from mpbroker.spark.pipeline.schemas.registry import Registered, Registry

_LOG = get_logger(__name__)

URL_KEY: Final = "console.schema.registry.url"
LOGIN_KEY: Final = "console.schema.registry.basic.auth.user.info"
CA_KEY: Final = "console.schema.registry.ssl.truststore.location"
_HEADER: Final = struct.Struct(">bI")
# A page waits so long for all its schemas together.
_PATIENCE_S: Final = 2.0
_TIMEOUT_S: Final = 5.0  # of each step of a request to the registry
# So long nobody asks again: a registry that was away, a schema that cannot be had.
_AWAY_S: Final = 3.0
_REFUSED_S: Final = 30.0
_MAX_KNOWN: Final = 1000  # schemas, and ids without one
_MAX_WANTED: Final = 64  # ids that wait for the thread
MAX_BYTES: Final = 128 * 1024  # of a value that is decoded


class Undecoded(ValueError):
    """A value that cannot be shown by its schema now; the text says why."""


class Decoded(NamedTuple):
    """A value, and the id of its schema."""

    schema_id: int
    value: Value


class _Refusal(NamedTuple):
    text: str
    until: float  # by the clock


# Decodes the values of one page; raises Undecoded.
Decoder = Callable[[bytes], Decoded]


def schema_id_of(data: bytes) -> int:
    """Return the schema id before a value; 0: it does not begin with one.

    Source: Confluent Schema Registry, "Wire format". Ids begin with 1.
    """
    if len(data) < _HEADER.size or data[0]:
        return 0
    return int(_HEADER.unpack_from(data)[1])


class Schemas:
    """The schemas of a registry by id; any thread may use them.

    Args:
        registry: asked by a thread of this object alone; None: there is no registry.
    """

    def __init__(
        self,
        registry: Registry | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self._known: dict[int, Reader | _Refusal] = {}
        self._wanted: dict[int, None] = {}  # in the order in which they are asked for
        self._away: _Refusal | None = None
        self._is_asking = False  # the thread has been started
        self._asked_at: float | None = None  # the request that the thread is at

    @property
    def has_registry(self) -> bool:
        return self._registry is not None

    def decoder(self) -> Decoder:
        """Return a function that decodes the values of one page.

        It waits for the registry, and raises Undecoded when it has waited enough.
        """
        deadline = self._clock() + _PATIENCE_S

        def decode(data: bytes) -> Decoded:
            return self._decode(data, deadline)

        return decode

    def _decode(self, data: bytes, deadline: float) -> Decoded:
        if self._registry is None:
            raise Undecoded(f"no schema registry is set: see {URL_KEY}")
        schema_id = schema_id_of(data)
        if not schema_id:
            raise Undecoded("it does not begin with a zero byte and a schema id")
        if len(data) > MAX_BYTES:
            raise Undecoded(f"a value above {MAX_BYTES} bytes is not decoded")
        read = self._reader(schema_id, deadline)
        try:
            return Decoded(schema_id, read(data[_HEADER.size :]))
        except ValueError as error:
            raise Undecoded(
                f"schema {schema_id} does not explain it: {error}"
            ) from None

    def _reader(self, schema_id: int, deadline: float) -> Reader:
        with self._changed:
            while True:
                found = self._known.get(schema_id)
                if found is None or (
                    isinstance(found, _Refusal) and found.until < self._clock()
                ):
                    found = self._away_now()
                if isinstance(found, _Refusal):
                    raise Undecoded(found.text)
                if found is not None:
                    return found
                self._want(schema_id)
                # One who comes while the registry is slow has no patience of his own.
                until = deadline
                if self._asked_at is not None:
                    until = min(until, self._asked_at + _PATIENCE_S)
                left = until - self._clock()
                if left <= 0:
                    raise Undecoded(
                        f"the schema registry has not given schema {schema_id} yet;"
                        " look again in a moment"
                    )
                self._changed.wait(left)

    def _away_now(self) -> _Refusal | None:
        """Return why nobody is asked at present; None: the registry may be asked."""
        away = self._away
        return away if away is not None and away.until >= self._clock() else None

    def _want(self, schema_id: int) -> None:
        if schema_id in self._wanted:
            return
        if len(self._wanted) >= _MAX_WANTED:
            raise Undecoded("too many schemas are asked for; look again in a moment")
        self._known.pop(schema_id, None)  # a refusal whose time is over
        self._wanted[schema_id] = None
        self._changed.notify_all()
        if not self._is_asking:
            self._is_asking = True
            threading.Thread(target=self._ask, name="schemas", daemon=True).start()

    def _ask(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                schema_id = next(iter(self._wanted))
                self._asked_at = self._clock()
            found, away = self._look_up(schema_id)
            with self._changed:
                self._asked_at = None
                if away is not None:
                    self._away = away
                    self._wanted.clear()
                else:
                    del self._wanted[schema_id]
                if found is not None:
                    self._known[schema_id] = found
                while len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._changed.notify_all()

    def _look_up(
        self, schema_id: int
    ) -> tuple[Reader | _Refusal | None, _Refusal | None]:
        """Return a schema's reader, or why there is none; or why nobody answers."""
        from mpbroker.console.schema_values import reader_of
        from mpbroker.spark.pipeline.errors import PipelineError
        from mpbroker.spark.pipeline.schemas.registry import (
            RegistryAwayError,
            UnknownSchemaError,
        )

        assert self._registry is not None
        try:
            return reader_of(_complete(self._registry, schema_id)), None
        except RegistryAwayError as error:
            return None, _Refusal(str(error), self._clock() + _AWAY_S)
        except UnknownSchemaError:
            text = f"the schema registry has no schema {schema_id}"
        except PipelineError as error:
            text = f"schema {schema_id} cannot be used: {error}"
        except Exception:  # noqa: BLE001 - a bug must not end the thread
            _LOG.exception("console: schema %d cannot be used; a bug", schema_id)
            text = f"schema {schema_id} cannot be used; see the broker's log"
        return _Refusal(text, self._clock() + _REFUSED_S), None


def _complete(registry: Registry, schema_id: int) -> Registered:
    """Return a schema; one of Protobuf as descriptor, if the registry has it."""
    from mpbroker.spark.pipeline.errors import PipelineError

    found = registry.by_id(schema_id)
    if found.kind == "PROTOBUF":
        with contextlib.suppress(PipelineError):
            return registry.by_id(schema_id, serialized=True)
    return found


def schemas_by(config: BrokerConfig) -> Schemas:
    """Return the schemas of the registry that the settings name."""
    urls = tuple(each.rstrip("/") for each in config.console_schema_registry_url)
    if not urls:
        return Schemas(None)
    # Imported here: most brokers name no registry. Neither Spark nor a format's library
    # is imported with it.
    from mpbroker.spark.pipeline.schemas.registry import Registry, SettingNames

    return Schemas(
        Registry(
            urls,
            ca=config.console_schema_registry_ssl_truststore_location or "",
            waits=False,
            login=config.console_schema_registry_basic_auth_user_info or "",
            timeout_s=_TIMEOUT_S,
            names=SettingNames(URL_KEY, LOGIN_KEY, CA_KEY),
        )
    )


__all__ = ["Decoded", "Decoder", "Schemas", "Undecoded", "schema_id_of", "schemas_by"]
