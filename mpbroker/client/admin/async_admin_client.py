"""`AsyncAdminClient` offers the methods of `AdminClient` to asyncio.

    async with AsyncAdminClient(bootstrap_servers="localhost:9092") as admin:
        await admin.create_topic("events", partitions=8)

A thread of the client's own waits for the brokers. Calls are made one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from mpbroker.client.admin.admin_client import AdminClient
from mpbroker.client.own_thread import OwnThread, awaitable


class AsyncAdminClient:
    """Offers the methods of `AdminClient` as coroutines."""

    def __init__(
        self, config: Mapping[str, object] | None = None, **settings: object
    ) -> None:
        """Make a client; `AdminClient` has the arguments."""
        self._client = AdminClient(config, **settings)
        self._thread = OwnThread("kafka-admin-client-thread")

    async def close(self) -> None:
        """Close all connections, after the calls that were made before."""
        await self._thread.run(self._client.close)
        self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    describe_cluster = awaitable(AdminClient.describe_cluster)
    describe_features = awaitable(AdminClient.describe_features)
    describe_log_dirs = awaitable(AdminClient.describe_log_dirs)
    create_topic = awaitable(AdminClient.create_topic)
    list_topics = awaitable(AdminClient.list_topics)
    describe_topic = awaitable(AdminClient.describe_topic)
    create_partitions = awaitable(AdminClient.create_partitions)
    delete_topic = awaitable(AdminClient.delete_topic)
    list_offsets = awaitable(AdminClient.list_offsets)
    delete_records = awaitable(AdminClient.delete_records)
    describe_configs = awaitable(AdminClient.describe_configs)
    alter_configs = awaitable(AdminClient.alter_configs)
    list_groups = awaitable(AdminClient.list_groups)
    describe_group = awaitable(AdminClient.describe_group)
    delete_group = awaitable(AdminClient.delete_group)
    list_group_offsets = awaitable(AdminClient.list_group_offsets)
    alter_group_offsets = awaitable(AdminClient.alter_group_offsets)
    reset_group_offsets = awaitable(AdminClient.reset_group_offsets)
    delete_group_offsets = awaitable(AdminClient.delete_group_offsets)
    describe_acls = awaitable(AdminClient.describe_acls)
    create_acls = awaitable(AdminClient.create_acls)
    delete_acls = awaitable(AdminClient.delete_acls)
    describe_quotas = awaitable(AdminClient.describe_quotas)
    alter_quotas = awaitable(AdminClient.alter_quotas)
    list_scram_users = awaitable(AdminClient.list_scram_users)
    set_scram_password = awaitable(AdminClient.set_scram_password)
    delete_scram_credential = awaitable(AdminClient.delete_scram_credential)


__all__ = ["AsyncAdminClient"]
