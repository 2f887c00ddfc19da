"""Features: what ApiVersions tells of them, and which changes are made."""

from __future__ import annotations

import pytest

from mpbroker.metadata.features import SUPPORTED_FEATURES, FeatureLevels
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.update_features import (
    FeatureUpdateKey,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from mpbroker.server.handlers.api_versions import (
    ApiVersionsHandler,
    handle_api_versions,
    software_of,
)
from mpbroker.server.handlers.update_features import handle_update_features
from tests.server.contexts import context
from tests.support.metadata import start

FEATURES = FeatureLevels(1, {})
NEW = {
    "group.version": 1,
    "metadata.version": 25,
    "share.version": 1,
    "streams.version": 1,
    "transaction.version": 2,
}


@pytest.fixture
def registry(tmp_path):
    return start(tmp_path)


def told(registry, version=4):
    request = ApiVersionsRequest(
        client_software_name="test", client_software_version="1"
    )
    answer = handle_api_versions(request, version, {18: (0, 4)}, registry.features)
    return ApiVersionsResponse.decode(version, answer.encode(version))


def levels(registry):
    return {
        each.name: each.max_version_level for each in told(registry).finalized_features
    }


@pytest.mark.parametrize("version", [3, 4])
def test_a_new_log_has_the_features_of_kafka_4_0_and_share_groups(registry, version):
    answer = told(registry, version)
    assert levels(registry) == NEW
    assert answer.finalized_features_epoch > 0
    ranges = {
        each.name: (each.min_version, each.max_version)
        for each in answer.supported_features
    }
    # Java clients that speak version 3 refuse a feature that starts at 0.
    only = {"metadata.version": (7, 33)}
    assert ranges == (dict(SUPPORTED_FEATURES) if version == 4 else only)


def update(registry, *changes, version=2, validate_only=False):
    """Ask for changes, each (feature, level, type); return the code and the message."""
    request = UpdateFeaturesRequest(
        feature_updates=[
            FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=kind)
            for name, level, kind in changes
        ],
        validate_only=validate_only,
    )
    answer = handle_update_features(request, context(registry, version=version))
    read = UpdateFeaturesResponse.decode(version, memoryview(answer.encode(version)))
    return ErrorCode(read.error_code).name, read.error_message


UP, DOWN, UNSAFE = 1, 2, 3


def test_levels_are_kept_and_told_with_a_greater_epoch(registry, tmp_path):
    before = told(registry).finalized_features_epoch
    up = [("metadata.version", 33, UP), ("streams.version", 1, UP)]
    assert update(registry, *up) == ("NONE", None)
    assert update(registry, ("share.version", 0, DOWN)) == ("NONE", None)
    wanted = {**NEW, "metadata.version": 33, "streams.version": 1}
    del wanted["share.version"]
    assert levels(registry) == wanted
    assert told(registry).finalized_features_epoch > before
    registry.replace_records()
    assert levels(start(tmp_path)) == wanted


def test_a_dry_run_and_a_request_with_one_mistake_change_nothing(registry):
    good = ("metadata.version", 33, UP)
    assert update(registry, good, validate_only=True) == ("NONE", None)
    code, message = update(registry, good, ("share.version", 9, UP))
    assert code == "INVALID_UPDATE_VERSION"
    assert message.startswith("The update failed for all features since the following")
    assert "only supports versions 0-1" in message
    assert levels(registry) == NEW


@pytest.mark.parametrize(
    ("name", "level", "kind", "reason"),
    [
        ("nope", 1, UP, "does not support this feature"),
        ("share.version", 2, UP, "only supports versions 0-1"),
        ("metadata.version", 6, DOWN, "only supports versions 7-33"),
        ("share.version", 0, UP, "without setting the upgrade type"),
        ("metadata.version", 26, DOWN, "Can't downgrade to a newer version"),
        ("metadata.version", 22, DOWN, "it might delete metadata information"),
        ("metadata.version", 22, UNSAFE, "Unsafe metadata downgrade is not supported"),
        ("group.version", 0, 9, "does not support the given upgrade type"),
        ("kraft.version", 1, UP, "single node"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(registry, name, level, kind, reason):
    code, message = update(registry, (name, level, kind))
    assert code == "INVALID_UPDATE_VERSION"
    assert reason in message
    assert levels(registry) == NEW


def test_metadata_goes_back_as_far_as_it_loses_nothing(registry):
    assert update(registry, ("metadata.version", 29, UP))[0] == "NONE"
    assert update(registry, ("metadata.version", 23, DOWN))[0] == "NONE"
    needs = ("eligible.leader.replicas.version", 1, UP)
    assert update(registry, needs)[0] == "NONE"
    assert levels(registry)["metadata.version"] == 23


def test_the_same_level_again_is_no_mistake(registry):
    assert update(registry, ("group.version", 1, UP)) == ("NONE", None)
    assert update(registry, ("group.version", 1, DOWN)) == ("NONE", None)


@pytest.mark.parametrize("allowed", [False, True])
def test_the_first_version_says_whether_a_downgrade_is_allowed(registry, allowed):
    change = FeatureUpdateKey(
        feature="group.version", max_version_level=0, allow_downgrade=allowed
    )
    request = UpdateFeaturesRequest(feature_updates=[change])
    answer = handle_update_features(request, context(registry, version=0))
    assert (answer.error_code == ErrorCode.NONE) is allowed
    assert len(answer.results) == allowed


class Asked:
    """A request for ApiVersions, as the handler process has it."""

    api_version, connection = 4, 0
    body = ApiVersionsRequest(
        client_software_name="test", client_software_version="1"
    ).encode(4)


def test_a_kept_answer_is_not_told_after_a_change(registry):
    handler = ApiVersionsHandler(
        {18: (0, 4)}, lambda: registry.features, lambda *software: None
    )
    first = handler.handle(Asked)
    assert handler.handle(Asked) is first
    update(registry, ("group.version", 0, DOWN))
    again = ApiVersionsResponse.decode(4, handler.handle(Asked))
    assert "group.version" not in {each.name for each in again.finalized_features}


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
    answer = handle_api_versions(request, 3, {18: (0, 4)}, FEATURES)
    assert answer.error_code == (0 if is_good else ErrorCode.INVALID_REQUEST)
    assert bool(answer.api_keys) is is_good
    # Before version 3 there is no place to say it.
    assert handle_api_versions(request, 2, {18: (0, 4)}, FEATURES).error_code == 0
    said = (name, version) if is_good else ("", "")
    assert software_of(request, 3) == said
    assert software_of(request, 2) == ("", "")
