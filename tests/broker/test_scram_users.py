"""Users of SCRAM as a processor finds them, at a bad time too."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.broker.listener_setup import Credentials
from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.network.security.sasl.mechanism import NotYetError
from mpbroker.network.security.sasl.scram import ScramServer

FIRST = b"n,,n=alice,r=nonceofclient"


def test_who_logs_in_while_there_is_no_descriptor_is_judged_later() -> None:
    lacks = [errno.EMFILE, errno.EMFILE]

    def open_log() -> Any:
        if lacks:
            raise OSError(lacks.pop(), "Too many open files")
        return SimpleNamespace(read_new=list)

    credentials = Credentials(open_log).credential
    mechanism = next(iter(ScramMechanism))
    server = ScramServer(mechanism, credentials, "nonceofserver", b"secret")
    for _ in range(2):
        with pytest.raises(NotYetError, match="Too many open files"):
            server.evaluate(FIRST)
    assert server.evaluate(FIRST).startswith(b"r=nonceofclientnonceofserver,")
