"""mpbroker whose processes die at random source lines, and perhaps with a known fault.

python -m tests.chaos.dying GO FAULT ROLE MEAN_LINES serve ...

Nobody dies before the file GO is there: the broker must have started first.
Nobody looks up of his own accord here: whoever misses a wake-up sleeps for ever, so a
lost one is a stuck client and not a pause of a second.

FAULT is one of
    none
    no-wake-all  after a death nobody is woken
    semaphore    a semaphore where the request ring has a robust mutex
"""

# ruff: noqa: E402 - the environment comes first
import ctypes
import errno
import os
import runpy
import sys

# Its lines are what is died at; before anything of ours is imported.
os.environ["MPBROKER_PURE_PYTHON"] = "1"

FOR_EVER_S = 3600.0

go, fault = sys.argv.pop(1), sys.argv.pop(1)
sys.argv.insert(2, "lines")
if fault == "semaphore":
    # Before anyone has imported the names.
    _libc = ctypes.CDLL(None, use_errno=True)

    def _initialise(control, word):
        address = ctypes.c_void_p(control.address + word * 8)
        assert _libc.sem_init(address, 1, 1) == 0

    def _acquire(argument):
        while _libc.sem_wait(argument) and ctypes.get_errno() == errno.EINTR:
            pass
        return 0

    from mpbroker.ipc import ring

    ring.RequestRing.initialise = staticmethod(
        lambda control, base=ring.REQUEST_RING: _initialise(
            control, base + ring.RING_MUTEX
        )
    )
    _put_on_a_ring = (ring.spin_lock, ring.pthread_mutex_unlock)
    _ring_words = {}

    def _is_request_ring(argument):
        return argument.value in _ring_words

    def _lock(argument):
        if _is_request_ring(argument):
            return _acquire(argument)
        return _put_on_a_ring[0](argument)

    def _unlock(argument):
        if _is_request_ring(argument):
            return _libc.sem_post(argument)
        return _put_on_a_ring[1](argument)

    _made = ring.RequestRing.__init__

    def _make(self, *arguments):
        _made(self, *arguments)
        _ring_words[self._mutex.value] = True

    ring.RequestRing.__init__ = _make
    ring.spin_lock, ring.pthread_mutex_unlock = _lock, _unlock
elif fault == "no-wake-all":
    from mpbroker.ipc.layout import Phase
    from mpbroker.supervisor.memory import BrokerMemory

    _wake_everybody = BrokerMemory.wake_everybody

    def _let_them_sleep(self):
        if self.phase != Phase.SERVING:  # that it starts and stops is not the fault
            _wake_everybody(self)

    BrokerMemory.wake_everybody = _let_them_sleep
elif fault != "none":
    sys.exit(f"unknown fault {fault}")

from mpbroker.network import acceptor, processor
from mpbroker.server import request_handler
from tests.support import children

request_handler._IDLE_POLL_S = FOR_EVER_S
processor._IDLE_POLL_S = FOR_EVER_S
acceptor._POLL_S = FOR_EVER_S

_kill_at_line = children.kill_at_line


def _kill_at_line_once_all_serve(number, files):
    if os.path.exists(go):
        _kill_at_line(number, files)
        return
    for served in (request_handler.RequestHandler, processor.Processor):
        served.turn = _doomed(served.turn, number, files)


def _doomed(turn, number, files):
    doomed = False

    def turn_and_perhaps_die(self):
        nonlocal doomed
        if not doomed and os.path.exists(go):
            doomed = True
            _kill_at_line(number, files)
        turn(self)

    return turn_and_perhaps_die


children.kill_at_line = _kill_at_line_once_all_serve
runpy.run_module("tests.supervisor.repair.dying_by_line", run_name="__main__")
