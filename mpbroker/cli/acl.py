"""`mpbroker acl`: add, list, remove."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Final, TypeVar

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json, print_table
from mpbroker.client.admin import acl_admin
from mpbroker.client.cluster import Cluster
from mpbroker.protocol.acl import (
    CLUSTER_NAME,
    OPERATIONS,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_ADD_HELP = """\
Allow or deny principals to use resources.

\b
  mpbroker acl add --allow User:alice --operation read --topic events
  mpbroker acl add --allow User:alice -o write -o describe --topic app- --prefix
  mpbroker acl add --deny User:bob --host 10.0.0.7 -o all --group '*'
  mpbroker acl add --allow User:alice --producer --topic events
  mpbroker acl add --allow User:alice --consumer --topic events --group g

An entry that denies counts before entries that allow. '*' is every topic, group or
transactional id; User:* is every user.
"""

_PRODUCER: Final = (
    AclOperation.WRITE,
    AclOperation.DESCRIBE,
    AclOperation.CREATE,
)
_OPERATION_NAMES: Final = tuple(
    operation.name.lower().replace("_", "-")
    for operation in AclOperation
    if operation > AclOperation.ANY
)

_Command = TypeVar("_Command", bound=Callable[..., Any])

# The resource type of each option's names.
_KINDS: Final = {
    "topics": ResourceType.TOPIC,
    "groups": ResourceType.GROUP,
    "transactional_ids": ResourceType.TRANSACTIONAL_ID,
    "users": ResourceType.USER,
}


@contextmanager
def _authorizer(bootstrap: str, timeout_s: float) -> Iterator[Cluster]:
    """Return a client of brokers that keep ACLs.

    Raises:
        CliError: they have no authorizer; the text says how to get one.
    """
    with open_cluster(bootstrap, timeout_s) as cluster:
        try:
            yield cluster
        except ApiError as error:
            if error.error_code is not ErrorCode.SECURITY_DISABLED:
                raise
            raise CliError(
                f"{error} ACLs need one: set authorizer.class.name of the broker"
            ) from error


@click.group("acl", cls=CommandGroup)
def command() -> None:
    """Add, list and remove the ACLs of a broker that has an authorizer."""


def _resource_options(command: _Command) -> _Command:
    for option in (
        click.option("--prefix", is_flag=True, help="The names are prefixes of names."),
        click.option(
            "--user",
            "users",
            multiple=True,
            metavar="NAME",
            help="A user: the entry is about that user's delegation tokens.",
        ),
        click.option("--cluster", is_flag=True, help="The broker itself."),
        click.option(
            "--transactional-id",
            "transactional_ids",
            multiple=True,
            metavar="NAME",
            help="A transactional id of producers.",
        ),
        click.option(
            "-g",
            "--group",
            "groups",
            multiple=True,
            metavar="NAME",
            help="A consumer group.",
        ),
        click.option(
            "-t",
            "--topic",
            "topics",
            multiple=True,
            metavar="NAME",
            help="A topic; may be repeated, as may the others.",
        ),
    ):
        command = option(command)
    return command


_operation_option = click.option(
    "-o",
    "--operation",
    "operations",
    multiple=True,
    type=click.Choice(_OPERATION_NAMES, case_sensitive=False),
    metavar="OPERATION",
    help="read, write, describe, ..., or all; may be repeated.",
)


def _operation(name: str) -> AclOperation:
    return AclOperation[name.upper().replace("-", "_")]


def _resources(options: dict[str, Any]) -> list[tuple[ResourceType, str]]:
    found = [(kind, name) for key, kind in _KINDS.items() for name in options[key]]
    if options["cluster"]:
        found.append((ResourceType.CLUSTER, CLUSTER_NAME))
    return found


@command.command("add", help=_ADD_HELP)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="PRINCIPAL",
    help="A principal that is allowed, as User:NAME; may be repeated.",
)
@click.option(
    "--deny",
    "denied",
    multiple=True,
    metavar="PRINCIPAL",
    help="A principal that is denied; may be repeated.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="ADDRESS",
    help="Only from this address or network (10.0.0.0/8); may be repeated.",
)
@_operation_option
@click.option(
    "--producer",
    is_flag=True,
    help="All that a producer to the topics needs, with its transactional ids.",
)
@click.option(
    "--consumer",
    is_flag=True,
    help="All that a consumer of the topics needs, with its groups.",
)
@_resource_options
@bootstrap_option
@timeout_option
@format_option
def add(
    allowed: Sequence[str],
    denied: Sequence[str],
    hosts: Sequence[str],
    operations: Sequence[str],
    producer: bool,
    consumer: bool,
    prefix: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
    **resources: Any,
) -> None:
    if not allowed and not denied:
        raise click.UsageError("give --allow or --deny, with a principal")
    wanted = _resources(resources)
    if not wanted:
        raise click.UsageError("give --topic, --group, --transactional-id or --cluster")
    pairs = _pairs(wanted, [_operation(name) for name in operations])
    if producer or consumer:
        pairs += _roles(wanted, producer=producer, consumer=consumer)
    if not pairs:
        raise click.UsageError("give --operation, --producer or --consumer")
    who = [(name, AclPermissionType.ALLOW) for name in allowed]
    who += [(name, AclPermissionType.DENY) for name in denied]
    acls = [
        AclBinding(
            kind,
            name,
            PatternType.PREFIXED
            if prefix and kind is not ResourceType.CLUSTER
            else PatternType.LITERAL,
            principal,
            host,
            operation,
            permission,
        )
        for (principal, permission), host, (kind, name, operation) in product(
            who, hosts or ("*",), dict.fromkeys(pairs)
        )
    ]
    with _authorizer(bootstrap, timeout_s) as cluster:
        acl_admin.create_acls(cluster, acls)
    if output_format == "json":
        _show(acls, output_format)
    else:
        print(f"{_count(acls)} added")


_Pair = tuple[ResourceType, str, AclOperation]


def _pairs(
    resources: Sequence[tuple[ResourceType, str]], operations: Sequence[AclOperation]
) -> list[_Pair]:
    for (kind, _), operation in product(resources, operations):
        if operation is not AclOperation.ALL and operation not in OPERATIONS[kind]:
            raise click.UsageError(
                f"a {kind.name.lower().replace('_', ' ')} has no operation"
                f" {operation.name.lower().replace('_', '-')}; it has all,"
                f" {', '.join(each.name.lower() for each in OPERATIONS[kind])}"
            )
    return [
        (kind, name, operation)
        for (kind, name), operation in product(resources, operations)
    ]


def _roles(
    resources: Sequence[tuple[ResourceType, str]], *, producer: bool, consumer: bool
) -> list[_Pair]:
    """Return the ACL entries that --producer and --consumer add, as in kafka-acls.

    Each is a resource type, a resource name and an operation.

    Raises:
        click.UsageError: the options lack a --topic, or --consumer lacks a --group.
    """
    kinds = {kind for kind, _ in resources}
    if ResourceType.TOPIC not in kinds:
        raise click.UsageError("--producer and --consumer need a --topic")
    if consumer and ResourceType.GROUP not in kinds:
        raise click.UsageError("--consumer needs a --group")
    pairs: list[_Pair] = []
    for kind, name in resources:
        if kind is ResourceType.TOPIC:
            if producer:
                pairs += [(kind, name, operation) for operation in _PRODUCER]
            if consumer:
                pairs += [
                    (kind, name, AclOperation.READ),
                    (kind, name, AclOperation.DESCRIBE),
                ]
        elif kind is ResourceType.GROUP and consumer:
            pairs.append((kind, name, AclOperation.READ))
        elif kind is ResourceType.TRANSACTIONAL_ID and producer:
            pairs += [
                (kind, name, AclOperation.WRITE),
                (kind, name, AclOperation.DESCRIBE),
            ]
    return pairs


def _count(acls: Sequence[AclBinding]) -> str:
    return f"{len(acls)} entr{'y' if len(acls) == 1 else 'ies'}"


# -- list and remove ------------------------------------------------------------------


def _filter_options(command: _Command) -> _Command:
    for option in (
        _operation_option,
        click.option("--host", metavar="ADDRESS", help="Only entries for this host."),
        click.option(
            "--principal", metavar="PRINCIPAL", help="Only entries for this principal."
        ),
        click.option(
            "--match",
            is_flag=True,
            help="All entries that apply to the names, also by a prefix or by '*'.",
        ),
    ):
        command = option(command)
    return _resource_options(command)


def _filters(
    options: dict[str, Any],
    operations: Sequence[str],
    principal: str | None,
    host: str | None,
    *,
    prefix: bool,
    match: bool,
) -> list[AclFilter]:
    if prefix and match:
        raise click.UsageError("give --prefix or --match")
    pattern = PatternType.LITERAL
    if match:
        pattern = PatternType.MATCH
    elif prefix:
        pattern = PatternType.PREFIXED
    resources: list[tuple[ResourceType, str | None]] = list(_resources(options))
    if not resources:
        resources.append((ResourceType.ANY, None))
        pattern = PatternType.PREFIXED if prefix else PatternType.ANY
    asked = [_operation(name) for name in operations] or [AclOperation.ANY]
    return [
        AclFilter(kind, name, pattern, principal, host, operation)
        for (kind, name), operation in product(resources, asked)
    ]


@command.command("list")
@_filter_options
@bootstrap_option
@timeout_option
@format_option
def list_acls(
    operations: Sequence[str],
    principal: str | None,
    host: str | None,
    prefix: bool,
    match: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
    **resources: Any,
) -> None:
    """List all entries, or those that the options choose."""
    filters = _filters(
        resources, operations, principal, host, prefix=prefix, match=match
    )
    with _authorizer(bootstrap, timeout_s) as cluster:
        found = dict.fromkeys(
            acl
            for wanted in filters
            for acl in acl_admin.describe_acls(cluster, wanted)
        )
    _show(sorted(found), output_format)


@command.command("remove")
@_filter_options
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
@bootstrap_option
@timeout_option
@format_option
def remove(
    operations: Sequence[str],
    principal: str | None,
    host: str | None,
    prefix: bool,
    match: bool,
    everything: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
    **resources: Any,
) -> None:
    """Remove entries, and show them."""
    filters = _filters(
        resources, operations, principal, host, prefix=prefix, match=match
    )
    (first, *_) = filters
    if everything != (first == AclFilter()):
        raise click.UsageError("choose entries, or give --all")
    gone: dict[AclBinding, None] = {}
    with _authorizer(bootstrap, timeout_s) as cluster:
        for wanted in filters:
            gone.update(dict.fromkeys(acl_admin.delete_acls(cluster, wanted)))
    if not gone:
        raise CliError("there is no such entry", ExitCode.NOT_FOUND)
    _show(sorted(gone), output_format)


def _show(acls: Sequence[AclBinding], output_format: str) -> None:
    def words(acl: AclBinding) -> dict[str, str]:
        return {
            "resource": acl.resource_type.name.lower(),
            "name": acl.resource_name,
            "pattern": acl.pattern_type.name.lower(),
            "principal": acl.principal,
            "host": acl.host,
            "operation": acl.operation.name.lower(),
            "permission": acl.permission_type.name.lower(),
        }

    rows = [words(acl) for acl in acls]
    if output_format == "json":
        print_json(rows)
        return
    headings = [
        "RESOURCE",
        "NAME",
        "PATTERN",
        "PRINCIPAL",
        "HOST",
        "OPERATION",
        "PERMISSION",
    ]
    print_table(headings, [list(row.values()) for row in rows])
