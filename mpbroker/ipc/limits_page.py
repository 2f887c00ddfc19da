"""The limits page: limits of connections that may change while processes run.

Processors and acceptors obey these limits, but do not read the metadata log. The
supervisor does; it resolves the settings, dynamic ones first, and publishes the numbers
here. The page has two copies, and a version that says which one is valid: a reader
compares one word, and reads a copy only if the version has changed.

    word     field       written by
    0        version     supervisor: +1 commits the copy it points to (version & 1)
    512..    copy 0      supervisor, while copy 1 is valid
    5632..   copy 1      supervisor, while copy 0 is valid

    word of a copy
    0-7      BrokerLimits, one word for each field
    8        how many AddressLimits there are
    15       how many ListenerLimits there are
    16..     ListenerLimits, _LISTENER_WORDS for each listener, by its number
    528..    AddressLimits, _ADDRESS_WORDS for each address

The ledger that acceptors share lies behind it: see network/connection_ledger.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import MAX_PROCESSORS
from mpbroker.ipc.segment import Segment

NO_LIMIT: Final = 2**31 - 1
UNSET: Final = -1
MAX_ADDRESSES: Final = 1024

_VERSION: Final = 0
_COPIES: Final = 512
_COPY_WORDS: Final = 5120
_LISTENERS: Final = 16
_LISTENER_WORDS: Final = 8
_ADDRESSES: Final = _LISTENERS + MAX_PROCESSORS * _LISTENER_WORDS
_ADDRESS_WORDS: Final = 4
LEDGER: Final = _COPIES + 2 * _COPY_WORDS
LEDGER_WORDS: Final = 128 * 1024
_SEGMENT_WORDS: Final = LEDGER + LEDGER_WORDS

# An address in the form of a connection's row: the two words of its IPv6 form.
Address = tuple[int, int]


class BrokerLimits(NamedTuple):
    """The limits of all listeners together. Rates are new connections a second."""

    max_connections: int = NO_LIMIT
    creation_rate: int = NO_LIMIT
    max_per_address: int = NO_LIMIT
    address_rate: int = NO_LIMIT
    protected_listener: int = UNSET  # exempt from the first two
    max_idle_ms: int = 600_000
    rate_samples: int = 11
    rate_window_ms: int = 1000


class ListenerLimits(NamedTuple):
    """The limits of one listener."""

    max_connections: int = NO_LIMIT
    creation_rate: int = NO_LIMIT
    send_buffer_bytes: int = UNSET
    receive_buffer_bytes: int = UNSET


class AddressLimits(NamedTuple):
    """The limits of one client address; UNSET: the limit of all addresses applies."""

    max_connections: int = UNSET
    creation_rate: int = UNSET


class Limits(NamedTuple):
    """The limits of connections: of the broker, its listeners, and some addresses."""

    broker: BrokerLimits = BrokerLimits()
    listeners: Sequence[ListenerLimits] = ()
    addresses: Mapping[Address, AddressLimits] = {}

    def of_listener(self, number: int) -> ListenerLimits:
        if number < len(self.listeners):
            return self.listeners[number]
        return ListenerLimits()

    def max_of_address(self, address: Address) -> int:
        """Return the number of connections that an address may have."""
        own = self.addresses.get(address)
        if own is None or own.max_connections == UNSET:
            return self.broker.max_per_address
        return own.max_connections

    def rate_of_address(self, address: Address) -> int:
        """Return the number of connections a second that an address may make."""
        own = self.addresses.get(address)
        if own is None or own.creation_rate == UNSET:
            return self.broker.address_rate
        return own.creation_rate

    def are_none(self, listener: int) -> bool:
        """Return whether new connections to a listener are limited in no way.

        There is no limit on their number or rate.
        """
        broker, own = self.broker, self.of_listener(listener)
        return (
            broker.max_connections
            == broker.creation_rate
            == broker.max_per_address
            == broker.address_rate
            == own.max_connections
            == own.creation_rate
            == NO_LIMIT
            and not self.addresses
        )


class LimitsPage:
    """The limits of connections in shared memory, as one process sees them."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._seen = 0
        self._limits = Limits()

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-limits", _SEGMENT_WORDS * 8)

    def publish(self, limits: Limits) -> None:
        """Publish new limits of connections to all processes. Only for the supervisor.

        If there are more than MAX_ADDRESSES addresses, only the first ones have limits
        of their own.
        """
        words, version = self._words, self._words[_VERSION] + 1
        copy = _copy(version)
        addresses = list(limits.addresses.items())[:MAX_ADDRESSES]
        for word, number in enumerate((*limits.broker, len(addresses))):
            words[copy + word] = number
        words[copy + _LISTENERS - 1] = len(limits.listeners)
        for index, listener in enumerate(limits.listeners):
            at = copy + _LISTENERS + index * _LISTENER_WORDS
            for word, number in enumerate(listener):
                words[at + word] = number
        for index, (address, own) in enumerate(addresses):
            at = copy + _ADDRESSES + index * _ADDRESS_WORDS
            for word, number in enumerate((*address, *own)):
                words[at + word] = number
        # Last, as one aligned store: until then readers use the other copy.
        words[_VERSION] = version

    def read(self) -> Limits:
        """Return the present limits: the same object until they change."""
        while self._words[_VERSION] != self._seen:
            version = self._words[_VERSION]
            limits = self._read(_copy(version))
            if self._words[_VERSION] == version:  # else it may have been overwritten
                self._seen, self._limits = version, limits
        return self._limits

    def _read(self, copy: int) -> Limits:
        words = self._words
        fields = len(BrokerLimits._fields)
        broker = BrokerLimits(*words[copy : copy + fields].tolist())
        count = words[copy + fields]
        at = copy + _ADDRESSES
        flat = words[at : at + count * _ADDRESS_WORDS].tolist()
        addresses = {
            (flat[entry], flat[entry + 1]): AddressLimits(
                flat[entry + 2], flat[entry + 3]
            )
            for entry in range(0, len(flat), _ADDRESS_WORDS)
        }
        listeners = []
        for index in range(words[copy + _LISTENERS - 1]):
            at = copy + _LISTENERS + index * _LISTENER_WORDS
            own = words[at : at + len(ListenerLimits._fields)].tolist()
            listeners.append(ListenerLimits(*own))
        return Limits(broker, tuple(listeners), addresses)


def _copy(version: int) -> int:
    return _COPIES + (version & 1) * _COPY_WORDS


assert len(BrokerLimits._fields) < _LISTENERS - 1
assert _ADDRESSES + MAX_ADDRESSES * _ADDRESS_WORDS <= _COPY_WORDS
