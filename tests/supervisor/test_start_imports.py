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
    config.security_keys ipc.principals server.sasl_apis storage.scram_credentials
    config.quota_keys ipc.quota_layout ipc.quota_table network.throttles
    server.quota_apis server.quotas storage.quota_records supervisor.quota_setup
    config.dynamic config.live_keys ipc.limits_page ipc.session_layout
    cli cli.exit_codes cli.serve errors logger
    config config_def config.broker_config config.broker_keys config.broker_values
    config.coordinator_keys config.cores config.listeners config.metrics_keys
    config.pool_limits config.telemetry_keys
    config.sources
    _core ipc ipc.arena ipc.black_box ipc.client_instances ipc.client_software
    ipc.compiled ipc.doorbell
    ipc.error_counts ipc.errors ipc.fdpass ipc.fetched_bytes
    ipc.lane ipc.layout ipc.log_levels ipc.network_costs ipc.parts
    ipc.partition_table ipc.request_metrics
    ipc.response_parts ipc.ring ipc.robust_mutex ipc.segment ipc.shared_log_cell
    ipc.transaction_table
    network network.acceptor network.acceptor_guard network.arrivals
    network.channel network.channel_selector network.compiled_turn
    network.connection_ledger network.connection_quotas
    network.connection_rows network.connections network.departures network.errors
    network.frame_length
    network.hand_over network.polls
    network.processor network.request_channel network.request_reader
    network.response_sender network.succession network.tcp_counters
    protocol protocol._records protocol.api_key protocol.batch_header
    protocol.compression protocol.crc32c protocol.error_code protocol.errors
    protocol.fast_produce protocol.headers protocol.log_validator protocol.message
    protocol.messages protocol.messages.api_versions protocol.messages.fetch
    protocol.messages.metadata protocol.messages.produce protocol.primitives
    protocol.record_batch protocol.record_walk protocol.transactional_produce
    server server.admin_apis server.apis server.dispatcher server.fetch_session
    server.fetching server.group_commit server.handlers server.handlers.api_versions
    server.handlers.fetch server.handlers.metadata server.handlers.produce
    server.plain_requests server.producing server.purgatory server.request
    server.request_handler
    storage storage.append_plan storage.batch_scan storage.checkpoints
    storage.disk_sync storage.errors storage.leader_epochs storage.log_config
    storage.log_config_def storage.log_directory storage.log_files storage.log_loader
    storage.log_lookup storage.log_manager storage.log_producers storage.log_reader
    storage.log_segment storage.log_sync storage.meta_properties
    storage.metadata_image storage.metadata_log storage.offset_index
    storage.partition_directory storage.partition_log storage.partition_view
    storage.producer_replay storage.producer_snapshot storage.producer_state
    storage.read_plan
    config.authorizer_keys protocol.acl server.acl_apis server.intent
    storage.acl_records
    supervisor.authorisation
    storage.segment_list storage.segment_recovery storage.sync_ring storage.time_index
    storage.topic_names storage.topics storage.txn_index
    supervisor supervisor.broker supervisor.child supervisor.connections
    supervisor.internal_topics
    supervisor.last_tries supervisor.listeners supervisor.live_config
    supervisor.loop supervisor.memory
    supervisor.metrics supervisor.metrics.listener
    supervisor.pool_settings supervisor.pools supervisor.process_title
    supervisor.recovery supervisor.roles supervisor.signals supervisor.supervisor
    supervisor.systemd
"""

# While those get ready: what the supervisor alone needs to say that it serves, and to
# see to the first death.
BEFORE_READY = """
    ipc.telemetry protocol.framing
    supervisor.canaries supervisor.control_protocol supervisor.control_server
    supervisor.control_setup supervisor.guards supervisor.leases supervisor.orphans
    supervisor.own_command supervisor.probe supervisor.quarantine supervisor.service
"""

# Each is large itself, or brings others; all have been here. logging (string, textwrap,
# threading, tokenize, traceback, weakref) must be: see mpbroker.logger.load.
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
            *(sys.executable, "-W", "ignore", "-m", "tests.supervisor.start_imports"),
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


def _ours(modules: set[str]) -> set[str]:
    return {m.removeprefix("mpbroker.") for m in modules if m.startswith("mpbroker.")}


def test_children_start_with_what_all_of_them_need(imported):
    at_fork, _ = imported
    assert _ours(at_fork) - set(BEFORE_THE_FORK.split()) == set()
    assert at_fork & set(NOT_BEFORE_THE_FORK.split()) == set()


def test_a_broker_says_that_it_serves_before_it_imports_anything_else(imported):
    _, at_ready = imported
    allowed = {*BEFORE_THE_FORK.split(), *BEFORE_READY.split()}
    assert _ours(at_ready) - allowed == set()
    large = at_ready & set(NOT_BEFORE_THE_FORK.split())
    assert large - ALLOWED_BEFORE_READY == set()
