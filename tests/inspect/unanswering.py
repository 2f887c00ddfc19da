"""mpbroker with one fault: until a file is there, its handlers answer nothing."""

import os
import sys
import time

from mpbroker.cli import main
from mpbroker.server.dispatcher import RequestDispatcher

_dispatch = RequestDispatcher.dispatch


def _waiting(self, request):
    while not os.path.exists(os.environ["ANSWER_WHEN_THERE"]):
        time.sleep(0.01)
    return _dispatch(self, request)


RequestDispatcher.dispatch = _waiting
sys.exit(main())
