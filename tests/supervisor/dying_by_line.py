"""mpbroker whose handlers and processors die at a random source line, again and again.

python -m tests.supervisor.dying_by_line ROLE MEAN_LINES serve ...
"""

import os
import random
import sys

from mpbroker.cli import main
from mpbroker.supervisor import child, recovery, supervisor
from mpbroker.supervisor.roles import Roles
from tests.support.children import kill_at_line

ROLE, MEAN_LINES = sys.argv[1], int(sys.argv[2])
FILES = tuple(
    f"mpbroker/{name}.py"
    for name in (
        "ipc/ring",
        "ipc/partition_table",
        "ipc/arena",
        "ipc/robust_mutex",
        "network/request_channel",
        "network/processor",
        "network/request_reader",
        "network/response_sender",
        "network/connection_rows",
        "server/request_handler",
        "server/purgatory",
        "server/group_commit",
        "server/producing",
        "server/handlers/produce",
        "storage/partition_log",
    )
)

# A life of a few milliseconds is a good one here, and no request is to blame.
child._GOOD_LIFE_S = 0.0
supervisor._MAX_FAILURES = 10**9
recovery.MAX_RETRIES = 10**9


def _doomed(run):
    def run_until_the_line(self, *arguments):
        # Not before it serves: a start is long, and the same each time.
        picker = random.Random(os.getpid())
        kill_at_line(1 + int(picker.expovariate(1 / MEAN_LINES)), FILES)
        run(self, *arguments)

    return run_until_the_line


if ROLE in ("handler", "both"):
    Roles.run_handler = _doomed(Roles.run_handler)
if ROLE in ("processor", "both"):
    Roles.run_processor = _doomed(Roles.run_processor)
del sys.argv[1:3]
sys.exit(main())
