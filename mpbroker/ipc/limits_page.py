"""What processors and acceptors obey that may change while they run: one page.

They have no view of the metadata log. The supervisor has one; it resolves the settings,
dynamic ones first, and publishes numbers here. Two copies and a version that says which
counts: a reader compares one word, and reads a copy only if that has moved.

    word     field       written by
    0        version     supervisor: +1 commits the copy it points to (version & 1)
    512..    copy 0      supervisor, while copy 1 counts
    5120..   copy 1      supervisor, while copy 0 counts

    word of a copy
    0-9      BrokerLimits, a field a word; addresses: how many follow
    16..     ListenerLimits, LISTENER_WORDS a listener, by its number
    144..    AddressLimits, ADDRESS_WORDS an address

What acceptors tell each other lies behind it: see network/connection_ledger.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from mpbroker.ipc.layout import MAX_PROCESSORS
from mpbroker.ipc.segment import Segment

NO_LIMIT: Final = 2**31 - 1
UNSET: Final = -1
MAX_ADDRESSES: Final = 1024

_VERSION: Final = 0
_COPIES: Final = 512
_COPY_WORDS: Final = 4608
_LISTENERS: Final = 16
_LISTENER_WORDS: Final = 8
_ADDRESSES: Final = _LISTENERS + MAX_PROCESSORS * _LISTENER_WORDS
_ADDRESS_WORDS: Final = 4
LEDGER: Final = _COPIES + 2 * _COPY_WORDS
LEDGER_WORDS: Final = 128 * 1024
_SEGMENT_WORDS: Final = LEDGER + LEDGER_WORDS

# An address as a connection's row has it: the two words of its IPv6 form.
Address = tuple[int, int]


class BrokerLimits(NamedTuple):
    """Of all listeners together; rates are connections a second."""

    max_connections: int = NO_LIMIT
    creation_rate: int = NO_LIMIT
    max_per_address: int = NO_LIMIT
    address_rate: int = NO_LIMIT
    protected_listener: int = UNSET  # exempt from the first two
    max_idle_ms: int = 600_000
    rate_samples: int = 11
    rate_window_ms: int = 1000


class ListenerLimits(NamedTuple):
    """Of one listener."""

    max_connections: int = NO_LIMIT
    creation_rate: int = NO_LIMIT
    send_buffer_bytes: int = UNSET
    receive_buffer_bytes: int = UNSET


class AddressLimits(NamedTuple):
    """Of the clients at one address, where they are not those of all."""

    max_connections: int = UNSET
    creation_rate: int = UNSET


class Limits(NamedTuple):
    """All of it."""

    broker: BrokerLimits = BrokerLimits()
    listeners: Sequence[ListenerLimits] = ()
    addresses: Mapping[Address, AddressLimits] = {}

    def of_listener(self, number: int) -> ListenerLimits:
        if number < len(self.listeners):
            return self.listeners[number]
        return ListenerLimits()

    def max_of_address(self, address: Address) -> int:
        """How many connections one address may have."""
        own = self.addresses.get(address)
        if own is None or own.max_connections == UNSET:
            return self.broker.max_per_address
        return own.max_connections

    def rate_of_address(self, address: Address) -> int:
        """How many connections a second one address may make."""
        own = self.addresses.get(address)
        if own is None or own.creation_rate == UNSET:
            return self.broker.address_rate
        return own.creation_rate

    def are_none(self, listener: int) -> bool:
        """Whether nothing limits the connections of a listener."""
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
    """The page, as one process sees it."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._seen = 0
        self._limits = Limits()

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-limits", _SEGMENT_WORDS * 8)

    def publish(self, limits: Limits) -> None:
        """Have everybody obey other limits. The supervisor's alone.

        Of more than MAX_ADDRESSES addresses the first count.
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
        words[_VERSION] = version

    def read(self) -> Limits:
        """Return what counts now: the same object as long as nothing has changed."""
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
