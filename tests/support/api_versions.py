"""What an answer to ApiVersions says for as long as nobody changes a feature."""

from __future__ import annotations

from mpbroker.protocol.messages.api_versions import ApiVersionsResponse

_FLEXIBLE = 3  # as the requests of tests.bench.wire


def without_epoch(body: bytes) -> ApiVersionsResponse:
    """Return an answer without its epoch of the finalized features.

    The epoch is how far a process had read the metadata log when it read the features,
    and so each process may tell another one, of the same features.

    Args:
        body: the answer without the correlation id.
    """
    answer = ApiVersionsResponse.decode(_FLEXIBLE, memoryview(body))
    assert answer.finalized_features_epoch >= 0
    answer.finalized_features_epoch = -1
    return answer
