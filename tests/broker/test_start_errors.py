"""Which setting an error of the system is blamed on."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from mpbroker.base.errors import MpbrokerError
from mpbroker.broker.broker import Broker, _initialise_rows
from mpbroker.config import BrokerConfig
from mpbroker.ipc.layout import MAX_PARTITIONS


@pytest.mark.parametrize("serves", [False, True])
def test_memory_that_lacks_while_it_serves_is_no_settings_fault(
    tmp_path, monkeypatch, serves
):
    settings = {"log.dirs": str(tmp_path), "queued.max.request.bytes": "200000000"}
    broker = Broker(BrokerConfig.load(settings, None, {}, cores=2))

    def fail(*arguments):
        broker._has_children = serves
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(broker, "_start_fresh", fail)
    with pytest.raises(OSError if serves else MpbrokerError) as caught:
        broker.serve(ready_fd=None, pid_file=None)
    assert ("queued.max.request.bytes" in str(caught.value)) is not serves


def test_more_partitions_than_rows_are_refused_by_a_sentence():
    made: list[int] = []
    table = SimpleNamespace(initialise_row=made.append)
    parts = SimpleNamespace(memory=SimpleNamespace(table=table))
    known = SimpleNamespace(row_count=MAX_PARTITIONS + 1)
    with pytest.raises(MpbrokerError, match=f"a broker has room for {MAX_PARTITIONS}"):
        _initialise_rows(SimpleNamespace(parts=parts, known=known))
    assert made == []
