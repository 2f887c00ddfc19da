"""PEM in settings, however its white space was changed on the way."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
import trustme

from mpbroker.base.pem import pem_of

CERTIFICATE = trustme.CA().cert_pem.bytes().decode()

CHANGES: list[Callable[[str], str]] = [
    str,
    lambda pem: pem.strip(),
    lambda pem: pem.replace("\n", " "),
    lambda pem: pem.replace("\n", ""),
    lambda pem: pem.replace("\n", "\\n"),
    lambda pem: pem.replace("\n", "\r\n"),
    lambda pem: pem.replace("\n", "\\r\\n"),
    lambda pem: pem.replace("\n", "\n   "),
    lambda pem: pem.replace("\n", " \t"),
    lambda pem: "subject=CN = x\n" + pem + "and more",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("count", [1, 2])
def test_white_space_is_put_in_order(change: Callable[[str], str], count: int) -> None:
    found = pem_of(change(CERTIFICATE) * count)
    assert found == CERTIFICATE * count
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=found)


def test_the_headers_of_an_old_key_stay() -> None:
    key = (
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
        "DEK-Info: AES-128-CBC,00\n\nAAAA\n-----END RSA PRIVATE KEY-----\n"
    )
    assert pem_of(key) == key


@pytest.mark.parametrize("text", ["", "x", "-----BEGIN CERTIFICATE-----\nAA=="])
def test_a_text_without_a_block_is_left_as_it_is(text: str) -> None:
    assert pem_of(text) == text + "\n"
