"""What is encoded decodes to itself, for every message and version."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.protocol.message import Message
from tests.support.message_cases import MESSAGES, PAIRS, pair_name, random_message


@pytest.mark.parametrize(("message", "version"), PAIRS, ids=pair_name)
def test_every_version_decodes_what_it_encoded(
    message: type[Message], version: int
) -> None:
    rng = Random(version)
    for _ in range(5):
        original = random_message(rng, message, version)
        assert message.decode(version, original.encode(version)) == original


@pytest.mark.parametrize(("message", "version"), PAIRS, ids=pair_name)
def test_every_version_carries_a_message_of_defaults(
    message: type[Message], version: int
) -> None:
    assert message.decode(version, message().encode(version)) == message()


@pytest.mark.parametrize("message", MESSAGES, ids=pair_name)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_any_values_come_back(
    message: type[Message], rng: Random, data: st.DataObject
) -> None:
    version = data.draw(st.sampled_from(message.valid_versions))
    original = random_message(rng, message, version)
    encoded = original.encode(version)
    padded = b"\xff\xff\xff" + encoded
    assert message.decode(version, memoryview(padded), 3) == original
    assert b"".join(original.encode_parts(version)) == encoded
