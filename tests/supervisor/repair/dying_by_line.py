"""mpbroker whose processes die at random points, again and again.

python -m tests.supervisor.repair.dying_by_line ROLE POINTS MEAN serve ...

ROLE is handler, admin (a handler as well, at the lines of what changes topics),
processor, both of them, keeper, or acceptor. Points are the source lines of the Python
twins, or the steps of the compiled core.
"""

# ruff: noqa: E402 - the environment comes first
import os
import random
import sys

ROLE, POINTS, MEAN = sys.argv[1], sys.argv[2], int(sys.argv[3])
if POINTS == "lines":
    os.environ["MPBROKER_PURE_PYTHON"] = "1"  # before anything is imported

from mpbroker.broker.roles import Roles
from mpbroker.cli import main
from mpbroker.network.acceptor_guard import AcceptorGuard
from mpbroker.network.moves.keeper_guard import KeeperGuard
from mpbroker.supervisor import child
from mpbroker.supervisor.repair import recovery
from tests.support.children import kill_at_line, kill_at_step

FILES = tuple(
    f"mpbroker/{name}.py"
    for name in (
        "ipc/ring",
        "ipc/tables/partition_table",
        "ipc/arena",
        "ipc/robust_mutex",
        "ipc/fdpass",
        "network/acceptor",
        "network/request_channel",
        "network/processor",
        "network/request_reader",
        "network/response_sender",
        "network/connection_rows",
        "network/connections",
        "network/moves/arrivals",
        "network/moves/departures",
        "network/moves/hand_over",
        "network/moves/succession",
        "network/moves/tcp_counters",
        "network/moves/keeper",
        "server/request_handler",
        "server/purgatory",
        "server/group_commit",
        "server/produce/produce_service",
        "server/produce/produce_handler",
        "storage/log/partition_log",
    )
)

ADMIN_FILES = tuple(
    f"mpbroker/{name}.py"
    for name in (
        "network/request_channel",
        "server/intent",
        "server/handlers/create_acls",
        "server/handlers/delete_acls",
        "server/handlers/create_partitions",
        "server/handlers/create_topics",
        "server/handlers/delete_topics",
        "server/request_handler",
        "metadata/acl_records",
        "storage/log_manager",
        "metadata/metadata_log",
        "metadata/topics",
    )
)

# A life of a few milliseconds is a good one here, and no request is to blame.
child._GOOD_LIFE_S = 0.0
recovery.MAX_RETRIES = 10**9


def _doomed(run):
    def run_until_the_point(self, *arguments):
        # Not before it serves: a start is long, and the same each time.
        picker = random.Random(os.getpid())
        point = 1 + int(picker.expovariate(1 / MEAN))
        if POINTS == "lines":
            kill_at_line(point, ADMIN_FILES if ROLE == "admin" else FILES)
        else:
            kill_at_step(point)
        run(self, *arguments)

    return run_until_the_point


def _spared(watch):
    def watch_and_live(self, acceptor):
        sys.settrace(None)  # who dies together with its guard is another matter
        watch(self, acceptor)

    return watch_and_live


if ROLE in ("handler", "admin", "both"):
    Roles.run_handler = _doomed(Roles.run_handler)
if ROLE in ("processor", "both"):
    Roles.run_processor = _doomed(Roles.run_processor)
if ROLE == "keeper":
    Roles.run_keeper = _doomed(Roles.run_keeper)
    KeeperGuard._watch = _spared(KeeperGuard._watch)
if ROLE == "acceptor":
    Roles.run_acceptor = _doomed(Roles.run_acceptor)
    AcceptorGuard._watch = _spared(AcceptorGuard._watch)
del sys.argv[1:4]
sys.exit(main())
