"""mpbroker with one fault: a request of the client "loop" is executed for ever, once.

The coordinator does so with a request of the client "loop in the coordinator". A
request of the client "wait" waits for ever, once.

python -m tests.faults.wedged FLAG serve ...      the file FLAG says that it was

Leases are short here, and everybody moves often enough for them.
"""

import sys
import threading
from pathlib import Path

from mpbroker.cli import main
from mpbroker.coordinator import coordinator_process
from mpbroker.coordinator.coordinator_apis import CoordinatorApis
from mpbroker.network import processor
from mpbroker.server import request_handler
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.supervisor.repair import leases

request_handler._IDLE_POLL_S = processor._IDLE_POLL_S = 0.05
coordinator_process._IDLE_POLL_S = 0.05
processor._HOUSEKEEPING_NS = 50_000_000
leases.INTERVAL_S = 0.2
leases.LEASE_SAMPLES = 10

flag = Path(sys.argv.pop(1))
_dispatch = RequestDispatcher.dispatch


def _dispatch_or_loop(self, request):
    if request.client_id == "loop" and not flag.exists():
        flag.touch()
        while True:
            pass
    if request.client_id == "wait" and not flag.exists():
        flag.touch()
        threading.Event().wait()
    return _dispatch(self, request)


RequestDispatcher.dispatch = _dispatch_or_loop
_call = CoordinatorApis._call


def _call_or_loop(self, handle, request, *rest):
    if request.client_id == "loop in the coordinator" and not flag.exists():
        flag.touch()
        while True:
            pass
    return _call(self, handle, request, *rest)


CoordinatorApis._call = _call_or_loop
sys.exit(main())
