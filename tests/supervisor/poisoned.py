"""mpbroker with one fault: a request whose client id is "poison" kills its handler."""

import sys

from mpbroker.cli import main
from mpbroker.server.dispatcher import RequestDispatcher
from tests.support.children import die

_dispatch = RequestDispatcher.dispatch


def _poisoned(self, request):
    if request.client_id == "poison":
        die()
    return _dispatch(self, request)


RequestDispatcher.dispatch = _poisoned
sys.exit(main())
