"""`mpbroker config get`, `set` and `unset`: dynamic configs of a running broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    complete_topic,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json, print_table
from mpbroker.client.admin import config_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster
from mpbroker.protocol.messages.describe_configs import DescribeConfigsResourceResult

_SOURCES: Final = {
    1: "topic",
    2: "broker (dynamic)",
    3: "all brokers (dynamic)",
    4: "broker (static)",
    5: "default",
    6: "logger",
    7: "client metrics",
    8: "group",
}
_DEFAULT: Final = 5


def complete_key(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Complete the name of a topic's setting, or without --topic also a broker's."""
    from mpbroker.config import BROKER_CONFIG_DEF
    from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF

    names = {key.name for key in LOG_CONFIG_DEF}
    if not ctx.params.get("topic"):
        names |= {key.name for key in BROKER_CONFIG_DEF}
    return sorted(name for name in names if name.startswith(text))


def _complete_change(
    ctx: click.Context, param: click.Parameter, text: str
) -> list[str]:
    return [f"{name}=" for name in complete_key(ctx, param, text)]


class _Choice(NamedTuple):
    """The options that name a config resource; none of them means the broker itself."""

    topic: str | None
    group: str | None
    client_metrics: str | None
    all_brokers: bool
    loggers: bool

    def check(self) -> None:
        """Raise CliError if more than one resource is named."""
        named = (self.topic, self.group, self.client_metrics)
        chosen = sum(name is not None for name in named)
        if chosen + self.all_brokers + self.loggers > 1:
            raise CliError(
                "--topic, --group, --client-metrics, --all-brokers and --loggers"
                " exclude one another",
                ExitCode.USAGE,
            )

    def resource(self, cluster: Cluster) -> ConfigResource:
        """Return the named config resource; ask the cluster for the broker's id."""
        if self.topic is not None:
            return ConfigResource(ConfigResourceType.TOPIC, self.topic)
        if self.group is not None:
            return ConfigResource(ConfigResourceType.GROUP, self.group)
        if self.client_metrics is not None:
            return ConfigResource(
                ConfigResourceType.CLIENT_METRICS, self.client_metrics
            )
        if self.all_brokers:
            return ConfigResource(ConfigResourceType.BROKER, "")
        kind = (
            ConfigResourceType.BROKER_LOGGER
            if self.loggers
            else ConfigResourceType.BROKER
        )
        return ConfigResource(kind, str(cluster.metadata([]).controller_id))


