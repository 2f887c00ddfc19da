"""Positions of groups, of which clients may make as many as they like."""

from __future__ import annotations

from mpbroker.exporter import collector
from mpbroker.exporter.collector import Collector
from mpbroker.exporter.partitions import PartitionFigures
from tests.support.memory import broker_memory


class Lag:
    """So many groups, each with a position of partition 0."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    hidden = 0

    def committed(self):
        return ((f"g{number}", "flights", 0, 4) for number in range(self.groups))


def shown(lag):
    with broker_memory() as memory:
        made = Collector(memory, [], lag, dict, ["PLAINTEXT"])
        log = PartitionFigures("flights", 0, 0, 10, 100, 0, 0, is_offline=False)
        return {family.name: family.samples for family in made._groups([log])}


def test_each_group_is_shown_and_none_is_left_out():
    found = shown(Lag(3))
    assert len(found["mpbroker_group_committed_offset"]) == 3
    assert {value for _, _, value in found["mpbroker_group_lag"]} == {6}
    assert found["mpbroker_group_offsets_not_shown"] == [("", (), 0)]


def test_of_more_groups_than_a_page_can_hold_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(collector, "MAX_POSITIONS_SHOWN", 2)
    found = shown(Lag(7))
    assert len(found["mpbroker_group_committed_offset"]) == 2
    assert len(found["mpbroker_group_lag"]) == 2
    assert found["mpbroker_group_offsets_not_shown"] == [("", (), 5)]
