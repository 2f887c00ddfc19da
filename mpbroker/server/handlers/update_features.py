"""UpdateFeatures: change the levels of all features of a request, or of none.

Source: Kafka protocol guide, "UpdateFeatures"; KIP-584, KIP-778; Kafka's
FeatureControlManager and QuorumController.updateFeatures.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.metadata.features import UpgradeType, check_change
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    feature_level_record,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.update_features import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext


def handle_update_features(
    request: UpdateFeaturesRequest, context: HandlerContext
) -> UpdateFeaturesResponse:
    """Check all levels of a request, and set them. If one is wrong, set none.

    With ``validate_only`` they are only checked.
    """
    registry, updates = context.broker.registry, request.feature_updates

    def decide(image: MetadataImage) -> Sequence[MetadataRecord]:
        if image.is_json:
            raise invalid_request(
                "The metadata log is still that of an older mpbroker; restart the"
                " broker, then change features"
            )
        before = registry.features.levels
        levels = dict(before)
        for each in updates:
            try:
                _check(levels, each, context.version)
            except ApiError as error:
                raise ApiError(
                    error.error_code,
                    "The update failed for all features since the following feature had"
                    f" an error: {error.message}",
                ) from None
            levels[each.feature] = each.max_version_level
        if request.validate_only:
            return []
        return [
            feature_level_record(name, level)
            for name, level in levels.items()
            if before.get(name, 0) != level
        ]

    try:
        registry.change(decide)
    except ApiError as error:
        return UpdateFeaturesResponse(
            error_code=error.error_code, error_message=error.message
        )
    return UpdateFeaturesResponse(
        error_code=ErrorCode.NONE,
        error_message=None,
        results=[
            UpdatableFeatureResult(
                feature=each.feature, error_code=ErrorCode.NONE, error_message=None
            )
            for each in updates
            if context.version <= 1
        ],
    )


def _check(levels: dict[str, int], update: FeatureUpdateKey, version: int) -> None:
    upgrade_type = update.upgrade_type
    if version == 0:
        upgrade_type = (
            UpgradeType.SAFE_DOWNGRADE
            if update.allow_downgrade
            else UpgradeType.UPGRADE
        )
    check_change(levels, update.feature, update.max_version_level, upgrade_type)
