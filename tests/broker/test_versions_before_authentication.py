"""What a client is told before it says who it is: what it will find served then."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbroker.broker.listener_setup import ApiVersionsAnswers
from mpbroker.config import BrokerConfig
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from tests.support import metadata

TELEMETRY = {ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY}
RECEIVERS = [
    {"client.telemetry.log.path": "pushes.log"},
    {"client.telemetry.receiver.class.name": "python:company:Receiver"},
]


def told(directory: Path, version: int, texts: dict[str, str]) -> set[int]:
    """The APIs that a broker of these settings says it serves."""
    config = BrokerConfig.load(texts, None, {}, cores=2)
    answer = ApiVersionsAnswers(config, metadata.start(directory))
    request = ApiVersionsRequest(
        client_software_name="test", client_software_version="1"
    )
    known = min(version, 4)
    data, is_good = answer(version, memoryview(request.encode(known)))
    assert is_good == (version == known)
    shown = ApiVersionsResponse.decode(known if is_good else 0, memoryview(data))
    return {each.api_key for each in shown.api_keys}


@pytest.mark.parametrize("version", [0, 4, 99])
def test_without_a_receiver_nobody_is_asked_for_metrics(tmp_path, version):
    assert ApiKey.PRODUCE in told(tmp_path, version, {})
    assert not told(tmp_path, version, {}) & TELEMETRY


@pytest.mark.parametrize("version", [0, 4, 99])
@pytest.mark.parametrize("texts", RECEIVERS)
def test_with_a_receiver_everybody_is(tmp_path, version, texts):
    assert told(tmp_path, version, texts) >= TELEMETRY
