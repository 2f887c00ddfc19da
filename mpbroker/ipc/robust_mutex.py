"""A process-shared mutex that says when its last owner died.

glibc's pthread robust mutex, reached with ctypes.PyDLL, which keeps the GIL: our
processes have one thread that touches locks, and dropping the GIL would cost more
than the lock (0.35 us against 0.51 us a pair, measured); 0.09 us where the compiled
core is. The owner is a thread id, so all users must share one PID namespace.

Source: pthread_mutexattr_setrobust(3), pthread_mutex_consistent(3).
"""

import ctypes
import errno
from types import TracebackType
from typing import Any, Final

from mpbroker.ipc.black_box import EventKind, note
from mpbroker.ipc.compiled import core
from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.segment import Segment

MUTEX_WORDS: Final = 16
_PTHREAD_PROCESS_SHARED: Final = 1
_PTHREAD_MUTEX_ROBUST: Final = 1

# A mutex as it is handed to these functions: a prebuilt c_void_p, so that no call
# converts it; the address itself, for the compiled core.
MutexArgument = Any

_pthread = ctypes.PyDLL(None)
_pthread_mutex_lock: Final = _pthread.pthread_mutex_lock
_pthread_mutex_trylock: Final = _pthread.pthread_mutex_trylock
# An append holds its partition for some 10 us; sleeping and being woken costs more.
_SPINS: Final = range(40)


class RobustMutex:
    """The mutex at a word offset of a segment.

    ``with mutex:`` takes it; whoever guards state that a death can leave half done
    overrides or passes ``on_owner_died``, which runs while the lock is held and
    before anybody else can take it.
    """

    __slots__ = ("argument",)

    def __init__(self, segment: Segment, word: int) -> None:
        address = segment.address + word * 8
        self.argument: MutexArgument = (
            ctypes.c_void_p(address) if core is None else address
        )

    @staticmethod
    def initialise(segment: Segment, word: int) -> None:
        """Make an unlocked mutex there. Once, before anyone can use it."""
        attributes = ctypes.create_string_buffer(64)
        _pthread.pthread_mutexattr_init(attributes)
        _pthread.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
        _pthread.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)
        address = ctypes.c_void_p(segment.address + word * 8)
        result = _pthread.pthread_mutex_init(address, attributes)
        if result:
            raise OSError(result, "pthread_mutex_init")

    def acquire(self) -> bool:
        """Take the lock; return True if its last owner died holding it.

        Raises:
            DamagedSegmentError: it is not a mutex any more.
        """
        result = spin_lock(self.argument)
        if result == 0:
            return False
        return owner_died(self.argument, result)

    def release(self) -> None:
        pthread_mutex_unlock(self.argument)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pthread_mutex_unlock(self.argument)


def spin_lock_in_python(argument: MutexArgument) -> int:
    """Take a mutex that is held for microseconds: try for a while before sleeping.

    Returns:
        What pthread_mutex_lock does: 0, or a reason to call ``owner_died``.
    """
    result: int = _pthread_mutex_trylock(argument)
    if result != errno.EBUSY:
        return result
    for _ in _SPINS:
        result = _pthread_mutex_trylock(argument)
        if result != errno.EBUSY:
            return result
    result = _pthread_mutex_lock(argument)
    return result


def owner_died(argument: MutexArgument, result: int) -> bool:
    """Judge a non-zero return of ``spin_lock``; mark the mutex usable again."""
    if result == errno.EOWNERDEAD:
        _mark_consistent(argument)
        note(EventKind.LOCK_REPAIRED)
        return True
    raise DamagedSegmentError(
        f"a shared mutex cannot be taken: {errno.errorcode.get(result, result)}"
    )


if core is None:
    spin_lock = spin_lock_in_python
    pthread_mutex_unlock = _pthread.pthread_mutex_unlock
    _mark_consistent = _pthread.pthread_mutex_consistent
else:
    spin_lock = core.spin_lock
    pthread_mutex_unlock = core.unlock
    _mark_consistent = core.mark_consistent
    core.on_repair(lambda: note(EventKind.LOCK_REPAIRED))
