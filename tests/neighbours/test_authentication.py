"""Clients that authenticate in vain, at the highest cost, keep no other waiting."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import jwt
import pytest

from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.protocol.messages.sasl_authenticate import SaslAuthenticateResponse
from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeResponse
from tests.bench import wire
from tests.broker.load import receive_frame
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.network.security.sasl.conversation import (
    ScramClient,
    authenticate,
    handshake,
    token_answer,
)
from tests.network.security.sasl.test_jwt_validator import KEY, OTHER, jwks
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

HOSTILE_ADDRESS: Final = "127.0.0.2"
TOPIC: Final = "kept"
# As many attempts at a time.
THREADS: Final = 6
CONNECTIONS: Final = 50
ROUNDS: Final = 10
# As many empty lists fit into a token of sasl.server.max.receive.size, 512 KiB.
LISTS: Final = 125_000


@pytest.fixture
def broker(make_broker: Callable[..., Broker], tmp_path: Path) -> Broker:
    """A broker with a processor for clients that authenticate, and one for others."""
    (tmp_path / "users").write_text("victim:secret\n")
    (tmp_path / "jwks.json").write_text(jwks(one=KEY))
    return make_broker(
        {
            "listeners": "SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
            "num.network.threads": 1,
            "num.io.threads": 2,
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,OAUTHBEARER",
            "sasl.plain.users.file": tmp_path / "users",
            "sasl.oauthbearer.jwks.endpoint.url": f"file://{tmp_path}/jwks.json",
        }
    )


def address_of(broker: Broker, listener: str) -> tuple[str, int]:
    host, _, port = broker.listeners[listener].rpartition(":")
    return host, int(port)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def log_in(connection: wire.Connection) -> None:
    answer = memoryview(connection.ask(framed(handshake("PLAIN"))))
    assert SaslHandshakeResponse.decode(1, answer[4:]).error_code == 0
    token = framed(authenticate(b"\0victim\0secret"))
    answer = memoryview(connection.ask(token))[5:]  # behind id and tagged fields
    assert SaslAuthenticateResponse.decode(2, answer).error_code == 0


def receive(sock: socket.socket) -> bytes:
    """Return the next answer, with its size field."""
    answer = receive_frame(sock)
    if not answer:
        raise ConnectionError("closed instead of answered")
    return framed(answer)


def guess_password(socks: Sequence[socket.socket]) -> None:
    """Go through SCRAM with a wrong password, as far as it goes."""
    clients = [ScramClient(ScramMechanism.SCRAM_SHA_512, "u" * 4000, "") for _ in socks]
    for sock in socks:
        sock.sendall(framed(handshake("SCRAM-SHA-512")))
    for sock, client in zip(socks, clients, strict=True):
        receive(sock)
        sock.sendall(framed(authenticate(client.first())))
    for sock in socks:
        server_first = bytes(token_answer(receive(sock)).auth_bytes)
        nonce = server_first.partition(b",")[0]
        proof = b"c=biws," + nonce + b",p=" + b"A" * 86 + b"=="
        sock.sendall(framed(authenticate(proof)))
    for sock in socks:
        assert token_answer(receive(sock)).error_code


def send_tokens(message: bytes, socks: Sequence[socket.socket]) -> None:
    """Send a token with a wrong signature."""
    for sock in socks:
        sock.sendall(framed(handshake("OAUTHBEARER")))
    for sock in socks:
        receive(sock)
        sock.sendall(message)
    for sock in socks:
        answer = token_answer(receive(sock))
        assert b"invalid_token" in bytes(answer.auth_bytes)


def large_token() -> bytes:
    """Return a request with a token that takes long to read."""
    claims = {"sub": "nobody", "filler": [[]] * LISTS}
    text = jwt.encode(claims, OTHER, "ES256", headers={"kid": "one"})
    return framed(authenticate(b"n,,\x01auth=Bearer " + text.encode() + b"\x01\x01"))


def failing(
    address: tuple[str, int],
    attempt: Callable[[Sequence[socket.socket]], None],
    attempts: threading.Semaphore,
) -> Attack:
    """Return an attack: many new connections that authenticate at the same time."""

    def attack(end: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            socks = [
                stack.enter_context(
                    socket.create_connection(
                        address, LONGEST_S, source_address=(HOSTILE_ADDRESS, 0)
                    )
                )
                for _ in range(CONNECTIONS)
            ]
            try:
                attempt(socks)
            finally:
                # The broker may have closed some that took too long.
                attempts.release()

    return attack


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "OAUTHBEARER"])
def test_failing_authentications_keep_no_other_client_waiting(broker, mechanism):
    secured, plain = (
        address_of(broker, each) for each in ("SASL_PLAINTEXT", "PLAINTEXT")
    )
    attempt = guess_password
    if mechanism == "OAUTHBEARER":
        attempt = partial(send_tokens, large_token())
    produce = wire.produce(TOPIC, 0, wire.batch_of_size(1000))
    attempts = threading.Semaphore(0)
    client, other = Client(secured), Client(plain)
    with wire.Connection(secured, LONGEST_S) as old:
        log_in(old)
        old.create_topic(TOPIC)
        with hostile(*[failing(secured, attempt, attempts)] * THREADS):
            is_over = False
            for number in itertools.count(1):
                with client.timed():
                    assert wire.parse_produce(old.ask(produce)).error_code == 0
                with client.waiting() as new:
                    log_in(new)
                    assert wire.parse_produce(new.ask(produce)).error_code == 0
                assert wire.parse_produce(other.ask(produce)).error_code == 0
                # Until the first attempts have come to their end.
                is_over = is_over or attempts.acquire(blocking=False)
                if is_over and number >= ROUNDS:
                    break
    assert max(client.longest_s, other.longest_s) < LONGEST_WAIT_S
