"""A well-behaved client that must not notice what the others are doing."""

from __future__ import annotations

import threading
from typing import Final

from tests.bench import wire

PAUSE_S: Final = 0.005
TOPIC: Final = "bystander"


class Bystander:
    """Produces, fetches back and compares, over one connection that must last."""

    def __init__(
        self, address: tuple[str, int], number: int, longest_wait_s: float = 30.0
    ) -> None:
        self._connection = wire.Connection(address, longest_wait_s)
        self._partition = number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rounds = 0
        self.complaint: str | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                self._round()
                self.rounds += 1
        except (OSError, wire.AnswerError) as error:
            self.complaint = f"bystander {self._partition}: {error!r}"

    def _round(self) -> None:
        value = b"%d of %d" % (self.rounds, self._partition)
        batch = wire.record_batch([wire.RecordSpec(value)])
        produced = wire.parse_produce(
            self._connection.ask(wire.produce(TOPIC, self._partition, batch))
        )
        if produced != (wire.ERROR_NONE, self.rounds):
            raise wire.AnswerError(f"{produced} where offset {self.rounds} was due")
        request = wire.fetch(TOPIC, self._partition, self.rounds, max_bytes=1000)
        fetched = wire.parse_fetch(self._connection.ask(request))
        found = [(r.offset, r.value) for r in wire.iter_records(fetched.records)]
        if found != [(self.rounds, value)]:
            raise wire.AnswerError(
                f"{found}, error {fetched.error_code}, where {value!r} was due at "
                f"{self.rounds}; the log is {fetched.log_start_offset} to "
                f"{fetched.high_watermark}"
            )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._connection.close()
