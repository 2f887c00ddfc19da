"""What a broker used is all counted, whoever of it used it."""

from __future__ import annotations

import subprocess
import sys

from tests.bench.processes import ProcessTree

_WORKS_IN_A_THREAD = """
import sys, threading, time

def work():
    while time.thread_time() < 0.2:
        pass

if sys.argv[1:]:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(time.process_time(), flush=True)
    sys.stdin.read()
else:
    import subprocess
    sys.exit(subprocess.call([sys.executable, __file__, "child"]))
"""


def test_what_a_thread_used_stays_counted_when_it_has_ended(tmp_path):
    script = tmp_path / "works.py"
    script.write_text(_WORKS_IN_A_THREAD)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        used = float(parent.stdout.readline())
        tree = ProcessTree(parent.pid)
        assert tree.cpu_seconds() > used > 0.2
        by_process = tree.cpu_seconds_by_title()
        parent.communicate("")
    assert len(by_process) == 2
    assert max(by_process.values()) > 0.2


def test_a_process_that_is_gone_uses_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert ProcessTree(gone.pid).cpu_seconds() == 0
