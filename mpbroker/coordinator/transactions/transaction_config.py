"""Define the transaction coordinator's settings."""

from __future__ import annotations

from typing import NamedTuple


class TransactionConfig(NamedTuple):
    """Limits and times of transactions.

    Names and defaults are those of Kafka's keys, with underscores for dots; ``_ms``
    ends names in milliseconds.
    """

    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 604_800_000
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = 10_000
    transaction_remove_expired_transaction_cleanup_interval_ms: int = 3_600_000
    transaction_partition_verification_enable: bool = True
