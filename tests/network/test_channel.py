"""The table of a connection's states, walked whole."""

from __future__ import annotations

from itertools import product

import pytest

from mpbroker.ipc.layout import ConnectionState
from mpbroker.network.channel import (
    TRANSITIONS,
    ChannelEvent,
    IllegalTransitionError,
    next_state,
)

PAIRS = list(product(ConnectionState, ChannelEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_is_in_the_table_or_illegal(state, event):
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=event.name):
            next_state(state, event)


def test_a_connection_that_is_read_again_has_sent_its_answer():
    state = ConnectionState.READING
    for event in ChannelEvent:
        state = next_state(state, event)
    assert state == ConnectionState.READING
    assert len(TRANSITIONS) == 4  # and one of pipelines.py


def test_nothing_happens_to_a_connection_that_does_not_exist():
    assert not any(state == ConnectionState.FREE for state, _ in TRANSITIONS)
