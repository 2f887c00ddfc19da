"""What ``ctl`` is answered fits into an answer, however bad things are."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mpbroker.inspect.control_protocol import encode_frame
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.ipc.tables.transaction_table import Closed
from mpbroker.supervisor.control.control_commands import ControlCommands, Sources

LONGEST_NAME = "t" * 249


def commands_of(
    view: object, closed: Callable[[], Closed | None] = lambda: None
) -> ControlCommands:
    parts: dict[str, Any] = {
        "view": view,
        "children": [],
        "identity": {"pid": 1, "limits": {}, "started": time.time(), "log_dirs": []},
        "deaths": SimpleNamespace(total=0),
        "rows": lambda: MAX_PARTITIONS,
        "name_of_row": lambda row: (LONGEST_NAME, row),
        "resizing": lambda: False,
        "closed": closed,
        "arena": memoryview(b""),
        "topics_of_page_cache": lambda: ([LONGEST_NAME] * MAX_PARTITIONS, False),
    }
    return ControlCommands(Sources(**parts), {})


def test_status_can_be_told_with_every_partition_offline() -> None:
    view = SimpleNamespace(
        control=memoryview(bytearray(4096)).cast("Q"),
        figures=dict,
        power_cut=lambda rows, name, since: {},
        offline_rows=lambda rows: list(range(rows)),
    )
    status = commands_of(view).execute("status", {})
    assert encode_frame({"ok": True, "result": status})
    assert status["offline_partitions"] == MAX_PARTITIONS
    assert status["offline"][0] == [LONGEST_NAME, 0]


def test_that_partitions_are_closed_is_said_ever_less_often(caplog: Any) -> None:
    view = SimpleNamespace(
        control=memoryview(bytearray(4096)).cast("Q"),
        figures=dict,
        power_cut=lambda rows, name, since: {},
        offline_rows=lambda rows: [],
        unsynced_rows=lambda rows: {},
    )
    seconds = 0
    commands = commands_of(view, lambda: Closed(float(seconds), 2))
    said = []
    for seconds in range(300):
        before = len(caplog.records)
        commands.look()
        if len(caplog.records) > before:
            said.append(seconds)
    assert said == [5, 10, 20, 40, 80, 140, 200, 260]
    assert "for 260 s" in caplog.text
    assert "attempt 2 of at most 3" in caplog.text
    status = commands.execute("status", {})
    assert status["closed"] == {"for_s": 299.0, "coordinators": 2}
    assert "power cut" in status["why_closed"]
