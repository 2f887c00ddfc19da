"""Group consumers as a test sees them: processes that say what they have and got."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Self

from tests.compat.group_member import HEARTBEAT_MS, SESSION_MS
from tests.support.fetch_clients import NODE_DIR, ROOT
from tests.support.patience import LONGEST_S

LIBRARIES: Final = ("confluent-kafka", "kafka-python", "aiokafka")
# Several processes start, one after another, each with a library to import.
_PATIENCE_S: Final = 2 * LONGEST_S
_LAST_WORDS_BYTES: Final = 6000


class Member:
    """One consumer process of a group."""

    def __init__(self, library: str, arguments: list[str], options: Any) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.compat.group_member"]
        command.append(library)
        environ = dict(os.environ)
        if library == "kafkajs":
            command = ["node", str(ROOT / "tests" / "compat" / "node" / "member.cjs")]
            # require() looks beside the script, and then here.
            environ["NODE_PATH"] = str(NODE_DIR / "node_modules")
            environ["KAFKAJS_NO_PARTITIONER_WARNING"] = "1"
            times = {"session_ms": SESSION_MS, "heartbeat_ms": HEARTBEAT_MS}
            options = times | options
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [*command, *arguments, json.dumps(options)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._rest = b""
        self.assigned: list[int] = []
        self.assignments: list[list[int]] = []
        self.got: list[tuple[int, int]] = []

    @property
    def fd(self) -> int:
        return self._fd

    def read(self) -> None:
        """Take in what it has said."""
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "assigned" in words:
                self.assigned = words["assigned"]
                self.assignments.append(self.assigned)
            self.got.extend((row[0], row[1]) for row in words.get("got", ()))

    def leave(self) -> None:
        """Make it close its consumer, and wait for its end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Let it die without a word to the broker."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGUSR1)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                raise TimeoutError(f"a member stays:\n{self._last_words()}") from None
        self.read()
        self.assigned = []

    def _last_words(self) -> str:
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, end - _LAST_WORDS_BYTES))
        return self._said.read().decode(errors="replace")

    def close(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()


class Group:
    """The members of one group; all are gone at the end of the test."""

    def __init__(self, bootstrap: str, group_id: str, topic: str) -> None:
        self.group_id = group_id
        self._arguments = [bootstrap, group_id, topic]
        self.members: list[Member] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for member in self.members:
            member.close()

    def add(self, library: str, **options: Any) -> Member:
        member = Member(library, self._arguments, options)
        self.members.append(member)
        return member

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Listen to the members until it is so; return how many seconds it took.

        Raises:
            TimeoutError: it never was.
        """
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > _PATIENCE_S:
                shares = [member.assigned for member in self.members]
                raise TimeoutError(f"not within {_PATIENCE_S} s: {what}; {shares}")
            poll = select.poll()
            for member in self.members:
                poll.register(member.fd, select.POLLIN)
            poll.poll(50)
            for member in self.members:
                member.read()
        return time.monotonic() - started

    def wait_for_shares(self, sharing: list[Member], partitions: int) -> float:
        """Wait until these have all partitions between them, and each its share."""

        def shared() -> bool:
            shares = [member.assigned for member in sharing]
            together = sorted(number for share in shares for number in share)
            return together == list(range(partitions)) and all(shares)

        return self.wait_until(shared, f"{partitions} over {len(sharing)} members")

    def positions(self) -> dict[int, set[int]]:
        """All offsets that members said they got, by partition."""
        found: dict[int, set[int]] = {}
        for member in self.members:
            for partition, offset in member.got:
                found.setdefault(partition, set()).add(offset)
        return found
