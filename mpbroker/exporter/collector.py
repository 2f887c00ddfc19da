"""Collector: all figures of a broker as Prometheus families.

A family is one metric with its samples. Names are mpbroker_*, in base units. Counters
come from shared memory, where they outlive their writers; gauges have the values of the
moment.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from mpbroker.coordinator.group_positions import MAX_POSITIONS
from mpbroker.exporter.exposition import Family, counter, gauge, histogram, summary
from mpbroker.exporter.group_numbers import group_families
from mpbroker.exporter.limits import limit_families, request_memory
from mpbroker.exporter.partitions import PartitionFigures, Partitions
from mpbroker.exporter.quota_metrics import quota_families
from mpbroker.exporter.requests.request_log_counts import error_name
from mpbroker.exporter.topic_traffic import topic_families
from mpbroker.inspect.broker_view import BrokerView, api_name
from mpbroker.ipc.black_box import BlackBox, box_number
from mpbroker.ipc.counters.authentication_counts import (
    read_authentications,
    read_reauthentication,
)
from mpbroker.ipc.counters.error_counts import read_errors
from mpbroker.ipc.counters.request_metrics import Stage, read_apis
from mpbroker.ipc.layout import (
    ACCEPTOR_COUNTERS,
    CONNECTION_ENCRYPTION,
    CONTROL_RING,
    COORDINATOR,
    COORDINATOR_RING,
    HANDLER_ACTIVE,
    HANDLER_COUNTERS,
    HANDLER_INCARNATION,
    HEADER,
    HEADER_CONTROL_PLANE,
    HEADER_PHASE,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    METRICS,
    METRICS_BLOCKED,
    METRICS_CONNECTIONS,
    METRICS_DEATHS,
    METRICS_STARTS,
    PROCESSOR_BEAT,
    PROCESSOR_COUNTERS,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    REQUEST_RING,
    RING_HEAD,
    RING_TAIL,
    HandlerCounter,
    Phase,
    ProcessorCounter,
    connection_row,
    handler_row,
    processor_row,
    response_ring,
)
from mpbroker.ipc.tables.client_software import software_of
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.network.connection_quotas import AcceptorCounter
from mpbroker.network.security.encryption import encryption_names
from mpbroker.storage.full_directories import full_directories
from mpbroker.storage.offline_directories import offline_directories
from mpbroker.supervisor.child import Role

if TYPE_CHECKING:
    from mpbroker.exporter.group_lag import CommittedOffsets
    from mpbroker.supervisor.memory import BrokerMemory

_NS: Final = 1e9
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SILENT_NS: Final = 30_000_000_000
_CONNECTIONS_A_LOOK: Final = 100_000
# The number of combinations of a cipher suite and a version; the limit is Kafka's.
_ENCRYPTIONS_SHOWN: Final = 100
# Bounded, as partitions are: a client that may commit can invent any number of groups.
MAX_POSITIONS_SHOWN: Final = MAX_POSITIONS
CLOSED_REASONS: Final = {
    ProcessorCounter.CLOSED_BY_PEER: "peer",
    ProcessorCounter.CLOSED_BAD_FRAME: "bad_frame",
    ProcessorCounter.CLOSED_IDLE: "idle",
    ProcessorCounter.CLOSED_ERROR: "error",
    ProcessorCounter.CLOSED_BY_HANDLER: "broker",
    ProcessorCounter.LOST: "lost",
    ProcessorCounter.CLOSED_EXCESS: "excess",
}
_REFUSED: Final = {
    AcceptorCounter.TOO_MANY_OF_ADDRESS: "address_count",
    AcceptorCounter.TOO_FAST_OF_ADDRESS: "address_rate",
    AcceptorCounter.NO_FILES: "no_files",
}
_WAITS: Final = {
    ProcessorCounter.WAITS_FOR_SLOT: "slot",
    ProcessorCounter.WAITS_FOR_EXTENT: "memory",
    ProcessorCounter.WAITS_FOR_RING: "queue",
}
PARKED_REQUESTS: Final = "mpbroker_parked_requests"
STAGES: Final = ("queue", "local", "remote", "response_queue", "send", "total")


class Collector:
    """Makes Prometheus metrics of one broker's figures.

    Args:
        describe: a function that returns the facts that the supervisor publishes:
            children, version, start.
        listeners: the names of the broker's listeners, by index.
        quota_window: the number of samples that count for a quota, and the length of
            each in ns.
    """

    def __init__(
        self,
        memory: BrokerMemory,
        partitions: Partitions,
        lag: CommittedOffsets,
        describe: Callable[[], dict[str, Any]],
        listeners: Sequence[str],
        quota_window: tuple[int, int] = (11, 1_000_000_000),
    ) -> None:
        self._memory = memory
        self._words = memory.control.words
        self._table = memory.table
        self._boxes = memory.boxes.words
        self._transactions = TransactionTable(memory.transactions)
        self._arena_layout = memory.arena_layout
        self._view = BrokerView(
            memory.control.words, memory.table.segment.words, memory.boxes.words
        )
        self._partitions = partitions
        self._lag = lag
        self._describe = describe
        self._listeners = listeners
        self._quotas = memory.quotas
        self._quota_window = quota_window

    def errors(self) -> dict[tuple[int, int], int]:
        """Return the number of responses since the start by API key and error code."""
        return read_errors(self._words, self.handlers_ever())

    def collect(self) -> list[Family]:
        """Return all metrics as families, with the values that they have now."""
        logs = list(self._partitions)
        return [
            *self._broker(),
            *self._requests(),
            *self._processes(),
            *self._processors(),
            *self._handlers(),
            *self.connections(),
            *self._authentications(),
            *self._reauthentications(),
            *quota_families(self._quotas, *self._quota_window),
            *self._new_connections(),
            request_memory(self._words, self._arena_layout),
            *self._logs(logs),
            *topic_families(
                self._table, self._partitions.registry, self.handlers_ever()[:-1]
            ),
            *self._groups(logs),
            *group_families(self._words),
            *limit_families(
                self._memory, self._partitions.registry, self.handlers_ever()
            ),
        ]

    # -- the broker ----------------------------------------------------------------

    def _broker(self) -> Iterable[Family]:
        words, told = self._words, self._describe()
        info = gauge("mpbroker_info", "Always 1; what is running.")
        info.add(
            1, version=told.get("version", ""), cluster_id=told.get("cluster_id", "")
        )
        started = gauge("mpbroker_start_time_seconds", "When it started, Unix time.")
        started.add(float(told.get("started", 0)))
        phase = gauge("mpbroker_phase", "0 starting, 1 serving, 2 draining, 3 stopped.")
        phase.add(words[HEADER + HEADER_PHASE])
        closed = gauge(
            "mpbroker_partitions_closed_seconds",
            "How long partitions have been closed after an unclean stop; 0: open.",
        )
        since = self._transactions.closed()
        closed.add(0 if since is None else since.for_s)
        queue = gauge(
            "mpbroker_queue_size", "Requests or answers that wait to be taken."
        )
        queue.add(_waiting(words, REQUEST_RING), queue="request")
        queue.add(_waiting(words, COORDINATOR_RING), queue="coordinator")
        if words[HEADER + HEADER_CONTROL_PLANE]:
            queue.add(_waiting(words, CONTROL_RING), queue="control-plane")
        for number in self._processor_ids():
            waiting = _waiting(words, response_ring(number))
            queue.add(waiting, queue=f"response-{number}")
        blocked = counter(
            "mpbroker_acceptor_blocked_seconds_total",
            "Time that new connections waited for a processor with room.",
        )
        for index, name in enumerate(self._listeners):
            blocked_ns = words[METRICS + METRICS_BLOCKED + index]
            blocked.add(blocked_ns / _NS, listener=name)
        return info, started, phase, closed, queue, blocked

    # -- requests ------------------------------------------------------------------

    def _requests(self) -> Iterable[Family]:
        words = self._words
        executed = counter("mpbroker_requests_executed_total", "Requests executed.")
        spent = counter(
            "mpbroker_request_execution_seconds_total", "Time spent executing requests."
        )
        for key, (count, spent_ns) in sorted(self._executed().items()):
            executed.add(count, api=api_name(key))
            spent.add(spent_ns / _NS, api=api_name(key))
        answered = counter("mpbroker_requests_total", "Requests answered.")
        versions = counter(
            "mpbroker_requests_by_version_total",
            "Requests answered, by version; 31 stands for all from 31 on.",
        )
        taken = counter("mpbroker_request_bytes_total", "Bytes of requests answered.")
        given = counter("mpbroker_response_bytes_total", "Bytes of answers.")
        times = histogram(
            "mpbroker_request_stage_seconds",
            "Time of requests by stage: queue, local (work), remote (wait), response"
            " queue, send; and in total.",
        )
        for key, api in read_apis(words, range(MAX_PROCESSORS)).items():
            name = api_name(key)
            answered.add(api.requests, api=name)
            for version, count in api.versions.items():
                versions.add(count, api=name, version=version)
            taken.add(api.request_bytes, api=name)
            given.add(api.response_bytes, api=name)
            for stage in Stage:
                times.add_histogram(api.stages[stage], api=name, stage=STAGES[stage])
        errors = counter(
            "mpbroker_request_errors_total", "Requests answered with errors."
        )
        for (key, code), count in sorted(self.errors().items()):
            errors.add(count, api=api_name(key), error=error_name(code))
        return executed, spent, answered, versions, taken, given, times, errors

    def _executed(self) -> dict[int, tuple[int, int]]:
        total: dict[int, tuple[int, int]] = {}
        for number in self.handlers_ever():
            role = "coordinator" if number == COORDINATOR else "handler"
            index = 0 if number == COORDINATOR else number
            box = BlackBox(self._boxes, box_number(role, index))
            for key, (count, spent) in box.totals().items():
                before = total.get(key, (0, 0))
                total[key] = (before[0] + count, before[1] + spent)
        return total

    def handlers_ever(self) -> list[int]:
        """Return the ids of all handlers since the start, and the coordinator's.

        The counts of handlers that have ended stay in shared memory, and are added up
        with the others.
        """
        last = MAX_HANDLERS
        while last and not self._words[handler_row(last - 1) + HANDLER_INCARNATION]:
            last -= 1
        return [*range(last), COORDINATOR]

    # -- processes -----------------------------------------------------------------

    def _processes(self) -> Iterable[Family]:
        words = self._words
        starts = counter("mpbroker_process_starts_total", "Processes started, by role.")
        deaths = counter(
            "mpbroker_process_deaths_total", "Processes that ended unasked, by role."
        )
        for index, role in enumerate(Role):
            starts.add(words[METRICS + METRICS_STARTS + index], role=role.value)
            deaths.add(words[METRICS + METRICS_DEATHS + index], role=role.value)
        cpu = gauge("mpbroker_process_cpu_seconds", "CPU time of each living process.")
        memory = gauge(
            "mpbroker_process_resident_memory_bytes", "Memory, shared pages too."
        )
        restarts = gauge("mpbroker_process_restarts", "Restarts of each process id.")
        for child in self._describe().get("children", ()):
            labels = {"role": child["role"], "id": child["id"]}
            usage = process_usage(child["pid"])
            restarts.add(child["restarts"], **labels)
            if usage is not None:
                cpu.add(usage[0], **labels)
                memory.add(usage[1], **labels)
        return starts, deaths, cpu, memory, restarts

    # -- network -------------------------------------------------------------------

    def _new_connections(self) -> Iterable[Family]:
        words = self._words
        accepted = counter(
            "mpbroker_connections_accepted_total", "Connections accepted."
        )
        refused = counter(
            "mpbroker_connections_refused_total",
            "Connections closed unserved, and why.",
        )
        for index, name in enumerate(self._listeners):
            first = METRICS + METRICS_CONNECTIONS + index * ACCEPTOR_COUNTERS
            accepted.add(words[first + AcceptorCounter.ACCEPTED], listener=name)
            for each, reason in _REFUSED.items():
                refused.add(words[first + each], listener=name, reason=reason)
        return accepted, refused

    def _processor_ids(self) -> list[int]:
        return [
            number
            for number in range(MAX_PROCESSORS)
            if self._words[processor_row(number) + PROCESSOR_LISTENER]
        ]

    def _processors(self) -> Iterable[Family]:
        words = self._words
        idle = counter("mpbroker_processor_idle_seconds_total", "Time without work.")
        waits = counter(
            "mpbroker_processor_waits_total", "Times that reading had to wait."
        )
        moved = counter(
            "mpbroker_connections_moved_total", "Moved to another processor."
        )
        resumed = counter(
            "mpbroker_connections_resumed_total", "Taken over from dead processors."
        )
        closed = counter("mpbroker_connections_closed_total", "Connections closed.")
        received = counter(
            "mpbroker_received_bytes_total", "Bytes of requests received."
        )
        sent = counter("mpbroker_sent_bytes_total", "Bytes of answers sent.")
        polls = counter("mpbroker_processor_polls_total", "Looks for events.")
        empty = counter(
            "mpbroker_processor_empty_polls_total",
            "Looks that ended early and without an event.",
        )
        totals: Counter[ProcessorCounter] = Counter()
        for number in range(MAX_PROCESSORS):
            row = processor_row(number)
            if not words[row + PROCESSOR_INCARNATION]:
                continue
            for each in ProcessorCounter:
                totals[each] += words[row + PROCESSOR_COUNTERS + each]
            idle_ns = words[row + PROCESSOR_COUNTERS + ProcessorCounter.IDLE_NS]
            idle.add(idle_ns / _NS, processor=number)
            counters = row + PROCESSOR_COUNTERS
            polls.add(words[counters + ProcessorCounter.POLLS], processor=number)
            empty.add(words[counters + ProcessorCounter.EMPTY_POLLS], processor=number)
        for each, reason in _WAITS.items():
            waits.add(totals[each], reason=reason)
        for each, reason in CLOSED_REASONS.items():
            closed.add(totals[each], reason=reason)
        moved.add(totals[ProcessorCounter.MOVED_OUT])
        resumed.add(totals[ProcessorCounter.RESUMED])
        received.add(totals[ProcessorCounter.BYTES_IN])
        sent.add(totals[ProcessorCounter.BYTES_OUT])
        return idle, polls, empty, waits, moved, resumed, closed, received, sent

    def connections(self) -> Iterable[Family]:
        """Return metrics with the numbers of open connections, by several labels.

        The labels are listener, client software, and version of TLS with cipher suite.
        """
        words = self._words
        by_listener = Counter(dict.fromkeys(range(len(self._listeners)), 0))
        by_software: Counter[tuple[str, str]] = Counter()
        by_encryption: Counter[int] = Counter()
        found, _ = self._view.connections(0, _CONNECTIONS_A_LOOK)
        for each in found:
            by_listener[each["listener"]] += 1
            by_software[software_of(words, each["row"])] += 1
            word = words[connection_row(each["row"]) + CONNECTION_ENCRYPTION]
            if word:
                by_encryption[word] += 1
        open_ = gauge("mpbroker_connections", "Open connections, by listener.")
        for index, count in sorted(by_listener.items()):
            if 0 <= index < len(self._listeners):
                open_.add(count, listener=self._listeners[index])
        clients = gauge("mpbroker_client_connections", "Open connections, by software.")
        for (name, version), count in sorted(by_software.items()):
            clients.add(
                count, client_software_name=name, client_software_version=version
            )
        encrypted = gauge(
            "mpbroker_tls_connections",
            "Open connections with TLS, by cipher suite and version.",
        )
        for word, count in by_encryption.most_common(_ENCRYPTIONS_SHOWN):
            cipher, protocol = encryption_names(word)
            encrypted.add(count, cipher=cipher, protocol=protocol)
        return open_, clients, encrypted

    def _authentications(self) -> Iterable[Family]:
        """Return the metric of authentications by result.

        Before the first authentication there is none.
        """
        counts = read_authentications(self._words)
        if not any(counts.values()):
            return ()
        ended = counter(
            "mpbroker_authentications_total",
            "TLS handshakes and SASL authentications, by how they ended.",
        )
        for result, count in counts.items():
            ended.add(count, result=result.name.lower())
        return (ended,)

    def _reauthentications(self) -> Iterable[Family]:
        """Return the metrics of the time that re-authentications took.

        Before the first re-authentication there are none.
        """
        latency = read_reauthentication(self._words)
        if not latency.times:
            return ()
        again = summary(
            "mpbroker_reauthentication_seconds",
            "Time from the first step of a re-authentication to its last.",
        )
        again.add_summary(latency.sum_ns / _NS, latency.times)
        longest = gauge(
            "mpbroker_reauthentication_max_seconds", "The longest since the start."
        )
        longest.add(latency.max_ns / _NS)
        return again, longest

    # -- handlers ------------------------------------------------------------------

    def _handlers(self) -> Iterable[Family]:
        words = self._words
        idle = counter("mpbroker_handler_idle_seconds_total", "Time without work.")
        parked = gauge("mpbroker_purgatory_size", "Requests that wait, by handler.")
        kinds = gauge(PARKED_REQUESTS, "Requests that wait, by what for.")
        waiting = fetches = 0
        syncs = counter(
            "mpbroker_log_syncs_total", "Syncs of logs to disk by handlers."
        )
        for number in self.handlers_ever():
            row = handler_row(number)
            counters = row + HANDLER_COUNTERS
            name = "coordinator" if number == COORDINATOR else number
            if number != COORDINATOR:  # the coordinator does not count idle time
                idle.add(words[counters + HandlerCounter.IDLE_NS] / _NS, handler=name)
            syncs.add(words[counters + HandlerCounter.SYNCS], handler=name)
            if words[row + HANDLER_ACTIVE]:
                parked.add(words[counters + HandlerCounter.PARKED], handler=name)
                waiting += words[counters + HandlerCounter.PARKED]
                fetches += words[counters + HandlerCounter.PARKED_FETCHES]
        kinds.add(fetches, api="Fetch")
        # The two words of a handler are not read at one moment.
        kinds.add(max(0, waiting - fetches), api="Produce")
        return idle, parked, kinds, syncs

    # -- logs and groups -------------------------------------------------------------

    def _logs(self, logs: Sequence[PartitionFigures]) -> Iterable[Family]:
        start = gauge("mpbroker_log_start_offset", "First offset of each partition.")
        end = gauge("mpbroker_log_end_offset", "Offset after the last record.")
        size = gauge("mpbroker_log_size_bytes", "Bytes of a partition's segments.")
        unflushed = gauge(
            "mpbroker_log_unflushed_bytes", "Bytes not known to be on disk, estimated."
        )
        offline = gauge(
            "mpbroker_partitions_offline",
            "Partitions whose storage has failed, or is not there.",
        )
        for each in logs:
            labels = {"topic": each.topic, "partition": each.partition}
            start.add(each.log_start_offset, **labels)
            end.add(each.log_end_offset, **labels)
            size.add(each.size_bytes, **labels)
            unflushed.add(each.unflushed_bytes, **labels)
        lost = self._partitions.lost
        offline.add(lost + sum(each.is_offline for each in logs))
        unloaded = gauge(
            "mpbroker_partitions_unloaded", "Not loaded since the start yet."
        )
        unloaded.add(self._partitions.unloaded)
        hidden = gauge("mpbroker_partitions_not_shown", "Left out: there are too many.")
        hidden.add(self._partitions.not_shown)
        full = gauge(
            "mpbroker_log_directory_full", "1: appends are refused for lack of room."
        )
        away = gauge(
            "mpbroker_log_directory_offline", "1: it is not there, or cannot be read."
        )
        told = self._describe()
        paths = told.get("log_dirs", ())
        without_room = full_directories(self._words, paths)
        for path in paths:
            full.add(int(path in without_room), log_dir=path)
        not_there = offline_directories(self._words, told)
        for path in dict.fromkeys([*paths, *not_there]):
            away.add(int(path in not_there), log_dir=path)
        return start, end, size, unflushed, offline, full, away, unloaded, hidden

    def _groups(self, logs: Sequence[PartitionFigures]) -> Iterable[Family]:
        ends = {(each.topic, each.partition): each.log_end_offset for each in logs}
        committed = gauge("mpbroker_group_committed_offset", "What a group committed.")
        lag = gauge("mpbroker_group_lag", "Records that a group has not committed yet.")
        positions = self._lag.committed()
        for group, topic, partition, offset in islice(positions, MAX_POSITIONS_SHOWN):
            labels = {"group": group, "topic": topic, "partition": partition}
            committed.add(offset, **labels)
            end = ends.get((topic, partition))
            if end is not None:
                lag.add(max(0, end - offset), **labels)
        hidden = gauge(
            "mpbroker_group_offsets_not_shown", "Left out: there are too many."
        )
        hidden.add(self._lag.hidden + sum(1 for _ in positions))
        return committed, lag, hidden


def process_usage(pid: int) -> tuple[float, int] | None:
    """Return CPU seconds and resident bytes of a process; None: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return cpu, int(fields[21]) * os.sysconf("SC_PAGESIZE")


def why_not_ready(words: memoryview, now_ns: int | None = None) -> str:
    """Return why the broker is not ready for clients; "" if it is."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    phase = words[HEADER + HEADER_PHASE]
    if phase != Phase.SERVING:
        return f"the broker is {Phase(phase).name.lower()}"
    for number in range(MAX_PROCESSORS):
        row = processor_row(number)
        beat = words[row + PROCESSOR_BEAT]
        if words[row + PROCESSOR_LISTENER] and beat and now_ns - beat > _SILENT_NS:
            return f"processor {number} is silent since {(now_ns - beat) // 10**9} s"
    return ""


def _waiting(words: memoryview, ring: int) -> int:
    return max(0, words[ring + RING_TAIL] - words[ring + RING_HEAD])
