"""FairQueue: connections that wait for memory or a slot, served client by client.

One client may have thousands of connections. In the order in which they came, all of
them would be served before the next client's. So each client has its turn, and its own
connections have an order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpbroker.ipc.layout import client_of

if TYPE_CHECKING:
    from mpbroker.network.channel import Channel


class FairQueue:
    """A queue of channels.

    Args:
        words: the words of the control segment, which have the clients' addresses.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        # By client, in the order of their turns; none is empty.
        self._clients: OrderedDict[int, deque[Channel]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Channel]:
        for channels in self._clients.values():
            yield from channels

    def append(self, channel: Channel) -> None:
        """Add a channel behind the others of its client."""
        client = client_of(self._words, channel.row)
        self._clients.setdefault(client, deque()).append(channel)
        self._count += 1

    def appendleft(self, channel: Channel) -> None:
        """Put a channel back: it is the next one."""
        client = client_of(self._words, channel.row)
        self._clients.setdefault(client, deque()).appendleft(channel)
        self._clients.move_to_end(client, last=False)
        self._count += 1

    def popleft(self) -> Channel:
        """Take the next channel; its client's next turn comes behind the others'.

        Raises:
            KeyError: the queue is empty.
        """
        client, channels = self._clients.popitem(last=False)
        channel = channels.popleft()
        if channels:
            self._clients[client] = channels
        self._count -= 1
        return channel
