"""Assign the tasks of a Kafka Streams application to the members of its group.

A task is a subtopology and a partition number. A process of the application has one
member for each stream thread. Two copies of a task (the active one and its standbys)
are never in one process, since one failure would end both.

    1. An active task stays with the member that has it, up to the member's share.
    2. One that no member has moves to a process that has it as a standby.
    3. The others go to the process, and in it to the member, with the least load.
    4. Standbys stay where they are if they can, and else go to the least load.

A member keeps no more than its share of the active tasks, and of all tasks: as many as
the others have, or one more. The rest goes by the loads of processes, so shares are
equal where processes have equally many members.

Source: KIP-1071; Kafka's StickyTaskAssignor, which has the same goals.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from mpbroker.base.named_tuple import NamedTuple

# Partition numbers by subtopology.
TaskIds = Mapping[str, "set[int]"]
Task = tuple[str, int]


class TaskMember(NamedTuple):
    """A member as the assignor sees it: its process, and its target until now."""

    member_id: str
    process_id: str
    active: TaskIds
    standby: TaskIds


class SubtopologyTasks(NamedTuple):
    """How many tasks a subtopology has, and whether they have state to replicate."""

    num_tasks: int
    is_stateful: bool


class Assigned(NamedTuple):
    """The tasks of one member."""

    active: dict[str, set[int]]
    standby: dict[str, set[int]]


class _Shares:
    """Counts how many more tasks members may get, so that all have equal shares.

    Args:
        num_tasks: the tasks to share out.
        member_ids: the members.
    """

    def __init__(self, num_tasks: int, member_ids: Sequence[str]) -> None:
        self._floor, self._larger = divmod(num_tasks, len(member_ids))
        self.counts = dict.fromkeys(member_ids, 0)

    def has_room(self, member_id: str) -> bool:
        count = self.counts[member_id]
        return count < self._floor or (count == self._floor and self._larger > 0)

    def add(self, member_id: str) -> None:
        if self.counts[member_id] == self._floor:
            self._larger -= 1
        self.counts[member_id] += 1


class _Assignment:
    """The state of one run of the assignor."""

    def __init__(
        self,
        members: Sequence[TaskMember],
        subtopologies: Mapping[str, SubtopologyTasks],
        num_standbys: int,
    ) -> None:
        self._process = {member.member_id: member.process_id for member in members}
        self._members: dict[str, list[str]] = {}  # by process
        for member in members:
            self._members.setdefault(member.process_id, []).append(member.member_id)
        self._tasks_of: dict[str, set[Task]] = {each: set() for each in self._members}
        # Every process, by a load that it had: loads only grow, see `_least_loaded`.
        self._by_load = [(0.0, process) for process in sorted(self._members)]
        self.result = {member.member_id: Assigned({}, {}) for member in members}
        self._previous = _holders((each.member_id, each.active) for each in members)
        self._replicas = _holders((each.member_id, each.standby) for each in members)
        self._copies: dict[Task, int] = {}  # the active one included
        self._subtopologies = subtopologies
        self._num_standbys = num_standbys
        num_active = sum(each.num_tasks for each in subtopologies.values())
        num_copies = num_standbys * sum(
            each.num_tasks for each in subtopologies.values() if each.is_stateful
        )
        member_ids = [member.member_id for member in members]
        self._active = _Shares(num_active, member_ids)
        self._all = _Shares(num_active + num_copies, member_ids)

    def assign(self) -> None:
        """Assign the active tasks, then the standbys."""
        tasks = [
            (subtopology, number)
            for subtopology, each in sorted(self._subtopologies.items())
            for number in range(each.num_tasks)
        ]
        # By partition: tasks of one partition number read the same keys, and the first
        # that find room stay.
        left = []
        for task in sorted(tasks, key=lambda task: (task[1], task[0])):
            kept = self._keeper(task)
            if kept is None:
                left.append(task)
            else:
                self._give(kept, task)
        for task in sorted(left):
            self._give(self._least_loaded(task), task)
        stateful = [task for task in tasks if self._subtopologies[task[0]].is_stateful]
        for _ in range(self._num_standbys):
            for task in stateful:
                self._add_standby(task)

    def _keeper(self, task: Task) -> str | None:
        """Return the member that has state of a task already, and has room for it."""
        for holders in (self._previous, self._replicas):
            with_room = [
                each for each in holders.get(task, ()) if self._active.has_room(each)
            ]
            if with_room:
                return min(with_room, key=self._load_of)
        return None

    def _give(self, member_id: str, task: Task) -> None:
        self._active.add(member_id)
        self._note(member_id, task)
        self.result[member_id].active.setdefault(task[0], set()).add(task[1])

    def _add_standby(self, task: Task) -> None:
        """Assign one more copy of a task, if there is a process that has none."""
        if self._copies.get(task, 1) >= len(self._members):
            return  # fewer processes than copies
        self._copies[task] = self._copies.get(task, 1) + 1
        candidates = [
            each
            for each in (*self._previous.get(task, ()), *self._replicas.get(task, ()))
            if task not in self._tasks_of[self._process[each]]
            and self._all.has_room(each)
        ]
        if candidates:
            member_id = min(candidates, key=self._load_of)
        else:
            member_id = self._least_loaded(task)
        self._note(member_id, task)
        self.result[member_id].standby.setdefault(task[0], set()).add(task[1])

    def _note(self, member_id: str, task: Task) -> None:
        self._all.add(member_id)
        self._tasks_of[self._process[member_id]].add(task)

    def _least_loaded(self, task: Task) -> str:
        """Return a member of the least loaded process that has no copy of a task."""
        passed = []
        while True:
            load, process = heapq.heappop(self._by_load)
            now = self._load(process)
            if now > load:  # it has got tasks since
                heapq.heappush(self._by_load, (now, process))
                continue
            passed.append((load, process))
            if task not in self._tasks_of[process]:
                break
        for entry in passed:
            heapq.heappush(self._by_load, entry)
        return min(self._members[process], key=lambda each: self._all.counts[each])

    def _load_of(self, member_id: str) -> tuple[float, int]:
        return self._load(self._process[member_id]), self._all.counts[member_id]

    def _load(self, process: str) -> float:
        """Return the tasks of a process for each of its members."""
        return len(self._tasks_of[process]) / len(self._members[process])


def assign_tasks(
    members: Sequence[TaskMember],
    subtopologies: Mapping[str, SubtopologyTasks],
    num_standbys: int,
) -> dict[str, Assigned]:
    """Return each member's tasks.

    Args:
        members: the members of the group.
        subtopologies: the subtopologies by their ids.
        num_standbys: how many further copies a task with state has, if there are
            enough processes.
    """
    if not members:
        return {}
    assignment = _Assignment(members, subtopologies, num_standbys)
    assignment.assign()
    return assignment.result


def _holders(members: Iterable[tuple[str, TaskIds]]) -> dict[Task, list[str]]:
    """Return by task the members that have it."""
    found: dict[Task, list[str]] = {}
    for member_id, tasks in members:
        for subtopology, numbers in tasks.items():
            for number in numbers:
                found.setdefault((subtopology, number), []).append(member_id)
    return found
