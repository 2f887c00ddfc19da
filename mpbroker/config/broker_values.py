"""The broker's settings as typed attributes: num.io.threads is `num_io_threads`.

The list repeats the keys' names and types so that mypy and editors know them;
tests/config/test_config.py holds it against the key tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpbroker.base.config_def import ConfigValue


class BrokerValues:
    """Effective values, immutable. None: not set, and Kafka has no default either."""

    node_id: int
    listeners: tuple[str, ...]
    advertised_listeners: tuple[str, ...] | None
    listener_security_protocol_map: tuple[str, ...]
    inter_broker_listener_name: str | None
    security_inter_broker_protocol: str
    controller_listener_names: tuple[str, ...]
    control_plane_listener_name: str | None
    num_network_threads: int
    num_io_threads: int
    background_threads: int
    num_replica_fetchers: int
    num_recovery_threads_per_data_dir: int
    queued_max_requests: int
    queued_max_request_bytes: int
    socket_send_buffer_bytes: int
    socket_receive_buffer_bytes: int
    socket_request_max_bytes: int
    socket_listen_backlog_size: int
    max_connections: int
    max_connections_per_ip: int
    max_connections_per_ip_overrides: tuple[str, ...]
    max_connection_creation_rate: int
    connections_max_idle_ms: int
    request_timeout_ms: int
    fetch_max_bytes: int
    max_incremental_fetch_session_cache_slots: int
    quota_window_num: int
    quota_window_size_seconds: int
    controller_quota_window_num: int
    controller_quota_window_size_seconds: int
    control_socket_path: str | None
    control_inject_enable: bool
    broker_rack: str | None
    controlled_shutdown_enable: bool
    log_dirs: tuple[str, ...]
    num_partitions: int
    default_replication_factor: int
    auto_create_topics_enable: bool
    delete_topic_enable: bool
    log_retention_check_interval_ms: int
    log_cleaner_enable: bool
    log_cleaner_threads: int
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_io_buffer_size: int
    log_cleaner_io_buffer_load_factor: float
    log_cleaner_io_max_bytes_per_second: float
    log_flush_offset_checkpoint_interval_ms: int
    log_flush_start_offset_checkpoint_interval_ms: int
    log_initial_task_delay_ms: int
    producer_id_expiration_ms: int
    producer_id_expiration_check_interval_ms: int
    log_cleanup_policy: tuple[str, ...]
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    log_cleaner_delete_retention_ms: int
    log_segment_delete_delay_ms: int
    log_flush_interval_messages: int
    log_flush_interval_ms: int | None
    log_flush_scheduler_interval_ms: int
    log_index_interval_bytes: int
    log_cleaner_max_compaction_lag_ms: int
    message_max_bytes: int
    log_message_timestamp_after_max_ms: int
    log_message_timestamp_before_max_ms: int
    log_message_timestamp_type: str
    log_cleaner_min_cleanable_ratio: float
    log_cleaner_min_compaction_lag_ms: int
    min_insync_replicas: int
    log_preallocate: bool
    log_retention_bytes: int
    log_retention_ms: int | None
    log_retention_minutes: int | None
    log_retention_hours: int
    log_segment_bytes: int
    log_index_size_max_bytes: int
    log_roll_jitter_ms: int | None
    log_roll_jitter_hours: int
    log_roll_ms: int | None
    log_roll_hours: int
    unclean_leader_election_enable: bool
    offsets_topic_num_partitions: int
    offsets_topic_replication_factor: int
    offsets_topic_segment_bytes: int
    offsets_topic_compression_codec: int
    offsets_retention_minutes: int
    offsets_retention_check_interval_ms: int
    offsets_load_buffer_size: int
    offsets_commit_timeout_ms: int
    offset_metadata_max_bytes: int
    group_initial_rebalance_delay_ms: int
    group_min_session_timeout_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    group_coordinator_rebalance_protocols: tuple[str, ...]
    group_coordinator_threads: int
    group_consumer_session_timeout_ms: int
    group_consumer_min_session_timeout_ms: int
    group_consumer_max_session_timeout_ms: int
    group_consumer_heartbeat_interval_ms: int
    group_consumer_min_heartbeat_interval_ms: int
    group_consumer_max_heartbeat_interval_ms: int
    group_consumer_max_size: int
    group_consumer_assignors: tuple[str, ...]
    group_consumer_migration_policy: str
    transaction_state_log_num_partitions: int
    transaction_state_log_replication_factor: int
    transaction_state_log_min_isr: int
    transaction_state_log_segment_bytes: int
    transaction_state_log_load_buffer_size: int
    transaction_max_timeout_ms: int
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int
    transaction_remove_expired_transaction_cleanup_interval_ms: int
    transaction_partition_verification_enable: bool
    transactional_id_expiration_ms: int
    authorizer_class_name: str
    super_users: str
    allow_everyone_if_no_acl_found: bool
    sasl_enabled_mechanisms: tuple[str, ...]
    sasl_jaas_config: str | None
    sasl_mechanism_inter_broker_protocol: str
    connection_failed_authentication_delay_ms: int
    connections_max_reauth_ms: int
    ssl_client_auth: str
    ssl_protocol: str
    ssl_enabled_protocols: tuple[str, ...]
    ssl_cipher_suites: tuple[str, ...]
    ssl_keystore_type: str
    ssl_keystore_location: str | None
    ssl_keystore_password: str | None
    ssl_keystore_key: str | None
    ssl_keystore_certificate_chain: str | None
    ssl_key_password: str | None
    ssl_truststore_type: str
    ssl_truststore_location: str | None
    ssl_truststore_password: str | None
    ssl_truststore_certificates: str | None
    ssl_principal_mapping_rules: str
    connections_setup_timeout_ms: int
    sasl_server_max_receive_size: int
    sasl_plain_users_file: str | None
    sasl_oauthbearer_jwks_endpoint_url: str | None
    sasl_oauthbearer_expected_audience: tuple[str, ...]
    sasl_oauthbearer_expected_issuer: str | None
    sasl_oauthbearer_scope_claim_name: str
    sasl_oauthbearer_sub_claim_name: str
    sasl_oauthbearer_clock_skew_seconds: int
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms: int
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms: int
    metrics_listeners: tuple[str, ...]
    metrics_kafka_names_enable: bool
    request_log_path: str | None
    request_log_max_bytes: int
    slow_request_log_threshold_ms: int
    otlp_endpoint: str | None
    otlp_interval_ms: int
    otlp_timeout_ms: int
    otlp_headers: str | None
    otlp_compression: str
    otlp_resource_attributes: tuple[str, ...]
    telemetry_max_bytes: int
    client_telemetry_log_path: str | None
    client_telemetry_log_max_bytes: int
    client_telemetry_receiver_class_name: str

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        """Take the value of every key, by Kafka's name."""
        for name, value in values.items():
            object.__setattr__(self, name.replace(".", "_"), value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the configuration is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the configuration is immutable: cannot delete {name}")
