"""What a client is told before it says who it is: what it will find served then."""

from __future__ import annotations

import pytest

from mpbroker.broker.listener_setup import ApiVersionsAnswers
from mpbroker.config import BrokerConfig
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)

TELEMETRY = {ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY}
RECEIVERS = [
    {"client.telemetry.log.path": "pushes.log"},
    {"client.telemetry.receiver.class.name": "python:company:Receiver"},
]


def told(version: int, texts: dict[str, str]) -> set[int]:
    """The APIs that a broker of these settings says it serves."""
    answer = ApiVersionsAnswers(BrokerConfig.load(texts, None, {}, cores=2))
    request = ApiVersionsRequest(
        client_software_name="test", client_software_version="1"
    )
    known = min(version, 4)
    data, is_good = answer(version, memoryview(request.encode(known)))
    assert is_good == (version == known)
    shown = ApiVersionsResponse.decode(known if is_good else 0, memoryview(data))
    return {each.api_key for each in shown.api_keys}


@pytest.mark.parametrize("version", [0, 4, 99])
def test_without_a_receiver_nobody_is_asked_for_metrics(version):
    assert ApiKey.PRODUCE in told(version, {})
    assert not told(version, {}) & TELEMETRY


@pytest.mark.parametrize("version", [0, 4, 99])
@pytest.mark.parametrize("texts", RECEIVERS)
def test_with_a_receiver_everybody_is(version, texts):
    assert told(version, texts) >= TELEMETRY
