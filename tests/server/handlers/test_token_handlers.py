"""Delegation tokens: what a second execution, time and other principals change.

What clients see is in tests/compat/test_delegation_tokens.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpbroker.ipc.layout import CONNECTION_BY_TOKEN, connection_row
from mpbroker.metadata.delegation_tokens import TokenSettings
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import create_delegation_token as create
from mpbroker.protocol.messages import describe_delegation_token as describe
from mpbroker.protocol.messages import expire_delegation_token as expire
from mpbroker.protocol.messages import renew_delegation_token as renew
from mpbroker.server.handlers.create_delegation_token import (
    handle_create_delegation_token,
)
from mpbroker.server.handlers.describe_delegation_token import (
    handle_describe_delegation_token,
)
from mpbroker.server.handlers.expire_delegation_token import (
    handle_expire_delegation_token,
)
from mpbroker.server.handlers.renew_delegation_token import (
    handle_renew_delegation_token,
)
from tests.server.authorization.authorization_stage import (
    Granting,
    authorization,
    request_of,
)
from tests.server.authorization.guarded_asks import ask
from tests.server.contexts import context
from tests.server.handlers.test_quorum_handlers import Notes
from tests.support.metadata import NOW_MS, start

SETTINGS = TokenSettings("secret", 10_000, 4_000)


class Clock:
    """A wall clock that a test sets."""

    now_ms = NOW_MS

    def __call__(self):
        return self.now_ms


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(tmp_path, clock):
    return start(tmp_path, now_ms=clock)


def of(registry, principal="User:alice", protocol="SASL_SSL", **fields):
    """Return the context of a request of version 2 from a principal."""
    sender = SimpleNamespace(principal=principal, security_protocol=protocol)
    senders = SimpleNamespace(sender=lambda connection, slot: sender)
    options = {"tokens": SETTINGS, "senders": senders, "version": 2, **fields}
    return context(registry, **options)


def make(where, *, owner=None, lifetime_ms=-1):
    request = create.CreateDelegationTokenRequest(
        owner_principal_type=None if owner is None else "User",
        owner_principal_name=owner,
        max_lifetime_ms=lifetime_ms,
    )
    return handle_create_delegation_token(request, where)


def refusal(handle, *arguments):
    with pytest.raises(ApiError) as caught:
        handle(*arguments)
    return caught.value.error_code


def test_a_second_execution_answers_with_the_token_of_the_first(registry, clock):
    where = of(registry, intent=Notes())
    first = make(where)
    clock.now_ms += 1000
    again = make(where)
    assert again == first
    assert [each.token_id for each in registry.delegation_tokens()] == [first.token_id]


def test_a_second_execution_of_a_removal_succeeds(registry):
    mac = make(of(registry)).hmac
    request = expire.ExpireDelegationTokenRequest(hmac=mac, expiry_time_period_ms=-1)
    where = of(registry, intent=Notes())
    for _ in range(2):
        assert handle_expire_delegation_token(request, where).error_code == 0
    code = refusal(handle_expire_delegation_token, request, of(registry))
    assert code == ErrorCode.DELEGATION_TOKEN_NOT_FOUND


def test_a_token_that_has_expired_is_not_renewed_and_is_removed(registry, clock):
    token, long = make(of(registry)), make(of(registry))
    assert token.expiry_timestamp_ms == NOW_MS + 4_000
    clock.now_ms += 3_000
    request = renew.RenewDelegationTokenRequest(hmac=long.hmac, renew_period_ms=-1)
    renewed = handle_renew_delegation_token(request, of(registry))
    assert renewed.expiry_timestamp_ms == NOW_MS + 7_000
    clock.now_ms += 3_000
    request = renew.RenewDelegationTokenRequest(hmac=token.hmac, renew_period_ms=-1)
    code = refusal(handle_renew_delegation_token, request, of(registry))
    assert code == ErrorCode.DELEGATION_TOKEN_EXPIRED
    registry.remove_expired_tokens()
    assert [each.token_id for each in registry.delegation_tokens()] == [long.token_id]
    request = renew.RenewDelegationTokenRequest(hmac=long.hmac, renew_period_ms=9_000)
    renewed = handle_renew_delegation_token(request, of(registry))
    assert renewed.expiry_timestamp_ms == long.max_timestamp_ms


def test_tokens_are_in_the_log(registry, tmp_path):
    make(of(registry), owner="bob", lifetime_ms=2_000)
    registry.replace_records()
    (token,) = start(tmp_path).delegation_tokens()
    assert (token.owner, token.requester) == ("User:bob", "User:alice")
    assert token.ends_ms == token.max_ms == NOW_MS + 2_000


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"protocol": "PLAINTEXT"}, ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
        (
            {"principal": "User:ANONYMOUS", "protocol": "SSL"},
            ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
        ),
        (
            {"words": {connection_row(0) + CONNECTION_BY_TOKEN: 1}},
            ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
        ),
        ({"senders": None}, ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
        ({"tokens": None}, ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED),
    ],
)
def test_who_may_not_ask_for_tokens_gets_none(registry, options, code):
    assert refusal(make, of(registry, **options)) == code
    request = describe.DescribeDelegationTokenRequest(owners=None)
    where = of(registry, **options)
    assert refusal(handle_describe_delegation_token, request, where) == code
    assert registry.delegation_tokens() == []


def test_a_token_for_another_owner_needs_permission():
    request = create.CreateDelegationTokenRequest(
        owner_principal_type="User", owner_principal_name="bob"
    )
    answer, seen = ask(request, 3)
    assert answer.error_code == ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED
    assert seen is None
    answer, seen = ask(request, 3, (AclOperation.CREATE_TOKENS, "User:bob"))
    assert answer.error_code == ErrorCode.NONE
    assert seen.owner_principal_name == "bob"


def test_tokens_of_others_are_told_with_permission_only(registry):
    mine, others = make(of(registry)), make(of(registry, "User:bob"))

    def seen(*granted):
        request = request_of(describe.DescribeDelegationTokenRequest(owners=None), 2)
        access = authorization(Granting(*granted)).access(request)
        answer = handle_describe_delegation_token(
            describe.DescribeDelegationTokenRequest(owners=None),
            of(registry, access=access),
        )
        return {each.token_id for each in answer.tokens}

    both = {mine.token_id, others.token_id}
    assert seen() == {mine.token_id}
    assert seen((AclOperation.DESCRIBE, others.token_id)) == both
    assert seen((AclOperation.DESCRIBE_TOKENS, "User:bob")) == both
