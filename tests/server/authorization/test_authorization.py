"""Authorization: senders, kept decisions, the log of denials, failing authorizers."""

from __future__ import annotations

import pytest

from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    connection_row,
)
from mpbroker.protocol.acl import AclOperation as Op
from mpbroker.protocol.acl import ResourceType
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.metadata import MetadataRequest
from mpbroker.server.authorization.denial_log import printable
from mpbroker.server.errors import AuthorizerError
from mpbroker.server.request_context import RequestContexts
from tests.server.authorization.authorization_stage import (
    Granting,
    Lines,
    authorization,
    request_of,
)

TOPIC = ResourceType.TOPIC


def access_of(authorizer, made=None, lines=None):
    made = made or authorization(authorizer, lines=lines)
    return made.access(request_of(MetadataRequest(topics=[]), 9))


# -- decisions ------------------------------------------------------------------------


def test_a_decision_is_kept_until_the_version_changes():
    authorizer = Granting((Op.READ, "t"))
    made = authorization(authorizer)
    for _ in range(3):
        access = access_of(authorizer, made)
        assert access.may_topic(Op.READ, "t")
        assert not access.may_topic(Op.READ, "u")
    assert len(authorizer.asked) == 2
    authorizer.granted.clear()
    assert access_of(authorizer, made).may_topic(Op.READ, "t"), "not asked again"
    authorizer.kept_version = 2
    assert not access_of(authorizer, made).may_topic(Op.READ, "t")


def test_without_a_version_it_is_asked_each_time():
    authorizer = Granting((Op.READ, "t"), version=None)
    made = authorization(authorizer)
    for _ in range(3):
        assert access_of(authorizer, made).may_topic(Op.READ, "t")
    assert len(authorizer.asked) == 3
    assert not made.everybody_may(Op.WRITE, "t")


def test_decisions_of_one_sender_are_not_anothers():
    authorizer = Granting((Op.READ, "t"))
    made = authorization(authorizer)
    assert access_of(authorizer, made).may_topic(Op.READ, "t")
    authorizer.granted.clear()
    contexts = made._contexts
    first, contexts.known = (
        contexts.known,
        type(contexts.known)("User:bob", "10.0.0.1", "PLAINTEXT", "PLAINTEXT"),
    )
    assert not access_of(authorizer, made).may_topic(Op.READ, "t")
    contexts.known = first
    assert access_of(authorizer, made).may_topic(Op.READ, "t")


def test_a_result_other_than_true_denies():
    class Vague(Granting):
        def authorize(self, context, operation, resource):
            return "yes"

    assert not access_of(Vague()).may_topic(Op.READ, "t")


def test_an_authorizer_that_raises_denies():
    class Broken(Granting):
        def authorize(self, context, operation, resource):
            raise LookupError("the directory is down")

    with pytest.raises(AuthorizerError, match="Broken raised LookupError"):
        access_of(Broken()).may_topic(Op.READ, "t")


def test_a_topic_is_open_only_if_the_authorizer_says_just_that():
    class Open(Granting):
        answer = True

        def everybody_may(self, operation, resource):
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    authorizer = Open()
    made = authorization(authorizer)
    assert made.everybody_may(Op.WRITE, "t")
    for authorizer.answer in (False, "yes", LookupError("the directory is down")):
        assert not made.everybody_may(Op.WRITE, "t")


def test_operations_are_bits_and_not_written_about():
    lines = Lines()
    access = access_of(Granting((Op.READ, "t"), (Op.ALTER, "t")), lines=lines)
    assert access.operations(TOPIC, "t") == 1 << 3 | 1 << 7
    assert lines.lines == []


def test_a_produce_needs_its_id_and_then_each_topic():
    access = access_of(Granting((Op.WRITE, "t"), (Op.WRITE, "mine")))
    for transactional_id in (None, "mine"):
        check = access.write_check(transactional_id)
        check("t")
        with pytest.raises(ApiError) as caught:
            check("u")
        assert caught.value.error_code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(ApiError) as caught:
        access.write_check("theirs")("t")
    code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert caught.value.error_code is code


# -- the log ---------------------------------------------------------------------------


def test_a_denial_is_one_line_with_principal_operation_host_and_resource():
    lines = Lines()
    access_of(Granting(), lines=lines).may_topic(Op.DESCRIBE_CONFIGS, "t")
    assert lines.lines == [
        "Principal = User:alice is Denied operation = DescribeConfigs from host ="
        " 10.0.0.1 on resource = Topic:LITERAL:t for request = Metadata"
    ]


def test_a_denial_that_comes_again_is_a_line_a_minute():
    lines = Lines()
    made = authorization(Granting(), lines=lines)
    for second in range(0, 130, 10):
        lines.now = second * 10**9
        access_of(None, made).may_topic(Op.READ, "t")
    assert len(lines.lines) == 3
    assert lines.lines[1].endswith(", 5 times more before")


