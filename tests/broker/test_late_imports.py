"""What is imported in time, so that no client waits for it later.

An import that only warms up looks unused, and is easily lost when modules are moved. So
these tests count what the code that needs the modules still has to import.
"""

from __future__ import annotations

import subprocess
import sys

# Modules that take milliseconds, or megabytes of each process that has them.
LARGE = {"hashlib", "platform", "uuid"}


def imported_after(prepare: str, use: str) -> set[str]:
    """Modules of ours that code imports although other code should have before."""
    code = f"""
import sys
{prepare}
before = set(sys.modules)
{use}
print(*(set(sys.modules) - before))
"""
    command = [sys.executable, "-c", code]
    found = subprocess.check_output(command, text=True).split()
    return {name for name in found if name.startswith("mpbroker") or name in LARGE}


def test_a_successor_of_coordinator_or_keeper_imports_nothing_more():
    prepare = "from mpbroker.broker.roles import Roles; Roles.import_for_later()"
    use = """
import mpbroker.broker.coordinator_role
import mpbroker.network.moves.keeper
"""
    found = imported_after("import mpbroker.broker.roles", use)
    assert found != set()
    assert found & LARGE == set()
    assert imported_after(prepare, use) == set()


ENDS_A_GENERATION = """
import sys
from types import SimpleNamespace
from mpbroker.broker.broker import Broker
from mpbroker.config import BrokerConfig

class Predecessor:
    manifest = SimpleNamespace(parts={})

    def end_generation(self, directories, memory):
        self.modules = set(sys.modules)
        raise SystemExit

broker = Broker(BrokerConfig.load({"log.dirs": "/nowhere"}, None, {}))
endpoint = SimpleNamespace(listener_name="PLAINTEXT")
broker._listeners = [SimpleNamespace(endpoint=endpoint)]
predecessor = Predecessor()
try:
    broker._memory_of_generation(predecessor)
except SystemExit:
    sys.modules = {name: sys.modules[name] for name in predecessor.modules}
"""


def test_no_client_waits_for_imports_while_a_generation_ends():
    use = "import mpbroker.broker.watch"
    assert imported_after("import mpbroker.broker.broker", use) != set()
    assert imported_after(ENDS_A_GENERATION, use) == set()
