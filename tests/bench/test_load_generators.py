"""The figures are only worth something if the load generators can be disappointed."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.bench import wire
from tests.bench.byte_path import fetch_bound, produce_bound
from tests.bench.load import LoadFailedError, NoAnswerError, Template, run_load
from tests.bench.processes import ProcessTree
from tests.bench.wake_path import HandedOverPath, WakePath

Answer = Callable[[bytes], bytes]


@pytest.fixture(params=["c", "python"])
def load_generator(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "python":
        monkeypatch.setenv("MPBROKER_BENCH_LOADGEN", "python")
    elif shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, int]]]:
    """Serve answers made by a function of the request's payload."""
    listeners: list[socket.socket] = []

    def start(answer: Answer) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=_accept, args=(listener, answer), daemon=True).start()
        host, port = listener.getsockname()
        return host, port

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _accept(listener: socket.socket, answer: Answer) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_talk, args=(connection, answer), daemon=True).start()


def _talk(connection: socket.socket, answer: Answer) -> None:
    with connection, connection.makefile("rb") as stream:
        try:
            while size := stream.read(4):
                payload = answer(stream.read(struct.unpack(">i", size)[0]))
                connection.sendall(struct.pack(">i", len(payload)) + payload)
        except (OSError, struct.error):
            return


def _correlation_id(request: bytes) -> bytes:
    return request[4:8]


def _load(
    address: tuple[str, int], template: Template, connections: int = 3, depth: int = 2
) -> int:
    # Until there is an answer: a busy machine may give the generator nothing for long.
    for measure_s in (0.1, 1.0, 5.0, 25.0):
        with suppress(NoAnswerError):
            return run_load(
                address,
                ProcessTree(os.getpid()),
                [template],
                connections=connections,
                depth=depth,
                warmup_s=0.0,
                measure_s=measure_s,
            ).answered
    return 0


REQUEST = wire.api_versions()


@pytest.mark.usefixtures("load_generator")
@pytest.mark.parametrize("tail", [b"\0\0", bytes(3000), bytes(100_000)])
def test_right_answers_are_counted_whatever_their_size(
    serve: Callable[[Answer], tuple[str, int]], tail: bytes
) -> None:
    address = serve(lambda request: _correlation_id(request) + tail)
    template = Template(REQUEST, exact_size=4 + len(tail), checks=((4, b"\0\0"),))
    assert _load(address, template) > 0


@pytest.mark.usefixtures("load_generator")
@pytest.mark.parametrize(
    ("answer", "template"),
    [
        (lambda r: b"\x7f" + r[5:8] + b"\0\0", Template(REQUEST)),
        (lambda r: r[4:8] + b"\0\x01", Template(REQUEST, checks=((4, b"\0\0"),))),
        (lambda r: r[4:8] + b"\0\0", Template(REQUEST, least_size=7)),
        (lambda r: r[4:8] + b"\0\0\0", Template(REQUEST, exact_size=6)),
        (lambda r: r[9999:], Template(REQUEST)),
    ],
    ids=["correlation id", "error code", "too short", "too long", "no payload"],
)
def test_a_wrong_answer_ends_the_run(
    serve: Callable[[Answer], tuple[str, int]], answer: Answer, template: Template
) -> None:
    with pytest.raises(LoadFailedError):
        _load(serve(answer), template, connections=1, depth=1)


@pytest.mark.usefixtures("load_generator")
def test_nothing_is_measured_before_every_connection_was_answered(
    serve: Callable[[Answer], tuple[str, int]],
) -> None:
    # Until there is an answer: see _load.
    for measure_s in (0.2, 1.0, 5.0, 25.0):
        held = _HoldsOne()
        with suppress(NoAnswerError):
            result = run_load(
                serve(held.answer),
                ProcessTree(os.getpid()),
                [Template(REQUEST)],
                connections=2,
                warmup_s=0.001,
                measure_s=measure_s,
            )
            break
    assert held.answered - result.answered >= _HoldsOne.UNTIL


class _HoldsOne:
    """Answers one of its clients only when the others have had many answers."""

    UNTIL = 100

    def __init__(self) -> None:
        self.answered = 0
        self._held: int | None = None
        self._lock = threading.Lock()

    def answer(self, request: bytes) -> bytes:
        me = threading.get_ident()
        if self._held is None:
            self._held = me
        while self._held == me and self.answered < self.UNTIL:
            time.sleep(0.001)
        with self._lock:
            self.answered += 1
        return _correlation_id(request) + b"\0\0"


def test_record_batches_read_back_as_they_were_written() -> None:
    specs = [wire.RecordSpec(b"", None), wire.RecordSpec(b"v" * 300, b"k")]
    found = wire.iter_records(wire.record_batch(specs, producer_id=9))
    assert found == [(0, 9, None, b""), (1, 9, b"k", b"v" * 300)]


def test_a_flipped_bit_is_found() -> None:
    batch = bytearray(wire.record_batch([wire.RecordSpec(b"value")]))
    batch[-2] ^= 1
    with pytest.raises(wire.AnswerError):
        wire.iter_records(bytes(batch))


@pytest.mark.parametrize("measure", [produce_bound, fetch_bound])
def test_the_byte_path_without_a_broker_moves_bytes_and_leaves_nothing(
    tmp_path, measure
):
    bound = measure(tmp_path, 0.1)
    assert bound.mb_per_s > 0
    assert bound.cpu_us > 0
    assert list(tmp_path.iterdir()) == []


def test_a_message_is_passed_on_without_a_broker_and_nothing_is_left(tmp_path):
    with WakePath(tmp_path) as path:
        assert all(path.pass_on(message) > 0 for message in (b"1", b"22", b"333"))
    assert list(tmp_path.iterdir()) == []


def test_a_message_is_handed_over_to_threads_and_none_of_them_is_left(tmp_path):
    threads = set(threading.enumerate())  # those of other tests may end meanwhile
    with WakePath(tmp_path) as path, HandedOverPath(path, b"message") as handed:
        assert all(handed.pass_on() > 0 for _ in range(3))
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []
