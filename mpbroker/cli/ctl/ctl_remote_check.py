"""Check the remote store of a broker: `ctl doctor` does so in a process of its own.

    python -m mpbroker.cli.ctl.ctl_remote_check URL CLUSTER_ID

That process has the broker's environment, where the credentials are. It prints a line
of JSON: the level, the text and what to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mpbroker.base.storage_errors import RemoteObjectMissingError, RemoteStorageError
from mpbroker.cli.ctl.ctl_host_checks import FAIL, OK, WARN, Finding
from mpbroker.cli.ctl.ctl_text import duration, plural, size

_CHECK: Final = "remote store"
_PATIENCE_S: Final = 60.0
_RETRY_S: Final = 5.0
_SET_UP: Final = (
    "it needs the rights to write, read and delete; the variables of the broker's"
    " environment name it and its credentials (docs, tiered storage)"
)


def check_remote_store(url: str, cluster_id: str, pid: int) -> Finding:
    """Write, read and delete an object, as the broker does.

    Args:
        url: remote.storage.url.
        cluster_id: the broker's cluster.
        pid: the broker's process, whose environment has the credentials.
    """
    environ = _environment_of(pid)
    command = [sys.executable, "-m", __name__, url, cluster_id]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            env={**os.environ, **environ},
        )
    except subprocess.TimeoutExpired:
        text = f"{url} has not answered for {_PATIENCE_S:.0f} s"
        return Finding(FAIL, _CHECK, text, "check the network, and the store itself")
    lines = done.stdout.splitlines()
    if not lines:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Finding(FAIL, _CHECK, f"it could not be checked: {why}", _SET_UP)
    level, text, fix = json.loads(lines[-1])
    if not environ and level != OK:
        fix = "run the command as the broker's user, with whose environment it checks"
    return Finding(level, _CHECK, text, fix)


def check_copies(figures: Mapping[str, int]) -> Finding:
    """Check whether copies to the remote store, or reads from it, have failed.

    Args:
        figures: the broker's counters of the remote store, as in RemoteStats.
    """
    name = "copies to the remote store"
    left = (
        f"{plural(figures['lag_segments'], 'segment')} to be copied"
        f" ({size(figures['lag_bytes'])})"
    )
    failed = figures["copy_errors"] + figures["fetch_errors"]
    if failed:
        text = f"{plural(failed, 'time')} the store failed or refused; {left}"
        return Finding(WARN, name, text, "the log tells of each partition once")
    return Finding(OK, name, left)


def examine(url: str, cluster_id: str) -> tuple[str, str, str]:
    """Check a remote store; return the level, the text and the advice of a finding."""
    try:
        from mpbroker.storage.remote.object_store import ObjectStore
    except ModuleNotFoundError as error:
        return FAIL, f"{error.name} is missing", "pip install 'mpbroker-server[tiered]'"
    from mpbroker.storage.remote.store_owner import OWNER_KEY, check_rights, read_owner

    started = time.monotonic()
    try:
        store = ObjectStore(url, retry_s=_RETRY_S)
        try:
            owner = store.get(OWNER_KEY).decode("utf-8", "replace").splitlines()
        except RemoteObjectMissingError:
            owner = []
        check_rights(store)
        if owner and f"cluster.id={cluster_id}" not in owner:
            text = f"{url} belongs to another broker ({read_owner(store)})"
            return FAIL, text, "nothing is copied: name another prefix"
    except RemoteStorageError as error:
        return FAIL, str(error), _SET_UP
    took = duration(time.monotonic() - started)
    if not owner:
        text = f"{url} belongs to no broker: its object {OWNER_KEY!r} is gone"
        return FAIL, text, "start the broker again, which claims it"
    return OK, f"{url}: an object was written, read and deleted in {took}", ""


def _environment_of(pid: int) -> Mapping[str, str]:
    """Return a process's environment; an empty one if it may not be read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(each).partition("=") for each in content.split(b"\0") if each)
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    print(json.dumps(examine(*sys.argv[1:])))
