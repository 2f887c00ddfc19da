"""Workers are this Python, with the installed PySpark, not its archive of sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from mpbroker.spark import worker_python
from mpbroker.spark.worker_python import quick_worker_python

pytestmark = pytest.mark.timeout(900)

ARCHIVES = Path(pyspark.__file__).parent / "python" / "lib"
SCRIPT = "import os, sys, pyspark; print(pyspark.__file__); print(sys.argv[1:])"


def test_a_worker_imports_what_is_compiled_and_keeps_other_paths(monkeypatch, tmp_path):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    archive = str(ARCHIVES / "pyspark.zip")
    paths = [archive, str(ARCHIVES / "py4j-0-src.zip"), str(tmp_path), "/a b/it's"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(python, script):
        return subprocess.run(
            [python, "-c", script, "two words", "$HOME"],
            check=True,
            env=environ,
            capture_output=True,
            text=True,
        ).stdout.splitlines()

    assert run(sys.executable, SCRIPT)[0].startswith(archive)  # as Spark has it
    with quick_worker_python():
        launcher = os.environ["PYSPARK_PYTHON"]
        assert run(launcher, SCRIPT) == [pyspark.__file__, "['two words', '$HOME']"]
        script = "import os, sys; print(os.environ['PYTHONPATH'], sys.executable)"
        assert run(launcher, script) == [f"{tmp_path}:/a b/it's {sys.executable}"]
    assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.parametrize("set_before", ["/usr/bin/other-python", sys.executable])
def test_another_python_that_somebody_chose_is_left_alone(set_before, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", set_before)
    with quick_worker_python():
        changed = os.environ["PYSPARK_PYTHON"] != set_before
        assert changed == (set_before == sys.executable)
    assert os.environ["PYSPARK_PYTHON"] == set_before


def test_where_no_script_may_lie_in_memory_workers_are_started_as_by_spark(monkeypatch):
    def refuse(name):
        raise PermissionError(13, "Permission denied")  # vm.memfd_noexec=2

    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(worker_python, "_made", {})
    with quick_worker_python():
        assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_where_pyspark_is_no_installed_package_nothing_is_changed(monkeypatch):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(pyspark, "__file__", f"{ARCHIVES}/pyspark.zip/pyspark/a.py")
    with quick_worker_python():
        assert "PYSPARK_PYTHON" not in os.environ


def test_workers_of_a_session_are_such(spark):
    def look(batches):
        import pyarrow as pa
        import pyspark as there

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [there.__file__]})

    found = spark.range(1).mapInArrow(look, "file STRING").collect()
    assert [row.file for row in found] == [pyspark.__file__]
