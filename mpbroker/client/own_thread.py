"""OwnThread: runs the calls of a client in one thread, for asyncio.

A client that waits for brokers in its caller's thread must be used by one thread. For
asyncio that is a thread of the client's own: calls run there one after another, and the
event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from mpbroker.client.errors import ClientError

_T = TypeVar("_T")
_P = ParamSpec("_P")
_ClientT = TypeVar("_ClientT")


class OwnThread:
    """Runs functions one after another in a thread, for asyncio."""

    def __init__(self, name: str) -> None:
        """Prepare the thread; the first function starts it.

        Args:
            name: the thread's name.
        """
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Have a function run after those that were submitted before.

        Raises:
            ClientError: the client is closed.
        """
        context = contextvars.copy_context()
        try:
            return self._thread.submit(context.run, function)
        except RuntimeError:
            raise ClientError("the client is closed; make a new one") from None

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in the thread, and return its result.

        If the caller is cancelled, a function that runs goes on to its end, and one
        that has not begun does not run.
        """
        return await asyncio.wrap_future(self.submit(function))

    def close(self) -> None:
        """End the thread when it has run all functions that were submitted."""
        self._thread.shutdown(wait=False)


def awaitable(
    method: Callable[Concatenate[_ClientT, _P], _T],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return a coroutine method that runs a client's method in the client's own thread.

    The class that gets it has the client as ``_client``, and the client's `OwnThread`
    as ``_thread``.
    """

    @wraps(method)
    async def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        thread: OwnThread = self._thread
        return await thread.run(partial(method, self._client, *args, **kwargs))

    return call
