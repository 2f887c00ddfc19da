"""The gate, held to planted tests that fail in each of the ways that matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import orjson
import pytest

from tests.gate import __main__ as gate
from tests.gate.outcomes import Failure, Outcomes, minutes_by_folder
from tests.support.children import wait_until
from tests.support.footprint import session_processes
from tests.support.pressure import Pressure, Reading
from tests.support.promises import NotInTimeError, UnforgivableError, promised

ROOT: Final = Path(__file__).resolve().parents[2]
# Wherever they run: pytest's own limits must not decide first.
_LIMIT_S: Final = 200

ALWAYS_FAILS = """
def test_always_fails():
    assert 6 * 7 == 43, "the reason of the failure"
"""
FAILS_BESIDE_OTHERS = """
import os
def test_needs_the_machine():
    assert "PYTEST_XDIST_WORKER" not in os.environ, "disturbed"
"""
# Each run of the test leaves a file, so that runs can be counted.
COUNTS_RUNS = """
import pathlib, uuid
from tests.support.promises import promised
def test_counts():
    runs = len(list(pathlib.Path(RUNS).iterdir()))
    pathlib.Path(RUNS, uuid.uuid4().hex).touch()
    BODY
"""
LOSES_A_RECORD_ONCE = """
    with promised("every acknowledged record is in the log"):
        assert runs > 0, "record 7 is lost"
"""
REPORTS_A_SANITIZER_ONCE = """
    if not runs:
        print("==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1")
    assert runs > 0
"""
CRASHES_ONCE = """
    if not runs:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""
CRASHES_IN_A_CHILD_ONCE = """
    import os, signal
    from tests.support.children import Child
    crash = lambda: os.kill(os.getpid(), signal.SIGSEGV)
    assert Child(crash).wait(expected=signal.SIGSEGV) == -signal.SIGSEGV
    if not runs:
        assert Child(crash).wait() == 0
"""
CRASHES_IN_A_BROKER_ONCE = """
    from tests.support.broker import Broker
    broker = Broker(pathlib.Path(RUNS).parent / "data")
    died = "WARNING handler 0 (pid 1) died: signal %d" % (9 if runs else 11)
    broker.log_path.write_text(died)
    broker.close()
"""
MEETS_ANOTHER = """
    import time
    while len(list(pathlib.Path(RUNS).iterdir())) < 2:
        time.sleep(0.05)
"""
HANGS = """
import pytest, time
@pytest.mark.timeout(1)
def test_hangs():
    hang_here()
def hang_here():
    while True:
        time.sleep(0.05)
"""
ELEVEN_FLAKY = """
import os, pytest
@pytest.mark.parametrize("number", range(11))
def test_needs_the_machine(number):
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""
COMPUTES_IN_A_CHILD = """
import subprocess, sys
def test_computes():
    program = "import time\\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
"""
PASSES = """
def test_passes():
    assert 6 * 7 == 42
"""


class Planted:
    """A folder with planted tests, and the gate run on it as a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.runs.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
        self.plant("test_passes.py", PASSES)

    def plant(self, name: str, text: str, body: str = "") -> None:
        text = text.replace("BODY", body.strip()).replace("RUNS", repr(str(self.runs)))
        (self.folder / name).write_text(text)

    def popen(
        self, *arguments: str, ignores_interrupts: bool = False
    ) -> subprocess.Popen[str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST", "MPBROKER"))
        }
        # A shell's background jobs ignore SIGINT, and hand that on.
        shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
        return subprocess.Popen(
            [
                *(shell if ignores_interrupts else ()),
                *(sys.executable, "-m", "tests.gate", *arguments),
            ],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def gate(self, *arguments: str) -> tuple[int, list[str]]:
        """Run the gate; return its exit code and the lines that it printed."""
        with self.popen(*arguments) as process:
            said, _ = process.communicate(timeout=_LIMIT_S)
        return process.returncode, said.splitlines()


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def test_a_test_that_always_fails_closes_the_gate(planted: Planted) -> None:
    planted.plant("test_it.py", ALWAYS_FAILS)
    code, lines = planted.gate()
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert lines[-2].startswith("FAILED test_it.py::test_always_fails (it fails alone")
    assert any("the reason of the failure" in line for line in lines[-60:])


def test_a_test_that_passes_alone_is_flaky_and_leaves_the_gate_open(
    planted: Planted,
) -> None:
    planted.plant("test_it.py", FAILS_BESIDE_OTHERS)
    code, lines = planted.gate("--gate-seed", "7")
    assert code == 0
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"
    name = "test_it.py::test_needs_the_machine"
    assert lines[-2].startswith(f"FLAKY {name} (passed alone; CPU pressure ")
    ledger = (planted.folder / ".pytest_cache" / "flaky.jsonl").read_bytes()
    (row,) = map(orjson.loads, ledger.splitlines())
    assert (row["name"], row["seed"]) == (name, 7)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (LOSES_A_RECORD_ONCE, "a promise was broken"),
        (REPORTS_A_SANITIZER_ONCE, "a process crashed (AddressSanitizer)"),
        (CRASHES_ONCE, "the tests' own process crashed"),
        (CRASHES_IN_A_CHILD_ONCE, "a promise was broken"),
        (CRASHES_IN_A_BROKER_ONCE, "a promise was broken"),
    ],
    ids=[
        *("a lost record", "a sanitizer's report", "a crash"),
        *("a child's crash", "a broker's crash"),
    ],
)
def test_what_is_never_forgiven_is_not_run_again(
    body: str, reason: str, planted: Planted
) -> None:
    planted.plant("test_it.py", COUNTS_RUNS, body)
    code, lines = planted.gate()
    assert code == 1
    assert lines[-2].startswith(f"FAILED test_it.py::test_counts ({reason}")
    assert len(list(planted.runs.iterdir())) == 1
    kept = (planted.folder / ".pytest_cache" / "unforgiven.jsonl").read_bytes()
    (row,) = map(orjson.loads, kept.splitlines())
    assert row["name"] == "test_it.py::test_counts"
    assert {"seed", "traceback", "log"} <= row.keys()


