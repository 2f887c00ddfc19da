"""Play scenarios against a broker and hold it to what it owes."""

from __future__ import annotations

import socket
import struct
from typing import Final

from tests.fuzz.scenarios import Owed, Scenario

# Not how fast the broker must be: how long before we call it stuck.
STUCK_S: Final = 20.0
# Long enough for an answer to arrive in almost every case where one may.
GLANCE_S: Final = 0.02
MAX_DRIPPING: Final = 32


class BrokenPromiseError(Exception):
    """The broker did not do what it owed."""


class _Peer:
    """One hostile connection."""

    def __init__(self, address: tuple[str, int], scenario: Scenario) -> None:
        self.scenario = scenario
        self.socket = socket.create_connection(address, STUCK_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self.ended = False

    def send(self, data: bytes) -> None:
        """Write; that the broker has closed already is for receive() to see."""
        if not self.ended:
            try:
                self.socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                self.ended = True

    def half_close(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.ended = True

    def receive(self, timeout_s: float) -> bool:
        """Read once; return False if nothing came in time or the broker has closed."""
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(1 << 20)
        except TimeoutError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
            return False
        self._received += data
        return True

    def answered(self) -> list[int]:
        """Return the correlation ids of the answers that are whole.

        Raises:
            BrokenPromiseError: what came is no sequence of frames.
        """
        ids = []
        at = 0
        while len(self._received) - at >= 4:
            (size,) = struct.unpack_from(">i", self._received, at)
            if not 4 <= size < 1 << 26:
                raise BrokenPromiseError(f"an answer of {size} bytes")
            if len(self._received) - at < 4 + size:
                break
            ids.append(struct.unpack_from(">i", self._received, at + 4)[0])
            at += 4 + size
        return ids

    def settle(self) -> None:
        """Wait for what is owed.

        Raises:
            BrokenPromiseError: it did not come, or something else did.
        """
        expected = self.scenario.correlation_ids
        if self.scenario.owed is Owed.ANYTHING:
            while not self.ended and len(self.answered()) < max(1, len(expected)):
                if not self.receive(GLANCE_S):
                    break
            answered = self.answered()
            if expected and answered != expected[: len(answered)]:
                raise BrokenPromiseError(f"answers to {answered}, asked {expected}")
            return
        while len(self.answered()) < len(expected):
            if not self.receive(STUCK_S):
                what = "closed" if self.ended else f"silent for {STUCK_S} s"
                raise BrokenPromiseError(
                    f"{what} after {len(self.answered())} of {len(expected)} answers"
                )
        if self.scenario.owed is Owed.CLOSE and (
            self.receive(STUCK_S) or not self.ended
        ):
            raise BrokenPromiseError("not closed")
        if self.answered() != expected:
            raise BrokenPromiseError(f"answers to {self.answered()}, asked {expected}")

    def close(self, *, reset: bool) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()


class Attacker:
    """Plays scenarios one after another; those that drip go on in the background."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._dripping: list[tuple[_Peer, bytes]] = []

    def play(self, scenario: Scenario, number: int) -> None:
        """Run a scenario to its end, or leave it dripping.

        Raises:
            BrokenPromiseError: the broker did not do what it owed for it, or for one
                that was dripping until now.
            OSError: the broker takes no connections any more.
        """
        peer = _Peer(self._address, scenario)
        if scenario.drip:
            self._dripping.append((peer, b"".join(scenario.chunks)))
        else:
            for chunk in scenario.chunks:
                peer.send(chunk)
            if scenario.half_close:
                peer.half_close()
            try:
                peer.settle()
            finally:
                peer.close(reset=bool(number % 2))
        self._drip()
        while len(self._dripping) > MAX_DRIPPING:
            self._finish_oldest()

    def finish(self) -> None:
        """Send the rest of all that drips, and expect the answers.

        Raises:
            BrokenPromiseError: one did not come.
        """
        while self._dripping:
            self._finish_oldest()

    def _drip(self) -> None:
        for index, (peer, rest) in enumerate(self._dripping):
            # The last byte stays: the answer is collected in order of age.
            if len(rest) > 1:
                peer.send(rest[:1])
                self._dripping[index] = (peer, rest[1:])

    def _finish_oldest(self) -> None:
        peer, rest = self._dripping.pop(0)
        peer.send(rest)
        try:
            peer.settle()
        finally:
            peer.close(reset=False)
