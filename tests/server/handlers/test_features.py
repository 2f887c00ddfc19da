"""The features in ApiVersions; Apache Kafka 4.1 answers the same for these two."""

from __future__ import annotations

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.server.handlers.api_versions import handle_api_versions, software_of


@pytest.mark.parametrize("version", [3, 4])
def test_producers_are_told_that_transactions_bump_epochs(version):
    request = ApiVersionsRequest(
        client_software_name="test", client_software_version="1"
    )
    answer = handle_api_versions(request, version, {18: (0, 4)})
    told = ApiVersionsResponse.decode(version, answer.encode(version))
    assert told.finalized_features_epoch >= 0
    levels = {row.name: row.max_version_level for row in told.finalized_features}
    assert levels == {"group.version": 1, "transaction.version": 2}
    # Java clients that speak version 3 refuse a feature that starts at 0.
    supported = {row.name: row.min_version for row in told.supported_features}
    assert supported == (dict.fromkeys(levels, 0) if version == 4 else {})


@pytest.mark.parametrize(
    ("name", "version", "is_good"),
    [
        ("librdkafka", "2.6.0", True),
        ("a", "1", True),
        ("apache-kafka-java", "4.1.0-SNAPSHOT", True),
        ("a.b-c", "v1", True),
        ("", "1", False),
        ("app", "", False),
        ("-app", "1", False),
        ("app.", "1", False),
        ("my app", "1", False),
        ("app", "1\n", False),
        ("größe", "1", False),
        ('app"} 1', "1", False),
    ],
)
def test_a_client_with_an_invalid_software_name_is_refused(name, version, is_good):
    """KIP-511: the names become labels of metrics and parts of log lines."""
    request = ApiVersionsRequest(
        client_software_name=name, client_software_version=version
    )
    answer = handle_api_versions(request, 3, {18: (0, 4)})
    assert answer.error_code == (0 if is_good else ErrorCode.INVALID_REQUEST)
    assert bool(answer.api_keys) is is_good
    # Before version 3 there is no place to say it.
    assert handle_api_versions(request, 2, {18: (0, 4)}).error_code == 0
    said = (name, version) if is_good else ("", "")
    assert software_of(request, 3) == said
    assert software_of(request, 2) == ("", "")