def test_a_test_that_hangs_closes_the_gate_with_its_stack(planted: Planted) -> None:
    planted.plant("test_it.py", HANGS)
    code, lines = planted.gate()
    assert code == 1
    assert lines[-2].startswith("FAILED test_it.py::test_hangs")
    assert any("in hang_here" in line or "hang_here()" in line for line in lines[-60:])


def test_eleven_flaky_tests_close_the_gate(planted: Planted) -> None:
    planted.plant("test_it.py", ELEVEN_FLAKY)
    code, lines = planted.gate()
    assert code == 1
    assert lines[-1] == "1 passed, 11 failed, 0 skipped"
    assert all("not run again: 11 tests failed" in line for line in lines[-12:-1])


@pytest.mark.parametrize(
    ("text", "arguments", "trouble"),
    [
        ("import nothing_of_this_name", [], "could not be collected"),
        ("", ["-k", "no_such_test"], "no test was found"),
        ("", ["--no-such-option"], "cut off"),
    ],
)
def test_a_run_that_tests_nothing_or_not_all_closes_the_gate(
    text: str, arguments: list[str], trouble: str, planted: Planted
) -> None:
    planted.plant("test_it.py", text)
    code, lines = planted.gate(*arguments)
    assert code == 1
    assert trouble in lines[-2] or trouble in lines[-3], lines


@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
def test_an_interrupted_gate_is_closed_and_leaves_no_process(
    planted: Planted, ignored: bool
) -> None:
    planted.plant("test_it.py", COUNTS_RUNS, "import time; time.sleep(3600)")
    with planted.popen(ignores_interrupts=ignored) as process:
        wait_until(lambda: any(planted.runs.iterdir()))
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 1
    assert "FAILED: " in said
    assert not session_processes(process.pid)


def test_two_gates_at_once_in_one_checkout_do_not_disturb_each_other(
    planted: Planted,
) -> None:
    # Each waits until the other's test has begun.
    planted.plant("test_it.py", COUNTS_RUNS, MEETS_ANOTHER)
    with planted.popen() as one, planted.popen() as other:
        texts = [each.communicate(timeout=_LIMIT_S)[0] for each in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], texts
    for text in texts:
        assert text.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert not session_processes(one.pid) | session_processes(other.pid)


def test_what_no_signal_of_pytest_ends_is_ended_with_its_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = (
        "import faulthandler, time; faulthandler.enable()\n"
        "def hang_here():\n    time.sleep(600)\n"
        "hang_here()"
    )
    code = gate._run([sys.executable, "-c", program], limit_s=5)
    assert code == -signal.SIGKILL
    assert "in hang_here" in capfd.readouterr().err


def test_an_outcome_file_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    row = {"kind": "failure", **vars(Failure("a"))}
    path = tmp_path / "outcomes"
    path.write_bytes(orjson.dumps(row) + b"\n" + orjson.dumps(row)[:20])
    outcomes = Outcomes.read(path, exit_code=0)
    assert list(outcomes.failures) == ["a"]
    assert "cut off" in outcomes.trouble
    assert "cut off" in Outcomes.read(tmp_path / "missing", exit_code=0).trouble


def test_the_cpu_time_of_a_test_counts_its_processes_too(planted: Planted) -> None:
    planted.plant("test_it.py", COMPUTES_IN_A_CHILD)
    _, lines = planted.gate()
    (line,) = [line for line in lines if line.endswith("test_it.py::test_computes")]
    assert float(line.split()[1]) >= 0.5


def test_minutes_are_added_up_by_folder() -> None:
    seconds = {"tests/a/b/t.py::x": 60.0, "tests/a/t.py::y": 30.0, "tests/t.py::z": 6.0}
    assert minutes_by_folder(seconds) == [("tests/a", 1.5), ("tests/t.py", 0.1)]


def test_pressure_is_the_share_of_the_time_between_two_readings() -> None:
    earlier = Reading(10.0, waited_s=1.0, stolen_s=0.0)
    later = Reading(20.0, waited_s=6.0, stolen_s=0.0)
    assert later.since(earlier) == Pressure(waited=50, stolen=0)
    assert earlier.since(earlier) == Pressure(0, 0)
    assert Reading.now().since(Reading.now()).waited <= 100


def test_only_an_assertion_breaks_a_promise_and_impatience_does_not() -> None:
    reason = "not kept: nothing is lost\nseven are lost"
    with pytest.raises(UnforgivableError, match=reason), promised("nothing is lost"):
        raise AssertionError("seven are lost")
    with pytest.raises(NotInTimeError), promised("nothing is lost"):
        raise NotInTimeError("still waiting")
    with pytest.raises(ValueError), promised("nothing is lost"):
        raise ValueError("a test's own fault")
