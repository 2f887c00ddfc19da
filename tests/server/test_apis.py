"""The table of APIs: its rows, and serving an API with a row, message and handler."""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mpbroker.coordinator.coordinator_apis import method_of
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.share.share_offsets import ShareOffsets
from mpbroker.coordinator.share.share_service import ShareService
from mpbroker.coordinator.share.share_state_apis import ShareStateApis
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_listing import TransactionListing
from mpbroker.coordinator.transactions.transaction_markers import MarkerRequests
from mpbroker.coordinator.transactions.transaction_offsets import TransactionOffsets
from mpbroker.coordinator.transactions.transaction_partitions import (
    TransactionPartitions,
)
from mpbroker.protocol.acl import AclOperation as Op
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.fields import INT16, STRING, field
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.message import Message
from mpbroker.server import handlers
from mpbroker.server.api_messages import error_answer
from mpbroker.server.apis import (
    APIS,
    OPEN,
    Api,
    Forwarded,
    advertised_versions,
    forwarded_apis,
    served,
)
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.message_apis import served_apis
from tests.server.authorization.authorization_stage import Granting, authorization
from tests.server.contexts import broker_of

PARTS = (
    GroupCoordinator,
    TransactionCoordinator,
    TransactionPartitions,
    TransactionOffsets,
    MarkerRequests,
    TransactionListing,
    ShareService,
    ShareOffsets,
    ShareStateApis,
)


def test_handlers_holds_modules_named_after_apis_and_nothing_else():
    modules = {module.name for module in pkgutil.iter_modules(handlers.__path__)}
    assert modules <= {key.name.lower() for key in ApiKey}


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_api_that_is_served_is_found(api):
    if api.forwarded is not Forwarded.NEVER:
        assert callable(method_of(api.key, PARTS))
    if api.forwarded is not Forwarded.ALWAYS and not api.in_bytes:
        assert callable(api.handler())


def test_no_module_of_handlers_is_left_that_answers_nothing():
    modules = {module.name for module in pkgutil.iter_modules(handlers.__path__)}
    answering = {
        api.name
        for api in APIS.values()
        if api.forwarded is not Forwarded.ALWAYS and not api.is_data
    }
    assert modules == answering


def test_telemetry_apis_are_served_only_with_a_receiver():
    telemetry = {ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY}
    everything = {row.key for row in served(has_receiver=True)}
    assert everything == set(APIS)
    assert everything - {row.key for row in served(has_receiver=False)} == telemetry


def test_the_control_plane_serves_no_data():
    rows = {row.key for row in served(has_receiver=True, is_control_plane=True)}
    assert set(APIS) - rows == {
        ApiKey.PRODUCE,
        ApiKey.FETCH,
        ApiKey.SHARE_FETCH,
        ApiKey.SHARE_ACKNOWLEDGE,
    }


def test_apis_that_a_handler_decides_about_are_not_forwarded_unread():
    assert not {ApiKey.PRODUCE, ApiKey.INIT_PRODUCER_ID} & set(forwarded_apis())


# -- an API made up: a message, a handler and a row -----------------------------------


class VoteRequest(Message, api_key=ApiKey.VOTE, versions=(0, 1), flexible_from=0):
    cluster_id: str = field(STRING)


class VoteResponse(Message, api_key=ApiKey.VOTE, versions=(0, 1), flexible_from=0):
    error_code: int = field(INT16)
    cluster_id: str = field(STRING)


def handle_vote(request, context):
    assert context.version == 1
    return VoteResponse(cluster_id=f"{request.cluster_id} of {context.broker.rack}")


def only_upper(access, request, version):
    """A rule: the handler sees the message as the rule leaves it."""
    request.cluster_id = request.cluster_id.upper()


@pytest.fixture
def vote(monkeypatch):
    """Write its modules."""

    def module(name, **content):
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    module(
        "mpbroker.protocol.messages.vote",
        VoteRequest=VoteRequest,
        VoteResponse=VoteResponse,
    )
    module("mpbroker.server.handlers.vote", handle_vote=handle_vote)
    module("mpbroker.server.authorization.vote_rules", vote=only_upper)


def ask_vote(rule, made=None):
    """Send a Vote through a dispatcher that serves one row; return the response."""
    row = Api(ApiKey.VOTE, (0, 1), rule)
    versions = advertised_versions([row])
    assert versions == {ApiKey.VOTE: (0, 1)}
    registry = SimpleNamespace(catch_up=lambda: None, version=0)
    broker = broker_of(registry, rack="r")
    dispatcher = RequestDispatcher(
        served_apis([row], broker, {}, lambda slot: None, made),
        versions,
        error_answer,
        str,
    )
    body = VoteRequest(cluster_id="mine").encode(1)
    frame = encode_request_header(ApiKey.VOTE, 1, 42, "me") + body
    answer = dispatcher.dispatch(dispatcher.parse(0, 0, memoryview(frame), 0))
    response = VoteResponse.decode(1, memoryview(answer))
    return response.error_code, response.cluster_id


@pytest.mark.parametrize("rule", [OPEN, Op.ALTER, "vote_rules:vote"])
def test_a_new_api_is_its_message_its_handler_and_its_row(vote, rule):
    assert ask_vote(rule) == (ErrorCode.NONE, "mine of r")


def test_a_row_names_the_permission_that_a_sender_needs(vote):
    nobody = authorization(Granting())
    somebody = authorization(Granting((Op.ALTER, "kafka-cluster")))
    assert ask_vote(OPEN, nobody) == (ErrorCode.NONE, "mine of r")
    assert ask_vote(Op.ALTER, somebody) == (ErrorCode.NONE, "mine of r")
    denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert ask_vote(Op.ALTER, nobody) == (denied, "")
    assert ask_vote("vote_rules:vote", nobody) == (ErrorCode.NONE, "MINE of r")
