"""A handler with real topics and logs, whose requests the core executes or not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    PROCESSOR_SLOTS_USED,
    SLOT_PROGRESS,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    ResponseKind,
    handler_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.response_parts import FilePart, read_parts
from mpbroker.ipc.tables.quota_table import QuotaTable
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.metadata.topics import RegistryHooks, TopicRegistry
from mpbroker.network.request_channel import HandlerEnd, ProcessorEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from mpbroker.server.authorization.authorization import Authorization
from mpbroker.server.authorization.authorizer import Authorizer
from mpbroker.server.core_cache import CoreCache, Forwarding, NoCoreCache
from mpbroker.server.dispatcher import RequestDispatcher, ServedApi
from mpbroker.server.fetch.fetch_service import FetchService
from mpbroker.server.fetch.fetch_session import FetchSessions
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.produce.produce_service import ProduceService
from mpbroker.server.produce_transactions import ProduceTransactions
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.server.request_handler import RequestHandler
from mpbroker.server.service_parts import ServiceParts
from mpbroker.storage.log_directory import open_log_directories
from mpbroker.storage.log_manager import LogManager
from mpbroker.supervisor.memory import BrokerMemory
from tests.server.authorization.authorization_stage import Contexts
from tests.server.test_group_commit import Disk


def produce_request(
    topic: str, partition: int, records: bytes, *, acks: int = 1, version: int = 9
) -> bytes:
    """A whole Produce request, without its size, of correlation id 77."""
    data = PartitionProduceData(index=partition, records=records)
    message = ProduceRequest(
        transactional_id=None,
        acks=acks,
        timeout_ms=1000,
        topic_data=[TopicProduceData(name=topic, partition_data=[data])],
    )
    header = encode_request_header(ApiKey.PRODUCE, version, 77, "test")
    return header + message.encode(version)


class Stage:
    """One handler process's objects, over a data directory of its own.

    Args:
        memory: its shared memory, for itself alone.
        data: its data directory.
        short: with the short cut.
        syncs: acks=all waits for ``disk``.
        transactions: there is a table of them, and a coordinator to forward to.
        authorizer: makes one, of the registry.
        forwarding: what the core hands to the coordinator.
    """

    def __init__(
        self,
        memory: BrokerMemory,
        data: Path,
        *,
        short: bool,
        syncs: bool = False,
        transactions: bool = False,
        fetch_max_bytes: int = 1 << 20,
        authorizer: Callable[[TopicRegistry], Authorizer] | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        self.memory = memory
        data.mkdir()
        directories = open_log_directories([str(data)])
        self.registry = self._make_registry(data)
        self.logs = LogManager(directories, memory.table, self.registry)
        self.channel = HandlerEnd(
            0,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self.purgatory = Purgatory(0, memory.table, memory.notices)
        self.disk = Disk()
        self.disk.event_fd = -1
        commit = GroupCommit(0, self.disk, self.purgatory.notify)
        self.authorization = authorization = self._make_authorization(authorizer)
        self.quotas = self._make_quotas()
        self.transactions = TransactionTable(memory.transactions)
        self.forwarded: list[int] = []  # slots
        opened = None
        if transactions:
            opened = ProduceTransactions(self.transactions, self.forwarded.append)
        self.core_cache: CoreCache | NoCoreCache = NoCoreCache()
        if short and self.channel.compiled is not None:
            self.core_cache = CoreCache(
                self.channel.compiled,
                memory.table,
                self.registry,
                self.purgatory,
                authorization,
                self.quotas,
                opened,
                forwarding,
            )
        self.is_short = isinstance(self.core_cache, CoreCache)
        self.errors: list[tuple[int, int]] = []  # counted of fetches
        parts = ServiceParts(
            self.channel,
            self.registry,
            self.logs.log,
            self.purgatory,
            self.core_cache,
            lambda api_key, code: self.errors.append((api_key, int(code))),
            authorization,
        )
        sessions = FetchSessions(memory.sessions, memory.session_cell, 100)
        self.apis = self._serve(
            ProduceService(parts, commit, opened, sync_acks_all=syncs),
            FetchService(parts, sessions, fetch_max_bytes, self.quotas),
        )
        self.handler = self._make_handler(commit)
        self.short_ways: list[int] = []  # API keys that took the short cut
        self.handler._execute_in_core = self._count_short_ways

    def _make_registry(self, data: Path) -> TopicRegistry:
        memory = self.memory
        recover_metadata_log(str(data), memory.metadata_cell, 1)
        return TopicRegistry(
            MetadataLog(str(data), memory.metadata_cell),
            broker_id=1,
            capacity=100,
            now_ms=lambda: 1,
            hooks=RegistryHooks(rows=memory.table),
        )

    def _make_authorization(
        self, make: Callable[[TopicRegistry], Authorizer] | None
    ) -> Authorization | None:
        if make is None:
            return None
        self.contexts = Contexts()
        return Authorization(
            make(self.registry),
            self.contexts,  # type: ignore[arg-type]
            self.registry,
            auto_create_topics=True,
        )

    def _make_quotas(self) -> ClientQuotas:
        self.quota_table = QuotaTable(self.memory.quotas, 11, 1_000_000_000)
        return ClientQuotas(
            self.quota_table,
            self.registry,
            self.memory.control.words,
            lambda number: "User:ANONYMOUS",
            mutation_burst_s=11,
        )

    def _serve(
        self, produce: ProduceService, fetch: FetchService
    ) -> dict[int, ServedApi]:
        """Return the rows of the APIs, each handler behind the newest metadata."""

        def caught_up(handle):
            def handle_caught_up(request):
                self.registry.catch_up()
                return handle(request)

            return handle_caught_up

        self.api_versions_answers = itertools.repeat(b"\0\0 what is served")
        return {
            0: ServedApi(ApiKey.PRODUCE, (3, 13), caught_up(produce.handle)),
            1: ServedApi(ApiKey.FETCH, (4, 18), caught_up(fetch.handle)),
            18: ServedApi(
                ApiKey.API_VERSIONS,
                (0, 4),
                caught_up(lambda request: next(self.api_versions_answers)),
            ),
        }

    def _make_handler(self, commit: GroupCommit) -> RequestHandler:
        """Return the handler, which is active from now on."""
        memory = self.memory
        self.refused: list[tuple[int, int]] = []  # API key and code of each
        dispatcher = RequestDispatcher(
            self.apis,
            {},
            lambda request, code: b"error",
            str,
            lambda api_key, code: self.refused.append((api_key, int(code))),
            self.quotas,
        )
        words = memory.control.words
        words[handler_row(0) + HANDLER_ACTIVE] = 1
        words[HEADER + HEADER_ACTIVE_HANDLERS] = 1
        return RequestHandler(
            0,
            memory.control,
            self.channel,
            dispatcher,
            self.purgatory,
            commit,
            memory.handler_bells[0],
            self.core_cache,
        )

    def _count_short_ways(self, slot: int) -> int | None:
        api_key = self.core_cache.execute(slot)
        if api_key is not None:
            self.short_ways.append(api_key)
        return api_key

    def log(self, topic: str, partition: int = 0):
        return self.logs.log(topic, partition)

    def publish(self, frame: bytes, slot: int = 3) -> None:
        """Put a request into a slot, and the slot onto the ring."""
        memory = self.memory
        used = processor_row(0) + PROCESSOR_SLOTS_USED
        words = memory.control.words
        words[used] = max(words[used], slot + 1)
        at = memory.arena_layout.block(slot) + 4
        memory.arena.view[at : at + len(frame)] = frame
        end = ProcessorEnd(memory.control, memory.ring, memory.responses[0])
        progress = memory.arena_layout.block(slot) + 13 * 1024
        end.send_request(slot, at, len(frame), progress, time.monotonic_ns())
        end.flush()

    def ask(self, frame: bytes, slot: int = 3) -> tuple[ResponseKind, bytes]:
        """Execute one request; return its answer's kind and bytes."""
        self.publish(frame, slot)
        self.handler.turn()
        return self.answer(slot)

    def end_syncs(self, error: int = 0) -> None:
        """Let all syncs that were started end, and the handler see it."""
        self.disk.end(error)
        self.handler._see_to_parked()

    def answer(self, slot: int) -> tuple[ResponseKind, bytes]:
        assert self.memory.responses[0].pop() == [slot]
        return self.answer_in(slot)

    def answer_in(self, slot: int) -> tuple[ResponseKind, bytes]:
        words, row = self.memory.control.words, slot_row(slot)
        at = words[row + SLOT_RESPONSE_OFFSET]
        length = words[row + SLOT_RESPONSE_LENGTH]
        kind = ResponseKind(words[row + SLOT_RESPONSE_KIND])
        return kind, bytes(self.memory.arena.view[at : at + length])

    def sent(self, slot: int) -> bytes:
        """The bytes that the client would get, be they in memory or in a file."""
        words, row = self.memory.control.words, slot_row(slot)
        kind, content = self.answer_in(slot)
        if kind != ResponseKind.PARTS:
            return content
        whole = b""
        for part in read_parts(self.memory.arena, words[row + SLOT_RESPONSE_OFFSET]):
            if isinstance(part, FilePart):
                content = Path(part.path).read_bytes()
                whole += content[part.position : part.position + part.length]
            else:
                view = self.memory.arena.view
                whole += bytes(view[part.offset : part.offset + part.length])
        return whole

    def progress(self, slot: int = 3) -> tuple[int, list[int]]:
        row = slot_row(slot)
        return self.memory.control.words[row + SLOT_PROGRESS], self.channel.progress(
            slot
        )
