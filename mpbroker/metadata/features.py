"""Features: the levels that are finalized, and the rules for changing them.

A FeatureLevelRecord in the metadata log sets the level of a feature; level 0 switches
it off. The level of kraft.version is in a control record instead.

Source: Apache Kafka's FeatureControlManager, MetadataVersion and Feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

METADATA_VERSION: Final = "metadata.version"
KRAFT_VERSION: Final = "kraft.version"
GROUP_VERSION: Final = "group.version"  # KIP-848
SHARE_VERSION: Final = "share.version"  # KIP-932
STREAMS_VERSION: Final = "streams.version"  # KIP-1071
ELR_VERSION: Final = "eligible.leader.replicas.version"  # KIP-966
# KIP-890: a producer adds partitions by writing to them, and gets a new epoch with the
# end of each transaction.
TRANSACTION_VERSION: Final = "transaction.version"

# The levels of new logs: those of Apache Kafka 4.0, so that it and all later ones can
# go on with our log. The first is the metadata.version 4.0-IV3.
NEW_FEATURES: Final[Mapping[str, int]] = {
    METADATA_VERSION: 25,
    GROUP_VERSION: 1,
    TRANSACTION_VERSION: 2,
}

# The levels of features for which a log has no record. Kafka 4.0 does not know the
# features of share groups and streams groups, so new logs have no record of them.
_WITHOUT_RECORD: Final[Mapping[str, int]] = {SHARE_VERSION: 1, STREAMS_VERSION: 1}

# The newest levels that Apache Kafka 4.4.0 knows, those that are not stable included.
KNOWN_FEATURES: Final[Mapping[str, int]] = {
    METADATA_VERSION: 34,
    KRAFT_VERSION: 1,
    GROUP_VERSION: 1,
    TRANSACTION_VERSION: 2,
    ELR_VERSION: 1,
    SHARE_VERSION: 2,
    STREAMS_VERSION: 1,
}

# The oldest and the newest level that can be set, as Apache Kafka 4.4.0 has them. But a
# share group has no dead-letter queue here (KIP-1191): level 2 of share.version is kept
# where Kafka has set it, and cannot be set.
SUPPORTED_FEATURES: Final[Mapping[str, tuple[int, int]]] = {
    ELR_VERSION: (0, 1),
    GROUP_VERSION: (0, 1),
    KRAFT_VERSION: (0, 1),
    METADATA_VERSION: (7, 33),  # 3.3-IV3 to 4.4-IV2
    SHARE_VERSION: (0, 1),
    STREAMS_VERSION: (0, 1),
    TRANSACTION_VERSION: (0, 2),
}

# The levels of metadata.version that have brought records or fields which the level
# before does not know. A downgrade from or past one of them is refused.
_METADATA_CHANGES: Final = frozenset((7, 8, 11, 13, 14, 15, 17, 23, 30, 32, 33))

# The least metadata.version for level 1 of a feature.
_LEAST_METADATA: Final[Mapping[str, int]] = {ELR_VERSION: 23}


class UpgradeType(IntEnum):
    """The kind of change of a feature's level that a request allows."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


class FeatureLevels(NamedTuple):
    """The finalized levels of features.

    Attributes:
        epoch: a number that grows with each change.
        levels: the level of each feature that is switched on.
    """

    epoch: int
    levels: Mapping[str, int]


def finalized(features: Mapping[str, int], kraft_version: int) -> dict[str, int]:
    """Return the level of each feature that is switched on.

    Args:
        features: the levels that the metadata log's records have set.
        kraft_version: the level of kraft.version.
    """
    levels = {**_WITHOUT_RECORD, **features, KRAFT_VERSION: kraft_version}
    return {name: level for name, level in levels.items() if level > 0}


def check_change(
    levels: Mapping[str, int], name: str, level: int, upgrade_type: int
) -> None:
    """Check that a request may set a feature to a level.

    Args:
        levels: the finalized levels, with those that the same request has set before.
        name: the name of the feature.
        level: its new level.
        upgrade_type: an UpgradeType.

    Raises:
        ApiError: INVALID_UPDATE_VERSION: the change is refused; the message says why.
    """
    if upgrade_type not in list(UpgradeType):
        raise _refused(
            name, level, "The controller does not support the given upgrade type."
        )
    if name not in SUPPORTED_FEATURES:
        raise _refused(name, level, "This node does not support this feature.")
    oldest, newest = SUPPORTED_FEATURES[name]
    if not oldest <= level <= newest:
        raise _refused(
            name, level, f"This node only supports versions {oldest}-{newest}"
        )
    now = levels.get(name, 0)
    is_upgrade = upgrade_type == UpgradeType.UPGRADE
    if level < now and is_upgrade:
        raise _refused(
            name,
            level,
            "Can't downgrade the version of this feature without setting the upgrade"
            " type to either safe or unsafe downgrade.",
        )
    if level > now and not is_upgrade:
        raise _refused(name, level, "Can't downgrade to a newer version.")
    if level == now:
        return
    if name == KRAFT_VERSION:
        raise _refused(
            name,
            level,
            "mpbroker is a single node, which keeps the metadata log alone: its voters"
            " have no version to change. Change the other features one by one.",
        )
    least = _LEAST_METADATA.get(name, 0) if level else 0
    if levels.get(METADATA_VERSION, 0) < least:
        raise _refused(name, level, f"It depends on metadata.version level {least}.")
    if name == METADATA_VERSION:
        _check_metadata_downgrade(now, level, upgrade_type)


def _check_metadata_downgrade(now: int, level: int, upgrade_type: int) -> None:
    if not any(level < changed <= now for changed in _METADATA_CHANGES):
        return
    if upgrade_type == UpgradeType.UNSAFE_DOWNGRADE:
        reason = "Unsafe metadata downgrade is not supported in this version."
    else:
        reason = (
            "Refusing to perform the requested downgrade because it might delete"
            " metadata information."
        )
    raise ApiError(
        ErrorCode.INVALID_UPDATE_VERSION,
        f"Unsupported metadata.version downgrade from {now} to {level}. {reason}",
    )


def _refused(name: str, level: int, reason: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_UPDATE_VERSION,
        f"Invalid update version {level} for feature {name}. {reason}",
    )
