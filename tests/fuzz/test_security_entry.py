"""Whatever bytes come to a SASL or TLS listener: nobody is let in, nobody else is hurt.

MPBROKER_FUZZ_ENTRIES connections each; more for a long run.
"""

from __future__ import annotations

import os
import ssl
from random import Random
from typing import Final

import pytest

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R
from mpbroker.protocol.api_key import ApiKey
from tests.network.conftest import make_rig  # noqa: F401
from tests.network.rig import frame
from tests.network.security.sasl.conversation import authenticate, handshake, request
from tests.network.security.secure_rig import PLAIN, Certificates, SecureRig, security

ENTRIES: Final = int(os.environ.get("MPBROKER_FUZZ_ENTRIES", "60"))
SEED: Final = int(os.environ.get("MPBROKER_FUZZ_SEED", "1"))


def client_hello(certificates: Certificates) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.client_context().wrap_bio(
        incoming, outgoing, server_hostname="localhost"
    )
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def spoiled(rng: Random, data: bytes) -> bytes:
    """The same with some bytes changed, cut off, or put in."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
    if rng.random() < 0.3:
        del spoiled[rng.randrange(len(spoiled)) :]
    if rng.random() < 0.3:
        at = rng.randrange(len(spoiled) + 1)
        spoiled[at:at] = rng.randbytes(rng.randint(1, 50))
    return bytes(spoiled)


def sasl_entry(rng: Random) -> bytes:
    """Steps in any order, none of which proves anything; some of them spoiled."""
    steps = [
        frame(request(ApiKey.API_VERSIONS, rng.randint(0, 5))),
        frame(handshake("PLAIN", rng.randint(0, 1))),
        frame(handshake("SCRAM-SHA-256")),
        frame(authenticate(b"\0alice\0wrong", rng.randint(0, 2))),
        frame(b"\0alice\0wrong"),
        frame(request(ApiKey.METADATA, 1, b"\0\0\0\0")),
        frame(rng.randbytes(rng.randint(0, 40))),
        rng.randbytes(rng.randint(1, 40)),
    ]
    chosen = [rng.choice(steps) for _ in range(rng.randint(1, 5))]
    return b"".join(
        spoiled(rng, step) if rng.random() < 0.4 else step for step in chosen
    )


def let_in_nobody(rig: SecureRig, bystander, entries) -> None:
    bystander.send(frame(b"before"))
    rig.pump(lambda: bystander.frames() == [b"before"])
    for number, data in enumerate(entries):
        client = rig.connect()
        client.send(data)
        rig.turns(5)
        body = b"%d" % number
        bystander.send(frame(body))
        rig.pump(lambda body=body: bystander.frames()[-1] == body)
        client.close()
        rig.clients.remove(client)
    rig.pump(lambda: rig.connections == 1)
    assert all(body.isdigit() or body == b"before" for body in rig.requests)
    assert not rig.processor._unready


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_any_bytes_to_sasl(make_rig):  # noqa: F811
    rng = Random(SEED)
    rig = make_rig(kind=SecureRig, security=security(sasl=PLAIN))
    bystander = rig.connect()
    rig.log_in(bystander)
    let_in_nobody(rig, bystander, (sasl_entry(rng) for _ in range(ENTRIES)))
    assert rig.counted(R.AUTHENTICATED) == 1


@pytest.mark.parametrize("sasl", [None, PLAIN], ids=["SSL", "SASL_SSL"])
def test_any_bytes_to_tls(make_rig, certificates, sasl):  # noqa: F811
    rng = Random(SEED)
    hello = client_hello(certificates)
    rig = make_rig(
        kind=SecureRig, security=security(certificates.settings(), sasl=sasl)
    )
    bystander = rig.connect_tls(certificates.client_context())
    if sasl:
        rig.log_in(bystander)
    kinds = [
        lambda: spoiled(rng, hello),
        lambda: hello + rng.randbytes(100),
        lambda: b"\x16" + rng.randbytes(60),
        lambda: sasl_entry(rng),
    ]
    let_in_nobody(rig, bystander, (rng.choice(kinds)() for _ in range(ENTRIES)))
    assert rig.counted(R.HANDSHAKE) == 1