def test_denials_of_many_names_do_not_fill_the_disk():
    lines = Lines()
    access = access_of(Granting(), lines=lines)
    for number in range(2000):
        access.may_topic(Op.READ, f"t{number}")
    assert len(lines.lines) == 50
    lines.now = 11 * 10**9
    access.may_topic(Op.READ, "another")
    assert lines.lines[50] == "1950 more denials were not logged"
    assert len(lines.lines) == 52


def test_a_name_cannot_forge_a_line_nor_be_endless():
    lines = Lines()
    access_of(Granting(), lines=lines).may_topic(Op.READ, "t\n2026 ERROR hello\x1b[2J")
    (line,) = lines.lines
    assert "\n" not in line and "\x1b" not in line
    assert printable("größe") == "größe"
    assert len(printable("x" * 10_000)) < 300


# -- the sender ------------------------------------------------------------------------


@pytest.fixture
def contexts(memory):
    return RequestContexts(
        memory.control.words,
        memory.principals.name,
        [("PLAINTEXT", "PLAINTEXT"), ("INTERNAL", "SASL_SSL")],
    )


def fill(memory, *, slot, principal="User:ANONYMOUS", listener=0, address=0x0A000001):
    words, row = memory.control.words, connection_row(3)
    words[row + CONNECTION_SLOT] = slot + 1
    words[row + CONNECTION_LISTENER] = listener
    words[row + CONNECTION_PRINCIPAL] = memory.principals.number_of(principal)
    packed = b"\0" * 10 + b"\xff\xff" + address.to_bytes(4)
    for index in (0, 1):
        words[row + CONNECTION_PEER_ADDRESS + index] = int.from_bytes(
            packed[index * 8 : index * 8 + 8], "little", signed=True
        )


def test_the_sender_is_read_from_the_connections_row(memory, contexts):
    fill(memory, slot=9)
    sender = contexts.sender(3, 9)
    assert (sender.principal, sender.host) == ("User:ANONYMOUS", "10.0.0.1")
    assert (sender.listener_name, sender.security_protocol) == ("PLAINTEXT",) * 2
    assert contexts.sender(3, 9) is sender
    fill(memory, slot=9, principal="User:größe", listener=1)
    sender = contexts.sender(3, 9)
    assert (sender.principal, sender.listener_name) == ("User:größe", "INTERNAL")
    assert sender.security_protocol == "SASL_SSL"


def test_a_row_that_was_given_to_another_client_says_nothing(memory, contexts):
    fill(memory, slot=9, principal="User:mallory")
    assert contexts.sender(3, 9).principal == "User:mallory"
    # It closes with its request under way; an administrator gets the row.
    fill(memory, slot=-1, principal="User:admin")
    assert contexts.sender(3, 9) is None
    fill(memory, slot=10, principal="User:admin")
    assert contexts.sender(3, 9) is None
    assert contexts.sender(3, 10).principal == "User:admin"


@pytest.mark.parametrize("slot_of_the_next", [-1, 10])
@pytest.mark.parametrize("frees_number", [False, True])
def test_a_row_that_changes_while_it_is_read_says_nothing(
    memory, slot_of_the_next, frees_number
):
    def next_client(number):
        """Give the row to an administrator, from another address."""
        fill(memory, slot=slot_of_the_next, principal="User:admin", address=0x7F000001)
        if frees_number:
            raise DamagedSegmentError(f"principal {number} is not there")
        return name(number)

    name = memory.principals.name
    contexts = RequestContexts(memory.control.words, next_client, [("P", "P")])
    fill(memory, slot=9, principal="User:mallory")
    assert contexts.sender(3, 9) is None
    # Nor is the one client's name kept with the other one's address.
    fill(memory, slot=9, principal="User:mallory")
    contexts._principal_name = name
    assert contexts.sender(3, 9).host == "10.0.0.1"


def test_a_number_that_no_principal_has_is_an_error_while_the_sender_is_there(memory):
    def no_name(number):
        raise DamagedSegmentError(f"principal {number} is not there")

    contexts = RequestContexts(memory.control.words, no_name, [("P", "P")])
    fill(memory, slot=9)
    with pytest.raises(DamagedSegmentError):
        contexts.sender(3, 9)


def test_an_authorizer_gets_the_sender_and_the_header_of_a_request(memory):
    seen = []

    class Curious(Granting):
        def authorize(self, context, operation, resource):
            seen.append(context)
            return True

    access_of(Curious()).may_topic(Op.READ, "t")
    (context,) = seen
    assert context.api_key == ApiKey.METADATA
    assert (context.api_version, context.client_id) == (9, "client")
    assert context.connection_id == "connection 7"
