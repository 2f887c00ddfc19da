"""mpbroker whose processes die at random points, and perhaps with a known fault.

python -m tests.chaos.dying GO FAULT ROLE POINTS MEAN serve ...

POINTS are the source lines of the Python twins, or the steps of the compiled core.

Nobody dies before the file GO is there: the broker must have started first.
Nobody looks up of his own accord here: whoever misses a wake-up sleeps for ever, so a
lost one is a stuck client and not a pause of a second.

FAULT is one of
    none
    no-wake-all  after a death nobody is woken
    semaphore    a semaphore where the request ring has a robust mutex
    late-repair  the supervisor does nothing for a while before it repairs a death
"""

# ruff: noqa: E402 - the environment comes first
import ctypes
import errno
import os
import runpy
import sys
import time

FOR_EVER_S = 3600.0
LATE_S = 8.0

go, fault = sys.argv.pop(1), sys.argv.pop(1)
if sys.argv[2] == "lines":
    # They are what is died at; before anything of ours is imported.
    os.environ["MPBROKER_PURE_PYTHON"] = "1"
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
elif fault == "late-repair":
    from mpbroker.supervisor.repair.recovery import Repair

    _repair = Repair.after_handler

    def _repair_late(self, *arguments, **options):
        time.sleep(LATE_S)
        _repair(self, *arguments, **options)

    Repair.after_handler = _repair_late
elif fault != "none":
    sys.exit(f"unknown fault {fault}")

from mpbroker.network import acceptor, processor
from mpbroker.server import request_handler
from tests.support import children

request_handler._IDLE_POLL_S = FOR_EVER_S
processor._IDLE_POLL_S = FOR_EVER_S
acceptor._POLL_S = FOR_EVER_S


def _once_all_serve(kill):
    """Count no point before the broker has started."""

    def kill_once_all_serve(*arguments):
        if os.path.exists(go):
            kill(*arguments)
            return
        for served in (request_handler.RequestHandler, processor.Processor):
            served.turn = _doomed(served.turn, kill, arguments)

    return kill_once_all_serve


def _doomed(turn, kill, arguments):
    doomed = False

    def turn_and_perhaps_die(self):
        nonlocal doomed
        if not doomed and os.path.exists(go):
            doomed = True
            kill(*arguments)
        turn(self)

    return turn_and_perhaps_die


children.kill_at_line = _once_all_serve(children.kill_at_line)
children.kill_at_step = _once_all_serve(children.kill_at_step)
runpy.run_module("tests.supervisor.repair.dying_by_line", run_name="__main__")
