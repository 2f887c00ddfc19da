"""What a start imports before it answers: a module costs it 0.3 to 3 ms of CPU.

The first answer shall come within 250 ms of exec, and imports are nearly all of it. A
time would depend on the machine; which modules there are does not. Whoever wants one
here says why, or imports it where it is used: a command when it comes, what evidence a
death needs after the death, the coordinator's modules in the coordinator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before the first fork: what is needed to open the logs and the memory, and what each
# handler, processor and acceptor works with. They share it; what is imported after the
# fork, each has for itself.
BEFORE_THE_FORK = """
    base.config_def base.directories base.distribution base.errors base.exit_status
    base.file_id base.logger base.named_tuple base.storage_errors
    broker.authorizer_setup
    broker.broker broker.handler_role broker.process_parts broker.roles broker.serving
    broker.start_errors cli.exit_codes cli.serve
    config.broker_config config.broker_key config.consistency config.cores
    config.dynamic config.dynamic_checks config.kafka_keys config.listeners
    config.machine config.metrics_settings config.plug_ins config.resolution
    config.sources
    exporter.metrics_listener ipc.arena ipc.black_box ipc.compiled
    ipc.counters.error_counts ipc.counters.fetched_bytes ipc.counters.network_costs
    ipc.counters.request_metrics ipc.doorbell ipc.errors ipc.fdpass ipc.lane ipc.layout
    ipc.limits_page ipc.log_levels ipc.masks ipc.parts ipc.pulse ipc.quota_layout
    ipc.response_parts ipc.ring ipc.robust_mutex ipc.segment ipc.session_layout
    ipc.tables.client_instances ipc.tables.client_software ipc.tables.member_sessions
    ipc.tables.partition_table ipc.tables.principals ipc.tables.quota_table
    ipc.tables.row_users ipc.tables.shared_log_cell ipc.tables.transaction_table
    metadata.acl_records metadata.features metadata.kraft_node metadata.kraft_records
    metadata.kraft_schema metadata.log_config metadata.log_config_def
    metadata.meta_properties metadata.metadata_batches metadata.metadata_budget
    metadata.metadata_files
    metadata.metadata_image metadata.metadata_log metadata.metadata_snapshot
    metadata.quota_records metadata.row_release metadata.scram_credentials
    metadata.topic_names metadata.topics native._core native._records network.acceptor
    network.acceptor_guard network.channel network.channel_selector
    network.compiled_turn network.connection_ledger network.connection_quotas
    network.connection_rows network.connections network.descriptor_guard network.errors
    network.fair_queue network.frame_length network.moves.arrivals
    network.moves.departures network.moves.hand_over network.moves.succession
    network.moves.tcp_counters
    network.polls network.processor network.request_channel network.request_reader
    network.response_sender network.slow_clients network.throttles network.waits
    protocol.acl protocol.api_key protocol.error_code protocol.errors
    protocol.fast_produce protocol.fields protocol.headers protocol.message
    protocol.messages.api_versions protocol.messages.fetch protocol.messages.metadata
    protocol.messages.produce protocol.primitives protocol.records.batch_header
    protocol.records.compression protocol.records.crc32c protocol.records.log_validator
    protocol.records.record_batch protocol.records.record_find
    protocol.records.record_walk protocol.source_writer
    protocol.transactional_produce server.api_messages server.apis server.core_cache
    server.described_partitions server.dispatcher server.fetch.core_fetches
    server.fetch.fetch_handler server.fetch.fetch_service server.fetch.fetch_session
    server.group_commit server.handler_context server.handlers.api_versions
    server.handlers.metadata server.host_lookups server.intent server.leaders
    server.message_apis
    server.produce.core_produces server.produce.produce_handler
    server.produce.produce_service server.produce_transactions server.purgatory
    server.quotas.client_quotas server.repeated.repeatable
    server.repeated.repeated_answers server.request server.request_handler
    server.service_parts server.turns storage.files.batch_scan
    storage.files.checkpoints
    storage.files.leader_epochs storage.files.log_files storage.files.log_segment
    storage.files.offset_index storage.files.segment_list storage.files.segment_recovery
    storage.files.time_index storage.files.txn_index storage.log.core_plans
    storage.log.disk_sync storage.log.log_loader storage.log.log_lookup
    storage.log.log_producers storage.log.log_reader storage.log.log_sync
    storage.log.partition_log storage.log.partition_view storage.log.sync_ring
    storage.full_directories storage.offline_directories
    storage.log_directory storage.log_manager storage.partition_directory
    storage.producers.producer_replay storage.producers.producer_snapshot
    storage.producers.producer_state supervisor.become_child supervisor.child
    supervisor.connection_moves supervisor.host_names supervisor.listen_sockets
    supervisor.live_config supervisor.loop supervisor.memory supervisor.pool_settings
    supervisor.pools supervisor.repair.last_tries supervisor.repair.recovery
    supervisor.role_bodies supervisor.signals supervisor.supervisor supervisor.systemd
    supervisor.upgrade.running_broker
