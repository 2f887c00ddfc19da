"""Ownership: refuse calls of a client that is closed, or was made before a fork."""

from __future__ import annotations

import os

from mpbroker.client.errors import ClientError


class Ownership:
    """Remembers which process made a client, and whether the client is closed."""

    def __init__(self, what: str) -> None:
        """Make this process the owner of a client.

        Args:
            what: the client's name in errors, such as "consumer".
        """
        self._what = what
        self._made_by = os.getpid()
        self._is_closed = False

    def check(self) -> None:
        """Raise ClientError if the client cannot be used in this process.

        Raises:
            ClientError: the client is closed, or this process was forked from the one
                that made it. Make another client.
        """
        if os.getpid() != self._made_by:
            raise ClientError(
                f"this {self._what} belongs to process {self._made_by}, from which this"
                f" one was forked; make another one here after the fork"
            )
        if self._is_closed:
            raise ClientError(f"the {self._what} is closed; make a new one")

    def close(self) -> bool:
        """Mark the client as closed; return whether its connections must be closed.

        Only the first call returns True. A call in a forked child returns False,
        because the connections are the parent's.
        """
        if self._is_closed or os.getpid() != self._made_by:
            return False
        self._is_closed = True
        return True
