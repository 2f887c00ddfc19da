"""Timers: each is called once, at its last deadline, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.timers import NEVER, Timers

names = st.integers(0, 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), names, st.integers(0, 50)),
        st.tuples(st.just("cancel"), names, st.just(0)),
        st.tuples(st.just("pass"), names, st.integers(0, 30)),
    ),
    max_size=60,
)


@given(steps)
def test_timers_fire_as_a_table_of_deadlines_says(steps):
    timers, expected, now = Timers(), {}, 0
    fired = []
    for what, name, number in steps:
        if what == "schedule":
            timers.schedule(name, now + number, lambda _, name=name: fired.append(name))
            expected[name] = now + number
        elif what == "cancel":
            timers.cancel(name)
            expected.pop(name, None)
        else:
            now += number
            fired.clear()
            due = {each for each, at in expected.items() if at <= now}
            assert timers.expire(now) == len(due)
            assert sorted(fired) == sorted(due)
            for each in due:
                del expected[each]
        assert len(timers) == len(expected)
        assert timers.next_ms <= min(expected.values(), default=NEVER)
    if not expected:
        assert timers.next_ms == NEVER


def test_a_timer_may_set_itself_again():
    timers, at = Timers(), []

    def tick(now):
        at.append(now)
        timers.schedule("tick", now + 10, tick)

    timers.schedule("tick", 10, tick)
    for now in range(0, 45, 5):
        timers.expire(now)
    assert at == [10, 20, 30, 40]


def test_a_member_that_heartbeats_for_ever_costs_one_entry():
    timers = Timers()
    for now in range(10_000):
        timers.schedule("member", now + 500, lambda _: None)
        timers.expire(now)
    assert len(timers._heap) == 1
    for now in range(10_000):
        timers.schedule(now, 20_000, lambda _: None)
        timers.cancel(now)
    assert len(timers._heap) < 200
