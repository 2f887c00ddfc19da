"""What ApiVersions says of features; Apache Kafka 4.1 says the same of these two."""

from __future__ import annotations

import pytest

from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.server.handlers.api_versions import handle_api_versions


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
