"""Wake-ups between processes: eventfds, edge-triggered in epoll and never read.

A wake-up is a hint. It may be spurious, and it holds no count that a death could take
along. Whether anybody sleeps is a flag that is set and tested under the mutex of what
is waited for; so none is lost between live processes, and after every death the
supervisor rings all of them.

Source: eventfd(2), epoll(7) on EPOLLET.
"""

import os


class Doorbell:
    """One eventfd that wakes one process.

    Args:
        fd: an eventfd that is there already; -1: make one.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int = -1) -> None:
        if fd < 0:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fd = fd

    def ring(self) -> None:
        """Wake its owner, or leave a mark that makes its next epoll return at once."""
        os.eventfd_write(self.fd, 1)
