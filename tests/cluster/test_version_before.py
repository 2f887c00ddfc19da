"""Nodes of the version before go on with a database that has the newest schema."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mpbroker.cluster import migrations
from mpbroker.testing.postgresql import programs, what_lacks
from tests.support.version_before import python_of, version_before

# What calls the schema's functions.
CALLERS = (
    *("group_shards", "group_store", "membership", "object_collector", "sequencer"),
    *("shared_deletions", "shared_metadata_log", "transaction_exchange"),
)


def test_what_the_version_before_tested_is_so_with_the_newest_schema(tmp_path):
    if programs() is None:
        pytest.skip(what_lacks())
    tree = version_before(tmp_path / "before")
    before = {each.name for each in (tree / "mpbroker/cluster/schema").iterdir()}
    shutil.copytree(
        migrations.DIRECTORY, tree / "mpbroker/cluster/schema", dirs_exist_ok=True
    )
    assert {each.name for each in migrations.DIRECTORY.glob("*.sql")} > before
    files = [f"tests/cluster/test_{name}.py" for name in CALLERS]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "timeout=60"]
    pytest_of_it = [*python_of(tree), "-m", "pytest", *options]
    done = subprocess.run(
        [*pytest_of_it, *(each for each in files if (tree / each).exists())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout
