"""What ``ctl`` is answered fits into an answer, however bad things are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.supervisor.control_commands import ControlCommands
from mpbroker.supervisor.control_protocol import encode_frame

LONGEST_NAME = "t" * 249


def commands_of(view: object) -> ControlCommands:
    parts: dict[str, Any] = {
        "view": view,
        "children": [],
        "identity": {"pid": 1, "limits": {}, "started": time.time()},
        "deaths": SimpleNamespace(total=0),
        "rows": lambda: MAX_PARTITIONS,
        "name_of_row": lambda row: (LONGEST_NAME, row),
        "actions": {},
        "resizing": lambda: False,
        "arena": memoryview(b""),
    }
    return ControlCommands(**parts)


def test_status_can_be_told_with_every_partition_offline() -> None:
    view = SimpleNamespace(
        figures=dict,
        power_cut=lambda rows, name, since: {},
        offline_rows=lambda rows: list(range(rows)),
    )
    status = commands_of(view).execute("status", {})
    assert encode_frame({"ok": True, "result": status})
    assert status["offline_partitions"] == MAX_PARTITIONS
    assert status["offline"][0] == [LONGEST_NAME, 0]
