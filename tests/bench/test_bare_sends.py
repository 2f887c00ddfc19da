"""What the figures of producers are compared with writes what it says it does."""

from __future__ import annotations

import pytest

from mpbroker.protocol.records.compression import Codec
from tests.bench.bare_sends import BareSends
from tests.compat.adapters import ADAPTERS


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
@pytest.mark.parametrize("count", [3, 1000])
def test_as_many_records_are_written_as_asked_for(bootstrap, topic_name, codec, count):
    value = b"abcdefgh" * 50
    with ADAPTERS["mpbroker"](bootstrap) as client:
        client.create_topic(topic_name, 4)
        sends = BareSends(topic_name, 4, value, count, codec, 4096)
        assert sends.run(bootstrap) > 0
        ends = [client.offsets(topic_name, number)[1] for number in range(4)]
        assert sum(ends) == count
        message = client.consume(topic_name, 0, ends[0] - 1, 1)[0]
        assert message.value == value
        if count == 1000:
            assert min(ends) > 0
        client.delete_topic(topic_name)
