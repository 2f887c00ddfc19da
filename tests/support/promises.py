"""Two kinds of failure: a broken promise, and a thing that did not come in time.

The tests run on machines that others load, so a test that failed is run again, alone
(tests/gate). Some failures are never forgiven, however seldom they are: a record that
is lost, doubled, out of order, given to somebody else or torn; wrong bytes; a process
that crashed; something left behind. What judges these raises UnforgivableError:

    with promised("every acknowledged record is in the log once"):
        assert log == acknowledged
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UnforgivableError(AssertionError):
    """The broker or a client broke a promise: the gate does not run the test again."""


class NotInTimeError(AssertionError):
    """Something did not happen before patience ended. Load can be the reason."""


@contextlib.contextmanager
def promised(what: str) -> Iterator[None]:
    """Turn an assertion that fails in the block into a broken promise.

    Also decorates a function, for example a whole test. A NotInTimeError stays what it
    is: it is about patience, and says nothing about the promise.

    Args:
        what: the promise as a sentence; the error begins with it.

    Raises:
        UnforgivableError: an assertion in the block has failed.
    """
    try:
        yield
    except (UnforgivableError, NotInTimeError):
        raise
    except AssertionError as error:
        raise UnforgivableError(f"not kept: {what}\n{error}") from error
