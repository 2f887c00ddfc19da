"""DescribeClientQuotas and AlterClientQuotas: changes, filters and refusals."""

import math

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages import alter_client_quotas as alter
from mpbroker.protocol.messages import describe_client_quotas as describe
from mpbroker.server.handlers.alter_client_quotas import handle_alter_client_quotas
from mpbroker.server.handlers.describe_client_quotas import (
    handle_describe_client_quotas,
)
from tests.server.contexts import context
from tests.support.metadata import start

RATE = "producer_byte_rate"
EXACT, DEFAULT, ANY = 0, 1, 2


@pytest.fixture
def registry(tmp_path):
    return start(tmp_path)


def entry(entity, *operations):
    """operations: (key, value); None as a value removes."""
    return alter.EntryData(
        entity=[
            alter.EntityData(entity_type=kind, entity_name=name)
            for kind, name in entity
        ],
        ops=[
            alter.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in operations
        ],
    )


def change(registry, *entries, validate_only=False):
    request = alter.AlterClientQuotasRequest(
        entries=list(entries), validate_only=validate_only
    )
    request = alter.AlterClientQuotasRequest.decode(1, memoryview(request.encode(1)))
    answer = handle_alter_client_quotas(
        request,
        context(
            registry,
            unknown_hosts=lambda hosts: set(hosts) - {"127.0.0.1", "::1", "localhost"},
        ),
    )
    answer = alter.AlterClientQuotasResponse.decode(1, memoryview(answer.encode(1)))
    return [(each.error_code, each.error_message) for each in answer.entries]


def ask(registry, *components, strict=False):
    request = describe.DescribeClientQuotasRequest(
        components=[
            describe.ComponentData(entity_type=kind, match_type=match, match=name)
            for kind, match, name in components
        ],
        strict=strict,
    )
    answer = handle_describe_client_quotas(request, context(registry))
    answer = describe.DescribeClientQuotasResponse.decode(
        1, memoryview(answer.encode(1))
    )
    if answer.error_code:
        return answer.error_code, answer.error_message
    return {
        tuple((part.entity_type, part.entity_name) for part in each.entity): {
            value.key: value.value for value in each.values
        }
        for each in answer.entries
    }


def test_quotas_are_described_until_they_are_removed(registry):
    assert (
        change(
            registry,
            entry([("user", "u")], (RATE, 1000.0), ("request_percentage", 12.5)),
            entry(
                [("user", None), ("client-id", "c")], ("controller_mutation_rate", 0.5)
            ),
            entry([("ip", "127.0.0.1")], ("connection_creation_rate", 7.0)),
        )
        == [(0, None)] * 3
    )
    assert ask(registry) == {
        (("user", "u"),): {RATE: 1000.0, "request_percentage": 12.5},
        (("client-id", "c"), ("user", None)): {"controller_mutation_rate": 0.5},
        (("ip", "127.0.0.1"),): {"connection_creation_rate": 7.0},
    }
    change(registry, entry([("user", "u")], (RATE, None), ("request_percentage", 3.0)))
    change(registry, entry([("ip", "127.0.0.1")], ("connection_creation_rate", None)))
    assert ask(registry) == {
        (("user", "u"),): {"request_percentage": 3.0},
        (("client-id", "c"), ("user", None)): {"controller_mutation_rate": 0.5},
    }
    assert registry.client_quotas.by_name("user", "request_percentage") == {"u": 3.0}


def test_another_process_and_the_next_start_see_the_same(registry, tmp_path):
    change(registry, entry([("user", None)], (RATE, 5.0)))
    assert ask(start(tmp_path)) == {(("user", None),): {RATE: 5.0}}
    records = [record for group in registry.image.records() for record in group]
    assert len(records) == registry.image.live_record_count()
    assert [record for record in records if record["type"] == "ClientQuotaRecord"] == [
        {
            "type": "ClientQuotaRecord",
            "entity": [{"entityType": "user", "entityName": None}],
            "key": RATE,
            "value": 5.0,
            "remove": False,
        }
    ]


def test_validating_changes_nothing(registry):
    before = registry.version
    good = entry([("user", "u")], (RATE, 1.0))
    bad = entry([("user", "u")], (RATE, -1.0))
    assert change(registry, good, validate_only=True) == [(0, None)]
    [(code, _)] = change(registry, bad, validate_only=True)
    assert code == ErrorCode.INVALID_REQUEST
    assert registry.version == before


def test_setting_an_equal_value_writes_nothing(registry):
    same = entry([("user", "u")], (RATE, 1.0), ("consumer_byte_rate", None))
    change(registry, same)
    before = registry.version
    assert change(registry, same) == [(0, None)]
    assert registry.version == before


