"""mpbroker whose handlers die of a negative partition in ListOffsets.

python -m tests.fuzz.broken serve ...
"""

import os
import signal
import sys

from mpbroker.cli import main
from mpbroker.server.handlers import list_offsets

_handle = list_offsets.handle_list_offsets


def _handle_or_die(request, context):
    if any(p.partition_index < 0 for topic in request.topics for p in topic.partitions):
        os.kill(os.getpid(), signal.SIGKILL)
    return _handle(request, context)


if __name__ == "__main__":
    list_offsets.handle_list_offsets = _handle_or_die
    sys.exit(main())
