"""After a takeover children are replaced a few at a time, and each of them once."""

from __future__ import annotations

import time

import pytest

from mpbroker.supervisor.child import ChildState, Role
from mpbroker.supervisor.upgrade.renewal import _OWING_S, Renewal


class Child:
    """What a renewal looks at, and the flag that it sets."""

    def __init__(self, role):
        self.role, self.state = role, ChildState.READY
        self.replaced, self.pid, self.failures = False, 1, 0


@pytest.fixture
def children():
    roles = (Role.HANDLER, Role.HANDLER, Role.PROCESSOR, Role.ACCEPTOR, Role.KEEPER)
    return [Child(role) for role in roles]


@pytest.fixture
def killed():
    return []


@pytest.fixture
def renewal(children, killed):
    return Renewal(None, children, [], killed.append, lambda reason: None)


def being_replaced(children):
    return [each for each in children if each.replaced]


def succeed(children):
    """What pools do: a successor becomes ready, and then the old one retires."""
    for old in being_replaced(children):
        children[children.index(old)] = Child(old.role)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_than_so_many_start_at_a_time(
    renewal, children, killed, at_once, monkeypatch
):
    monkeypatch.setattr("mpbroker.supervisor.upgrade.renewal.AT_ONCE", at_once)
    old, turns = children[:4], 0
    while any(each in children for each in old):
        renewal.turn()
        renewal.turn()  # nothing more while these are on their way
        assert 1 <= len(being_replaced(children)) <= at_once
        assert killed == []
        succeed(children)
        turns += 1
    assert turns == -(-4 // at_once)
    renewal.turn()
    assert killed == [children[4]]  # the one that has no other beside it comes last


def test_a_child_that_a_resize_has_retired_meanwhile_is_left_alone(
    renewal, children, monkeypatch
):
    monkeypatch.setattr("mpbroker.supervisor.upgrade.renewal.AT_ONCE", 4)
    processor = children[2]
    processor.state = ChildState.DRAINING
    gone = children.pop(0)
    renewal.turn()
    assert not processor.replaced and not gone.replaced
    assert len(being_replaced(children)) == 2


@pytest.mark.parametrize("pays", [True, False])
def test_a_keeper_that_alone_has_a_dead_ones_sockets_is_kept_until_it_has_paid(
    children, killed, pays, monkeypatch
):
    del children[:4]
    owed = [True]
    renewal = Renewal(
        None,
        children,
        [],
        killed.append,
        lambda reason: None,
        keeper_owes=lambda: bool(owed),
    )
    for _ in range(3):
        renewal.turn()
    assert killed == []
    if pays:
        owed.clear()
    else:  # a client that is stuck holds no upgrade up for ever
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + _OWING_S)
    renewal.turn()
    assert killed == children
