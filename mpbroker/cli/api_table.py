"""`mpbroker api-table`: compare the APIs that are served with those of Apache Kafka.

Both brokers serve GetTelemetrySubscriptions and PushTelemetry only if they have a
receiver for clients' metrics. Kafka's table was taken without one, so it lacks both.

Source: the ApiVersions response of a broker of Apache Kafka 4.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.options import format_option
from mpbroker.cli.output import print_json, print_table
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.apis import advertised_versions, served

_K = ApiKey

# The oldest and the newest version of each API that a broker of Apache Kafka 4.4.0 has.
KAFKA_VERSIONS: Final[Mapping[ApiKey, tuple[int, int]]] = {
    _K.PRODUCE: (0, 13),
    _K.FETCH: (4, 18),
    _K.LIST_OFFSETS: (1, 11),
    _K.METADATA: (0, 13),
    _K.OFFSET_COMMIT: (2, 10),
    _K.OFFSET_FETCH: (1, 10),
    _K.FIND_COORDINATOR: (0, 6),
    _K.JOIN_GROUP: (0, 9),
    _K.HEARTBEAT: (0, 4),
    _K.LEAVE_GROUP: (0, 5),
    _K.SYNC_GROUP: (0, 5),
    _K.DESCRIBE_GROUPS: (0, 6),
    _K.LIST_GROUPS: (0, 5),
    _K.SASL_HANDSHAKE: (0, 1),
    _K.API_VERSIONS: (0, 5),
    _K.CREATE_TOPICS: (2, 7),
    _K.DELETE_TOPICS: (1, 6),
    _K.DELETE_RECORDS: (0, 2),
    _K.INIT_PRODUCER_ID: (0, 5),
    _K.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    _K.ADD_PARTITIONS_TO_TXN: (0, 5),
    _K.ADD_OFFSETS_TO_TXN: (0, 4),
    _K.END_TXN: (0, 5),
    _K.WRITE_TXN_MARKERS: (1, 2),
    _K.TXN_OFFSET_COMMIT: (0, 6),
    _K.DESCRIBE_ACLS: (1, 3),
    _K.CREATE_ACLS: (1, 3),
    _K.DELETE_ACLS: (1, 3),
    _K.DESCRIBE_CONFIGS: (1, 4),
    _K.ALTER_CONFIGS: (0, 2),
    _K.ALTER_REPLICA_LOG_DIRS: (1, 2),
    _K.DESCRIBE_LOG_DIRS: (1, 5),
    _K.SASL_AUTHENTICATE: (0, 2),
    _K.CREATE_PARTITIONS: (0, 3),
    _K.CREATE_DELEGATION_TOKEN: (1, 3),
    _K.RENEW_DELEGATION_TOKEN: (1, 2),
    _K.EXPIRE_DELEGATION_TOKEN: (1, 2),
    _K.DESCRIBE_DELEGATION_TOKEN: (1, 3),
    _K.DELETE_GROUPS: (0, 3),
    _K.ELECT_LEADERS: (0, 2),
    _K.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    _K.ALTER_PARTITION_REASSIGNMENTS: (0, 1),
    _K.LIST_PARTITION_REASSIGNMENTS: (0, 0),
    _K.OFFSET_DELETE: (0, 0),
    _K.DESCRIBE_CLIENT_QUOTAS: (0, 1),
    _K.ALTER_CLIENT_QUOTAS: (0, 1),
    _K.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, 0),
    _K.ALTER_USER_SCRAM_CREDENTIALS: (0, 0),
    _K.DESCRIBE_QUORUM: (0, 2),
    _K.UPDATE_FEATURES: (0, 2),
    _K.DESCRIBE_CLUSTER: (0, 2),
    _K.DESCRIBE_PRODUCERS: (0, 0),
    _K.UNREGISTER_BROKER: (0, 0),
    _K.DESCRIBE_TRANSACTIONS: (0, 0),
    _K.LIST_TRANSACTIONS: (0, 2),
    _K.CONSUMER_GROUP_HEARTBEAT: (0, 1),
    _K.CONSUMER_GROUP_DESCRIBE: (0, 1),
    _K.LIST_CONFIG_RESOURCES: (0, 1),
    _K.DESCRIBE_TOPIC_PARTITIONS: (0, 0),
    _K.SHARE_GROUP_HEARTBEAT: (1, 1),
    _K.SHARE_GROUP_DESCRIBE: (1, 1),
    _K.SHARE_FETCH: (1, 2),
    _K.SHARE_ACKNOWLEDGE: (1, 2),
    _K.ADD_RAFT_VOTER: (0, 1),
    _K.REMOVE_RAFT_VOTER: (0, 0),
    _K.INITIALIZE_SHARE_GROUP_STATE: (0, 0),
    _K.READ_SHARE_GROUP_STATE: (0, 0),
    _K.WRITE_SHARE_GROUP_STATE: (0, 1),
    _K.DELETE_SHARE_GROUP_STATE: (0, 0),
    _K.READ_SHARE_GROUP_STATE_SUMMARY: (0, 1),
    _K.STREAMS_GROUP_HEARTBEAT: (0, 1),
    _K.STREAMS_GROUP_DESCRIBE: (0, 1),
    _K.DESCRIBE_SHARE_GROUP_OFFSETS: (0, 1),
    _K.ALTER_SHARE_GROUP_OFFSETS: (0, 0),
    _K.DELETE_SHARE_GROUP_OFFSETS: (0, 0),
    _K.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE: (0, 0),
    _K.UNREGISTER_CONTROLLER: (0, 0),
}


def our_versions() -> dict[int, tuple[int, int]]:
    """Return the oldest and the newest version of each API that mpbroker can serve."""
    return advertised_versions(served(has_receiver=True))


@click.command("api-table", short_help="Compare the APIs with Kafka's.")
@click.option("--different", is_flag=True, help="Only APIs that are not as in Kafka.")
@format_option
def command(different: bool, output_format: str) -> int:
    """List the versions of each API: here, and in Apache Kafka 4.4.0."""
    ours = our_versions()
    rows = []
    for number in sorted(ours.keys() | KAFKA_VERSIONS.keys()):
        key = ApiKey(number)
        here, kafkas = ours.get(key), KAFKA_VERSIONS.get(key)
        if not (different and here == kafkas):
            rows.append((number, key.name, here, kafkas))
    if output_format == "json":
        names = ("api_key", "name", "mpbroker", "kafka")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_table(
            ["API", "NAME", "MPBROKER", "KAFKA 4.4.0", ""],
            [
                [number, name, _shown(here), _shown(kafkas), _told(here, kafkas)]
                for number, name, here, kafkas in rows
            ],
        )
    return ExitCode.OK


def _shown(versions: tuple[int, int] | None) -> str | None:
    return None if versions is None else f"{versions[0]}-{versions[1]}"


def _told(here: tuple[int, int] | None, kafkas: tuple[int, int] | None) -> str:
    if here is None:
        return "not served"
    return "" if here == kafkas else "other versions"
