"""What connections are encrypted by, as it is shown."""

from __future__ import annotations

import socket

import pytest

from mpbroker.network.security.encryption import (
    encryption_names,
    encryption_word,
    registered_name,
)


@pytest.mark.parametrize(
    ("openssls", "registered"),
    [
        ("TLS_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"),
        ("ECDHE-RSA-AES128-GCM-SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
        ("ECDHE-ECDSA-AES256-SHA384", "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA384"),
        (
            "DHE-RSA-CHACHA20-POLY1305",
            "TLS_DHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        ),
        ("AES128-SHA", "TLS_RSA_WITH_AES_128_CBC_SHA"),
        ("DHE-RSA-AES256-CCM8", "TLS_DHE_RSA_WITH_AES_256_CCM_8"),
    ],
)
def test_openssls_names_are_shown_as_the_registry_has_them(openssls, registered):
    assert registered_name(openssls) == registered


def test_numbers_of_which_nobody_knows_a_name_are_shown_as_numbers():
    assert encryption_names(0x0304_1301) == ("TLS_AES_128_GCM_SHA256", "TLSv1.3")
    assert encryption_names(0x0399_FEFE) == ("0xFEFE", "0x0399")


def test_without_tls_there_is_nothing_to_note():
    with socket.socket() as sock:
        assert encryption_word(sock) == 0
