"""Hold the objects with which a handler checks a Produce's transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpbroker.ipc.tables.transaction_table import TransactionTable


class ProduceTransactions(NamedTuple):
    """Holds the objects that tell which transactions are open, and that open one.

    Attributes:
        table: says whether a producer has a transaction open in a partition.
        forward: hands a request's slot to the coordinator, which opens transactions.
        verify: transaction.partition.verification.enable: transactional records must
            belong to an open transaction.
    """

    table: TransactionTable
    forward: Callable[[int], None]
    verify: bool = True