"""

# While those get ready: what the supervisor alone needs to say that it serves, and to
# see to the first death.
BEFORE_READY = """
    broker.watch inspect.control_protocol inspect.process_state ipc.named_segment
    ipc.posix_memory protocol.framing supervisor.control.control_server
    supervisor.control.control_setup supervisor.orphans supervisor.own_command
    supervisor.probe supervisor.repair.canaries supervisor.repair.leases
    supervisor.repair.quarantine supervisor.service
"""

PACKAGE = Path(__file__).parents[2] / "mpbroker"

# Each is large itself, or brings others; all have been here. logging (string, textwrap,
# threading, tokenize, traceback, weakref) must be: see mpbroker.base.logger.load.
NOT_BEFORE_THE_FORK = """
    asyncio click concurrent.futures dataclasses datetime difflib
    encodings.idna hashlib inspect ipaddress msgpack multiprocessing orjson
    pathlib platform posix_ipc random setproctitle shutil subprocess tempfile
    tomllib urllib.parse uuid
"""
# The segment outside the family, and what is told in it.
ALLOWED_BEFORE_READY = {"datetime", "msgpack", "posix_ipc"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """What was there at the first fork, and at the last one before it was ready."""
    directory = tmp_path_factory.mktemp("start")
    reader, writer = os.pipe()
    broker = subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.broker.start_imports"),
            *(str(directory / "imports"), "serve", "--ready-fd", str(writer)),
            *("listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={directory / 'data'}"),
        ],
        pass_fds=[writer],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.readline(), broker.communicate()[1]
        lines = (directory / "imports").read_text().splitlines()
    finally:
        broker.terminate()
        broker.communicate()
    return set(lines[0].split()), set(lines[-1].split())


@pytest.fixture(scope="module")
def unavoidable() -> set[str]:
    """What logging brings of this Python: dataclasses and inspect since 3.14."""
    look = "import logging, sys; print(*sys.modules)"
    command = [sys.executable, "-c", look]
    return set(subprocess.check_output(command, text=True).split())


def _ours(modules: set[str]) -> set[str]:
    """Return our modules among these without "mpbroker."; packages hold no code."""
    ours = {m.removeprefix("mpbroker.") for m in modules if m.startswith("mpbroker.")}
    return {m for m in ours if not (PACKAGE / m.replace(".", "/")).is_dir()}


def test_children_start_with_what_all_of_them_need(imported, unavoidable):
    at_fork, _ = imported
    assert _ours(at_fork) - set(BEFORE_THE_FORK.split()) == set()
    assert at_fork & set(NOT_BEFORE_THE_FORK.split()) - unavoidable == set()


def test_a_broker_says_that_it_serves_before_it_imports_anything_else(
    imported, unavoidable
):
    _, at_ready = imported
    allowed = {*BEFORE_THE_FORK.split(), *BEFORE_READY.split()}
    assert _ours(at_ready) - allowed == set()
    large = at_ready & set(NOT_BEFORE_THE_FORK.split())
    assert large - ALLOWED_BEFORE_READY - unavoidable == set()


def test_a_broker_outside_of_a_cluster_imports_nothing_for_one(imported):
    for modules in imported:
        of_cluster = {m for m in modules if f"{m}.".startswith("mpbroker.cluster.")}
        assert of_cluster | modules & {"asyncpg", "obstore"} == set()
