"""The assignor of streams groups keeps tasks where they are, and loads equal."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.streams.task_assignor import (
    Assigned,
    SubtopologyTasks,
    TaskMember,
    assign_tasks,
)

Processes = dict[str, str]  # process by member


def assign(
    processes: Processes,
    subtopologies: dict[str, SubtopologyTasks],
    num_standbys: int = 0,
    before: dict[str, Assigned] | None = None,
) -> dict[str, Assigned]:
    none = Assigned({}, {})
    members = [
        TaskMember(member, process, *(before or {}).get(member, none))
        for member, process in processes.items()
    ]
    return assign_tasks(members, subtopologies, num_standbys)


def tasks_of(tasks: dict[str, set[int]]) -> set[tuple[str, int]]:
    return {(each, number) for each, numbers in tasks.items() for number in numbers}


def test_members_get_equal_shares_and_keep_them() -> None:
    topology = {"0": SubtopologyTasks(4, False), "1": SubtopologyTasks(2, True)}
    first = assign({"a": "p", "b": "q"}, topology)
    assert [len(tasks_of(each.active)) for each in first.values()] == [3, 3]
    assert assign({"a": "p", "b": "q"}, topology, before=first) == first
    third = assign({"a": "p", "b": "q", "c": "r"}, topology, before=first)
    assert {len(tasks_of(each.active)) for each in third.values()} == {2}
    for member in "ab":
        assert tasks_of(third[member].active) < tasks_of(first[member].active)


def test_an_active_task_moves_to_the_process_that_has_its_standby() -> None:
    topology = {"0": SubtopologyTasks(6, True)}
    processes = {"a": "p", "b": "q", "c": "r"}
    before = assign(processes, topology, 1)
    gone = tasks_of(before["a"].active)
    after = assign({"b": "q", "c": "r"}, topology, 1, before)
    for task in gone:
        (holder,) = (m for m in "bc" if task in tasks_of(before[m].standby))
        has = tasks_of(after[holder].active)
        assert task in has or len(has) == 3, "it has room, and does not get its copy"
    assert gone & {t for m in "bc" for t in tasks_of(before[m].standby)}


def test_there_are_no_standbys_of_tasks_without_state_nor_in_the_same_process() -> None:
    topology = {"0": SubtopologyTasks(2, False), "1": SubtopologyTasks(2, True)}
    both = assign({"a": "p", "b": "p"}, topology, 1)
    assert not any(each.standby for each in both.values())
    apart = assign({"a": "p", "b": "q"}, topology, 1)
    assert {t for each in apart.values() for t in tasks_of(each.standby)} == {
        ("1", 0),
        ("1", 1),
    }


_TOPOLOGIES = st.dictionaries(
    st.sampled_from("0123"),
    st.builds(SubtopologyTasks, st.integers(1, 9), st.booleans()),
    min_size=1,
)
_PROCESSES = st.dictionaries(
    st.sampled_from("abcdefg"), st.sampled_from("pqr"), min_size=1
)


@given(_TOPOLOGIES, _PROCESSES, _PROCESSES, st.integers(0, 3))
def test_each_task_is_active_once_and_copied_to_other_processes(
    topology: dict[str, SubtopologyTasks],
    earlier: Processes,
    processes: Processes,
    num_standbys: int,
) -> None:
    before = assign(earlier, topology, num_standbys)
    found = assign(processes, topology, num_standbys, before)
    assert found.keys() == processes.keys()
    active = [task for each in found.values() for task in tasks_of(each.active)]
    wanted = [(i, n) for i, each in topology.items() for n in range(each.num_tasks)]
    assert sorted(active) == sorted(wanted)
    sizes = {len(tasks_of(each.active)) for each in found.values()}
    assert max(sizes) - min(sizes) <= len(wanted)
    placed = Counter(
        (processes[member], task)
        for member, each in found.items()
        for task in (*tasks_of(each.active), *tasks_of(each.standby))
    )
    assert set(placed.values()) <= {1}, "two copies of a task in one process"
    copies = min(num_standbys, len(set(processes.values())) - 1)
    standbys = Counter(
        task for each in found.values() for task in tasks_of(each.standby)
    )
    for subtopology, number in wanted:
        is_stateful = topology[subtopology].is_stateful
        assert standbys[subtopology, number] == (copies if is_stateful else 0)


@given(_TOPOLOGIES, st.integers(1, 6), st.integers(0, 2))
def test_an_assignment_that_fits_stays_as_it_is(
    topology: dict[str, SubtopologyTasks], num_members: int, num_standbys: int
) -> None:
    processes = {f"m{n}": f"p{n}" for n in range(num_members)}
    before = assign(processes, topology, num_standbys)
    again = assign(processes, topology, num_standbys, before)
    assert {m: each.active for m, each in again.items()} == {
        m: each.active for m, each in before.items()
    }
    loads = [len(tasks_of(each.active)) for each in again.values()]
    assert max(loads) - min(loads) <= 1
