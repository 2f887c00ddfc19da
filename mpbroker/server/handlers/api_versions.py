"""ApiVersions: tell a client which APIs are served, in which versions.

Source: Kafka protocol guide, "ApiVersions"; KIP-511; kafka.server.ApiVersionManager.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from mpbroker.metadata.features import SUPPORTED_FEATURES, FeatureLevels
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)

if TYPE_CHECKING:
    from mpbroker.server.request import Request

# Bounds of the kept answers. Most clients send one of a few short requests.
_MAX_REMEMBERED: Final = 100
_MAX_REMEMBERED_BYTES: Final = 512
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_SINCE: Final = 3
# KIP-1022: older Java clients reject an answer with a feature whose minimum is 0.
_MINIMUM_0_SINCE: Final = 4


class ApiVersionsHandler:
    """Executes ApiVersions requests on undecoded bytes, and keeps the answers.

    Each connection begins with this request, and clients of one kind send equal bytes.

    Args:
        versions: (oldest, newest) by API key.
        features: returns the finalized features. It returns another object if they
            have changed.
        note_software: called with a connection and the name and version of its
            client's software.
    """

    def __init__(
        self,
        versions: Mapping[int, tuple[int, int]],
        features: Callable[[], FeatureLevels],
        note_software: Callable[[int, str, str], None],
    ) -> None:
        self._versions = versions
        self._features = features
        self._told: FeatureLevels | None = None
        self._note_software = note_software
        self._known: dict[tuple[int, bytes], tuple[bytes, str, str]] = {}

    def handle(self, request: Request) -> bytes:
        """Return the encoded response to an ApiVersions request, new or kept."""
        version = request.api_version
        asked = version, bytes(request.body)
        features = self._features()
        if features is not self._told:
            self._known.clear()
            self._told = features
        known = self._known.get(asked)
        if known is None:
            message = ApiVersionsRequest.decode(version, request.body)
            response = handle_api_versions(message, version, self._versions, features)
            known = response.encode(version), *software_of(message, version)
            if len(asked[1]) <= _MAX_REMEMBERED_BYTES:
                if len(self._known) >= _MAX_REMEMBERED:
                    self._known.clear()
                self._known[asked] = known
        body, name, software_version = known
        self._note_software(request.connection, name, software_version)
        return body


def handle_api_versions(
    request: ApiVersionsRequest,
    version: int,
    versions: Mapping[int, tuple[int, int]],
    features: FeatureLevels,
) -> ApiVersionsResponse:
    """Answer a decoded request.

    Args:
        request: the request.
        version: the version of the request.
        versions: (oldest, newest) by API key.
        features: the finalized features.
    """
    if not names_its_software(request, version):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    return ApiVersionsResponse(
        error_code=ErrorCode.NONE,
        api_keys=_keys(versions),
        supported_features=[
            SupportedFeatureKey(name=name, min_version=oldest, max_version=newest)
            for name, (oldest, newest) in SUPPORTED_FEATURES.items()
            if oldest > 0 or version >= _MINIMUM_0_SINCE
        ],
        finalized_features_epoch=features.epoch,
        finalized_features=[
            FinalizedFeatureKey(
                name=name, max_version_level=level, min_version_level=level
            )
            for name, level in features.levels.items()
        ],
    )


def names_its_software(request: ApiVersionsRequest, version: int) -> bool:
    """Return whether a request has a valid name and version of the client's software.

    Return True for versions before 3, which have no such fields.

    Source: KIP-511.
    """
    return version < _SOFTWARE_SINCE or bool(
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    )


def software_of(request: ApiVersionsRequest, version: int) -> tuple[str, str]:
    """Return name and version of the client's software.

    Both are "" if the request does not have them, or if one is not valid.
    """
    if version < _SOFTWARE_SINCE or not names_its_software(request, version):
        return "", ""
    return request.client_software_name, request.client_software_version


def unsupported_version(versions: Mapping[int, tuple[int, int]]) -> ApiVersionsResponse:
    """Return the answer to an ApiVersions whose version is newer than is served.

    The caller encodes it in version 0, which all clients can read.
    """
    return ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=_keys(versions)
    )


def _keys(versions: Mapping[int, tuple[int, int]]) -> list[ApiVersion]:
    return [
        ApiVersion(api_key=key, min_version=oldest, max_version=newest)
        for key, (oldest, newest) in sorted(versions.items())
    ]
