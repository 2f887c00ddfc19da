"""mpbroker with one fault: a request whose client id is "poison" kills its handler.

And one whose client id is "plague" kills whoever tries to answer it, too. "slow" takes
its time, and does no harm.
"""

import sys
import time

from mpbroker.cli import main
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.supervisor.repair import quarantine
from tests.support.children import die

SLOW_S = 0.5
_dispatch = RequestDispatcher.dispatch


def _poisoned(self, request):
    if request.client_id in ("poison", "plague"):
        die()
    if request.client_id == "slow":
        time.sleep(SLOW_S)
    return _dispatch(self, request)


def _plagued(frame):
    if b"plague" in bytes(frame):
        die()
    return _answer_to(frame)


RequestDispatcher.dispatch = _poisoned
_answer_to = quarantine.answer_to
quarantine.answer_to = _plagued
sys.exit(main())