def _resource_options(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a resource to a command, and pass it a ``choice``."""

    @click.option(
        "--topic", metavar="NAME", help="Of a topic.", shell_complete=complete_topic
    )
    @click.option("--group", metavar="ID", help="Of a consumer group.")
    @click.option(
        "--client-metrics",
        metavar="NAME",
        help="Of a subscription to clients' metrics.",
    )
    @click.option("--all-brokers", is_flag=True, help="Of all brokers together.")
    @click.option("--loggers", is_flag=True, help="Levels of the broker's loggers.")
    @wraps(run)
    def with_choice(**options: Any) -> Any:
        choice = _Choice(**{name: options.pop(name) for name in _Choice._fields})
        choice.check()
        return run(choice=choice, **options)

    return with_choice


@click.command("get", short_help="Show settings of a running broker.")
@click.argument("keys", nargs=-1, metavar="[KEY...]", shell_complete=complete_key)
@_resource_options
@click.option(
    "--all", "everything", is_flag=True, help="Also settings that have their default."
)
@bootstrap_option
@timeout_option
@format_option
def get(
    keys: Sequence[str],
    choice: _Choice,
    everything: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> int:
    """Show value and source of the settings of a running broker, a topic or a group.

    Settings that have their default are left out unless you name them or say --all.
    Passwords are hidden.
    """
    with open_cluster(bootstrap, timeout_s) as cluster:
        resource = choice.resource(cluster)
        found = config_admin.describe_configs(cluster, resource, keys)
    if not choice.all_brokers:  # these have only settings that are set
        _refuse_missing(resource, keys, found)
    shown = sorted(
        (
            each
            for each in found
            if keys or everything or each.config_source != _DEFAULT
        ),
        key=lambda each: each.name,
    )
    if output_format == "json":
        print_json(list(map(_as_json, shown)))
    else:
        print_table(["SETTING", "VALUE", "SOURCE"], map(_as_row, shown))
    return ExitCode.OK


def _as_json(found: DescribeConfigsResourceResult) -> dict[str, object]:
    return {
        "name": found.name,
        "value": found.value,
        "source": _SOURCES.get(found.config_source, "?"),
        "read_only": found.read_only,
        "sensitive": found.is_sensitive,
    }


def _as_row(found: DescribeConfigsResourceResult) -> list[str]:
    value = "[hidden]" if found.is_sensitive else found.value or ""
    return [found.name, value, _SOURCES.get(found.config_source, "?")]


@click.command("set", short_help="Set configs of a running broker.")
@click.argument(
    "changes",
    nargs=-1,
    required=True,
    metavar="KEY=VALUE...",
    shell_complete=_complete_change,
)
@_resource_options
@bootstrap_option
@timeout_option
@format_option
def set_(
    changes: Sequence[str],
    choice: _Choice,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Set configs of a running broker, a topic or a group: all of them or none.

    With --loggers, KEY is a logger, or root for all loggers, and VALUE is the lowest
    level that it logs: TRACE, DEBUG, INFO, WARN, ERROR or FATAL. It counts until the
    broker is started again.

    With --client-metrics, KEY is metrics (prefixes of names, or *), interval.ms or
    match (NAME=PATTERN,... with names such as client_id or client_software_name).
    """
    put = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key and equals):
            # Without the text, which may be a password.
            raise CliError("a change is KEY=VALUE", ExitCode.USAGE)
        put[key] = value
    with open_cluster(bootstrap, timeout_s) as cluster:
        resource = choice.resource(cluster)
        config_admin.alter_configs(cluster, resource, put)
    _done(resource, "set", put, output_format)


@click.command("unset", short_help="Remove configs of a running broker.")
@click.argument(
    "keys", nargs=-1, required=True, metavar="KEY...", shell_complete=complete_key
)
@_resource_options
@bootstrap_option
@timeout_option
@format_option
def unset(
    keys: Sequence[str],
    choice: _Choice,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Remove configs, so that the static value or the default counts again.

    A config that is not set is accepted. Exits with 10, and changes nothing, if there
    is no such setting.
    """
    with open_cluster(bootstrap, timeout_s) as cluster:
        resource = choice.resource(cluster)
        refuse_unknown(cluster, resource, keys)
        # dict.fromkeys: a key that is named twice is sent once.
        config_admin.alter_configs(cluster, resource, {}, dict.fromkeys(keys))
    _done(resource, "unset", keys, output_format)


def refuse_unknown(
    cluster: Cluster, resource: ConfigResource, keys: Sequence[str]
) -> None:
    """Check that settings exist, since a broker accepts the removal of unknown ones.

    Raises:
        CliError: with exit code 10; the text names the settings that do not exist.
    """
    found = config_admin.describe_configs(cluster, resource, keys)
    if resource == (ConfigResourceType.BROKER, ""):  # it has only settings that are set
        one = ConfigResource(
            ConfigResourceType.BROKER, str(cluster.metadata([]).controller_id)
        )
        found += config_admin.describe_configs(cluster, one, keys)
    _refuse_missing(resource, keys, found)


def _refuse_missing(
    resource: ConfigResource,
    keys: Iterable[str],
    found: Iterable[DescribeConfigsResourceResult],
) -> None:
    missing = set(keys) - {each.name for each in found}
    if missing:
        told = ", ".join(sorted(missing))
        raise CliError(f"{resource} has no setting {told}", ExitCode.NOT_FOUND)


def _done(
    resource: ConfigResource, what: str, keys: Iterable[str], output_format: str
) -> None:
    if output_format == "json":
        print_json({what: list(keys), "of": str(resource)})
    else:
        print(f"{resource}: {what} {', '.join(keys)}")