@pytest.mark.parametrize(
    ("entity", "operations", "message"),
    [
        ([], [(RATE, 1.0)], "Invalid empty client quota entity"),
        ([("group", "g")], [(RATE, 1.0)], "Unhandled client quota entity type: group"),
        ([("user", "")], [(RATE, 1.0)], "Empty user not supported"),
        (
            [("user", "a"), ("user", "b")],
            [(RATE, 1.0)],
            "Invalid client quota entity, duplicate entity entry user",
        ),
        (
            [("user", "a"), ("ip", "::1")],
            [(RATE, 1.0)],
            "Invalid quota entity combination, IP entity should not be used with User"
            " or ClientId",
        ),
        (
            [("ip", "not.there.invalid")],
            [("connection_creation_rate", 1.0)],
            "not.there.invalid is not a valid IP or resolvable host.",
        ),
        (
            [("ip", "::1")],
            [(RATE, 1.0)],
            f"Invalid configuration key {RATE}; this entity may have"
            " connection_creation_rate",
        ),
        (
            [("user", "a")],
            [("bogus", 1.0)],
            "Invalid configuration key bogus; this entity may have"
            " consumer_byte_rate, controller_mutation_rate, producer_byte_rate,"
            " request_percentage",
        ),
        (
            [("user", "a")],
            [(RATE, 1.0), (RATE, 2.0)],
            f"Duplicate quota key {RATE} not updating quota for this entity user a",
        ),
        (
            [("user", None)],
            [(RATE, -2.0)],
            f"Quota {RATE} must be greater than 0, not -2",
        ),
        (
            [("user", "a")],
            [(RATE, math.nan)],
            f"Quota {RATE} must be greater than 0, not nan",
        ),
        (
            [("user", "a")],
            [(RATE, 1.5)],
            f"{RATE} cannot be a fractional value, as 1.5 is",
        ),
        (
            [("user", "a")],
            [("controller_mutation_rate", math.inf)],
            "Proposed value for controller_mutation_rate is too large for a DOUBLE:"
            " inf",
        ),
        (
            [("ip", "::1")],
            [("connection_creation_rate", 2.0**31)],
            "Proposed value for connection_creation_rate is too large for a INT:"
            " 2.14748e+09",
        ),
    ],
)
def test_an_entry_with_a_mistake_is_refused_and_the_others_are_changed(
    registry, entity, operations, message
):
    outcomes = change(
        registry,
        entry(entity, *operations, ("request_percentage", None)),
        entry([("user", "other")], (RATE, 3.0)),
    )
    assert outcomes == [(ErrorCode.INVALID_REQUEST, message), (0, None)]
    assert ask(registry) == {(("user", "other"),): {RATE: 3.0}}


def test_an_entity_that_is_named_twice_is_changed_by_neither(registry):
    outcomes = change(
        registry,
        entry([("user", "u"), ("client-id", "c")], (RATE, 1.0)),
        entry([("client-id", "c"), ("user", "u")], (RATE, 2.0)),
    )
    assert [code for code, _ in outcomes] == [ErrorCode.INVALID_REQUEST] * 2
    assert ask(registry) == {}


USER_A = (("user", "a"),)
USER_DEFAULT = (("user", None),)
CLIENT_C = (("client-id", "c"),)
A_AND_C = (("client-id", "c"), ("user", "a"))
A_AND_ANY = (("client-id", None), ("user", "a"))
ALL = {USER_A, USER_DEFAULT, CLIENT_C, A_AND_C, A_AND_ANY}


@pytest.mark.parametrize(
    ("components", "strict", "expected"),
    [
        ([], False, ALL),
        ([], True, set()),
        ([("user", EXACT, "a")], False, {USER_A, A_AND_C, A_AND_ANY}),
        ([("user", EXACT, "a")], True, {USER_A}),
        ([("user", DEFAULT, None)], False, {USER_DEFAULT}),
        ([("user", ANY, None)], False, ALL - {CLIENT_C}),
        ([("user", ANY, None)], True, {USER_A, USER_DEFAULT}),
        (
            [("user", EXACT, "a"), ("client-id", ANY, None)],
            True,
            {A_AND_C, A_AND_ANY},
        ),
        ([("user", ANY, None), ("client-id", DEFAULT, None)], True, {A_AND_ANY}),
        ([("user", EXACT, "nobody")], False, set()),
        ([("ip", ANY, None)], False, set()),
    ],
)
def test_filters(registry, components, strict, expected):
    change(registry, *(entry(entity, (RATE, 1.0)) for entity in ALL))
    assert set(ask(registry, *components, strict=strict)) == expected


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([("", EXACT, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", EXACT, None)], ErrorCode.INVALID_REQUEST),
        ([("user", DEFAULT, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", ANY, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", 3, None)], ErrorCode.INVALID_REQUEST),
        ([("user", ANY, None), ("user", EXACT, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", ANY, None), ("ip", ANY, None)], ErrorCode.INVALID_REQUEST),
        ([("group", ANY, None)], ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_filters_that_make_no_sense_are_refused(registry, components, code):
    found, message = ask(registry, *components)
    assert found == code
    assert message
