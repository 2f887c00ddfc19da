"""Wake-ups between processes: eventfds, edge-triggered in epoll and never read.

A wake-up is a hint. It may be spurious, and it has no count that could be lost with a
process. A sleeper sets a flag before it sleeps, and the flag is set and tested under
the mutex of the structure that it waits for. So no wake-up is lost between live
processes; after every death the supervisor rings all doorbells.

Source: eventfd(2), epoll(7) on EPOLLET.
"""

import os


class Doorbell:
    """One eventfd that wakes one process.

    Args:
        fd: an existing eventfd; -1: make one.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int = -1) -> None:
        if fd < 0:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fd = fd

    def ring(self) -> None:
        """Wake the process; if it is awake, its next epoll returns at once."""
        os.eventfd_write(self.fd, 1)
