"""What ``ctl`` finds of a broker that does not answer, or not yet."""

from __future__ import annotations

import os

import pytest

from mpbroker.inspect.attach import attach


@pytest.mark.parametrize("name", ["control", "partitions", "black-boxes"])
def test_memory_that_is_still_being_made_is_none_to_be_shown(name: str) -> None:
    fd = os.memfd_create(f"mpbroker-{name}", os.MFD_CLOEXEC)
    try:
        assert attach(os.getpid()) is None
    finally:
        os.close(fd)
