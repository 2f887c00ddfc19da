"""Bootstrap addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.addresses import Address, parse_addresses
from mpbroker.client.errors import AddressError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", [("localhost", 9092)]),
        ("a:1,b:65535", [("a", 1), ("b", 65535)]),
        (" a:1 , b , ", [("a", 1), ("b", 9092)]),
        ("[::1]:19092", [("::1", 19092)]),
        ("[fe80::1]", [("fe80::1", 9092)]),
        ("::1", [("::1", 9092)]),
        ("PLAINTEXT://h:5", [("h", 5)]),
    ],
)
def test_addresses_are_read(text, expected):
    assert parse_addresses(text) == [Address(*pair) for pair in expected]


@pytest.mark.parametrize(
    "text", ["", ",", ":9092", "h:", "h:0", "h:65536", "h:x", "[::1", "[::1]x", "h:٣"]
)
def test_what_is_no_address_is_named_in_the_error(text):
    with pytest.raises(AddressError) as caught:
        parse_addresses(text)
    assert repr(text) in str(caught.value)


def test_another_protocol_is_refused_by_name():
    with pytest.raises(AddressError, match="SASL_SSL"):
        parse_addresses("SASL_SSL://h:1")


@given(st.from_regex(r"[a-z0-9.:]{1,20}", fullmatch=True), st.integers(1, 65535))
def test_an_address_reads_back_from_its_own_text(host, port):
    address = Address(host, port)
    assert parse_addresses(str(address)) == [address]


@given(st.text(max_size=30))
def test_any_text_gives_addresses_or_an_address_error(text):
    try:
        addresses = parse_addresses(text)
    except AddressError:
        return
    assert all(1 <= address.port <= 65535 for address in addresses)
