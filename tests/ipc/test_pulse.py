"""The pulse shows the process's own steps, and nothing of the processes it forks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpbroker.ipc import pulse
from mpbroker.ipc.layout import (
    CONTROL_WORDS,
    KEEPER_PULSE,
    PULSE_AWAITS,
    PULSE_PID,
    PULSE_STEPS,
    pulse_words,
)
from mpbroker.ipc.segment import Segment

FIRST = pulse_words(KEEPER_PULSE)


@pytest.fixture
def control() -> Iterator[Segment]:
    yield Segment.create("control", CONTROL_WORDS * 8)
    pulse.hide()


def test_a_step_is_shown_until_the_pulse_is_hidden(control: Segment) -> None:
    words = control.words
    words[FIRST + PULSE_AWAITS] = 7  # a predecessor died while it slept for a lock
    pulse.step()
    pulse.show_in_header(control, KEEPER_PULSE)
    assert words[FIRST + PULSE_STEPS] == words[FIRST + PULSE_AWAITS] == 0
    assert words[FIRST + PULSE_PID] == os.getpid()
    pulse.step()
    pulse.step()
    assert words[FIRST + PULSE_STEPS] == 2
    pulse.hide()
    pulse.step()
    assert words[FIRST + PULSE_STEPS] == 2
