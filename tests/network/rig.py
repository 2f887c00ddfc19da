"""A real Processor in this process, between test clients and a handler of the test.

Nothing waits: ``pump`` gives each side a turn until a condition holds, so a test
decides who moves when, and looks into the processor afterwards.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    PROCESSOR_COUNTERS,
    PROCESSOR_DELIVERED,
    PROCESSOR_HANDED,
    PROCESSOR_INCARNATION,
    ProcessorCounter,
    SlotState,
    processor_row,
    slots_in_use,
)
from mpbroker.network.moves.hand_over import HAND_OVER, HandOver
from mpbroker.network.processor import Processor, ProcessorParts
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.supervisor.memory import BrokerMemory
from tests.support.memory import state_of

TIMEOUT_S: Final = 90.0
Answer = Callable[[HandlerEnd, int, bytes], None]


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def echo(end: HandlerEnd, slot: int, body: bytes) -> None:
    """Answer a request with itself."""
    end.send_bytes(slot, frame(body))


def connected_pair(client_ip: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(
            server.getsockname(), source_address=(client_ip, 0)
        )
        accepted, _ = server.accept()
    return client, accepted


class Client:
    """One connection's far end: sends what it is told to, keeps what it gets."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._unsent = bytearray()
        self._received = bytearray()
        self._frames: list[bytes] = []
        self.is_closed = False  # by the broker
        self.reads = True

    def send(self, data: bytes) -> None:
        self._unsent += data

    @property
    def has_sent(self) -> bool:
        return not self._unsent

    def turn(self) -> None:
        if self.sock.fileno() < 0:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        if not self.reads:
            return
        try:
            while data := self.sock.recv(1 << 20):
                self._received += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_closed = True

    def frames(self) -> list[bytes]:
        """The whole answers received so far."""
        received = self._received
        while len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "big")
            if end > len(received):
                break
            self._frames.append(bytes(received[4:end]))
            del received[:end]
        return self._frames

    def close(self) -> None:
        self.sock.close()


class Rig:
    """One processor, one handler, any number of clients."""

    def __init__(
        self,
        memory: BrokerMemory,
        *,
        answer: Answer = echo,
        max_request_bytes: int = 4 * 1024 * 1024,
        max_idle_ns: int = 0,
        processor: int = 0,
    ) -> None:
        self.memory = memory
        self.number = processor
        self._options = (max_request_bytes, max_idle_ns)
        self.handler = HandlerEnd(
            0,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self.answer = answer
        self.handles = True
        self.held: list[tuple[int, bytes]] = []  # requests taken and not answered
        self.requests: list[bytes] = []  # in the order in which they were taken
        self.clients: list[Client] = []
        self._put_away: list[int] = []
        self.start_processor()

    def start_processor(self) -> None:
        """A (new) process of this processor's id."""
        memory, row = self.memory, processor_row(self.number)
        memory.control.words[row + PROCESSOR_INCARNATION] += 1
        self.deliver()
        self.processor = Processor(
            self.number,
            ProcessorParts(
                memory.control,
                memory.arena,
                memory.arena_layout,
                memory.ring,
                memory.processor_bells[self.number],
                memory.handovers,
                memory.keeper_link,
                memory.notices,
            ),
            *self._options,
        )

    def deliver(self) -> None:
        """There is no keeper: a successor gets no sockets."""
        words, row = self.memory.control.words, processor_row(self.number)
        words[row + PROCESSOR_DELIVERED] = words[row + PROCESSOR_INCARNATION]

    def keep(self, accepted: socket.socket) -> None:
        """There is no keeper to leave a duplicate with."""

    def connect(
        self, pair: tuple[socket.socket, socket.socket] | None = None
    ) -> Client:
        client, accepted = pair or connected_pair()
        words = self.memory.control.words
        words[processor_row(self.number) + PROCESSOR_HANDED] += 1
        self.keep(accepted)
        send_fds(
            self.memory.handovers[self.number][0],
            HAND_OVER.pack(HandOver.NEW, 0, len(self.clients), time.monotonic_ns()),
            [accepted.fileno()],
        )
        accepted.close()
        made = Client(client)
        self.clients.append(made)
        return made

    def turn(self) -> None:
        for client in self.clients:
            client.turn()
        self.processor.turn()
        if self.handles:
            self.handle()

    def handle(self) -> None:
        for slot in self.handler.receive_requests(16, 1, arm=False):
            body = bytes(self.handler.request(slot).body)
            self.requests.append(body)
            self.answer(self.handler, slot, body)
        self.handler.flush()

    def hold(self, end: HandlerEnd, slot: int, body: bytes) -> None:
        """An ``answer`` that answers later: see ``release``."""
        self.held.append((slot, body))

    def release(self, count: int = 1 << 30) -> None:
        now, self.held = self.held[:count], self.held[count:]
        for slot, body in now:
            echo(self.handler, slot, body)
        self.handler.flush()

    def pump(self, until: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        """Give everyone turns until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            result = until()
            if result:
                return result
            assert time.monotonic() < deadline, f"not so after {timeout_s} s"
            self.turn()

    def turns(self, count: int = 50) -> None:
        """Turns enough for all that can happen to happen; for what must not."""
        for _ in range(count):
            self.turn()

    # -- looking inside ---------------------------------------------------------------

    def counter(self, counter: ProcessorCounter) -> int:
        row = processor_row(self.number) + PROCESSOR_COUNTERS
        return int(self.memory.control.words[row + counter])

    @property
    def connections(self) -> int:
        return self.counter(ProcessorCounter.CONNECTIONS)

    def busy_slots(self) -> dict[int, SlotState]:
        states = {
            slot: state_of(self.memory, slot)
            for slot in slots_in_use(self.memory.control.words, self.number)
        }
        return {slot: state for slot, state in states.items() if state}

    def leave_slots(self, count: int) -> None:
        """Let slots run short, until ``end``."""
        free = self.processor._reader._free
        self._put_away += free[:-count]
        del free[:-count]

    def nothing_is_held(self) -> bool:
        """Every slot is free, once, and every extent given back."""
        reader = self.processor._reader
        free = reader._free
        return (
            not self.busy_slots()
            and len(free) == len(set(free)) == 8192 - len(self._put_away)
            and reader._extents.is_unused
            and not any(self.processor._in_flight)
        )

    def end(self) -> None:
        """Close all clients, answer all that is held, and expect everything back."""
        self.handles = True
        self.answer = echo
        for client in self.clients:
            client.close()
        self.clients.clear()
        self.release()
        self.pump(lambda: not self.connections and self.nothing_is_held())
