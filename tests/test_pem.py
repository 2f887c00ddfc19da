"""PEM in settings, however its white space was changed on the way."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
import trustme

from mpbroker.base.pem import CERTIFICATE as CERTIFICATES
from mpbroker.base.pem import KEY, found_in, has_block, pem_of

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


BLOCK = "-----BEGIN RSA PRIVATE KEY-----{}-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found nothing"),
        (" \n", "found nothing"),
        ("/etc/key.pem", "found what may be the path of a file"),
        ("MIIC AAAA", "found 9 characters of base64 without markers"),
        ("p\u00e4ss!", "found 5 characters without a line -----BEGIN ...-----"),
        ("-----BEGIN CERTIFICATE-----", "without -----END CERTIFICATE-----, so it is"),
        (CERTIFICATE + "-----BEGIN PRIVATE KEY-----\nAA", "-----END PRIVATE KEY-----"),
        (BLOCK.format(""), "found a block RSA PRIVATE KEY with nothing in it"),
        (
            BLOCK.format("se!cret"),
            "RSA PRIVATE KEY with characters that are not base64",
        ),
        (BLOCK.format("secre"), "of 5 characters, not a multiple of 4"),
        (BLOCK.format("secret//") + CERTIFICATE * 2, "1 RSA PRIVATE KEY and 2 CERTIF"),
    ],
)
def test_what_was_found_is_told_and_no_part_of_a_key(text: str, found: str) -> None:
    told = found_in(text)
    assert found in told
    assert found in found_in(text.replace("\n", "\\n"))
    assert "secre" not in told and "p\u00e4ss" not in told and "MIIC" not in told


def test_blocks_are_known_by_their_kind() -> None:
    key = BLOCK.format("AAAA")
    assert has_block(key, KEY) and not has_block(key, CERTIFICATES)
    assert has_block(CERTIFICATE.replace("\n", "\\n"), CERTIFICATES)
