"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.serve import BOOTSTRAP_VARIABLE

if TYPE_CHECKING:
    from mpbroker.base.config_def import ConfigDef
    from mpbroker.client.cluster import Cluster

DEFAULT_BOOTSTRAP: Final = "localhost:9092"

format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="text for people (default), json for programs.",
)


def default_bootstrap() -> str:
    """Return the brokers to connect to: of -X or -F, the environment, or the default.

    click calls this for a command line without -b, after it has read the other options.
    """
    return (
        _given().get(_BOOTSTRAP)
        or os.environ.get(BOOTSTRAP_VARIABLE)
        or DEFAULT_BOOTSTRAP
    )


class Seconds(click.FloatRange):
    """A click type for seconds in a range; unlike click's own, it refuses nan."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return found


_Command = TypeVar("_Command", bound=Callable[..., Any])
_SETTINGS: Final = "mpbroker.client_settings"  # in a click context's meta
_BOOTSTRAP: Final = "bootstrap.servers"


def _given() -> dict[str, str]:
    """Return the client settings of -X and -F that click has read so far."""
    context = click.get_current_context(silent=True)
    found: dict[str, str] = context.meta.get(_SETTINGS, {}) if context else {}
    return found


def _note_settings(
    ctx: click.Context, param: click.Parameter, items: tuple[str, ...]
) -> None:
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{item!r} is not KEY=VALUE")
        ctx.meta.setdefault(_SETTINGS, {})[name.strip()] = value


def _note_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    from mpbroker.config.sources import settings_of_file

    # -X overrides -F, and may have been read first.
    given = ctx.meta.get(_SETTINGS, {})
    read = {setting.name: setting.text for setting in settings_of_file(path)}
    ctx.meta[_SETTINGS] = {**read, **given}


def client_settings(bootstrap: str) -> dict[str, object]:
    """Return the client settings that -b, -F and -X give; ``bootstrap`` is from -b."""
    return {**_given(), _BOOTSTRAP: bootstrap}


def open_cluster(
    bootstrap: str,
    timeout_s: float,
    definition: ConfigDef | None = None,
    given: Mapping[str, str] | None = None,
) -> Cluster:
    """Return a client of the brokers that the command line names, not connected yet.

    Args:
        bootstrap: the value of -b.
        timeout_s: how long to wait for each connection and each response.
        definition: the settings that -F and -X may give; None: those of any client.
        given: client settings to use instead of those of -F and -X; None: use those.

    Raises:
        CliError: with exit code 2; a setting or an address cannot be used.
    """
    from mpbroker.base.config_def import ConfigError
    from mpbroker.client.cluster import Cluster
    from mpbroker.client.errors import AddressError
    from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings

    try:
        texts = client_settings(bootstrap)
        if given is not None:
            texts = {**given, _BOOTSTRAP: bootstrap}
        values = parse_settings(definition or ADMIN_CONFIG, texts)
        settings = ClientSettings.of(values, max_in_flight=1)
    except (ConfigError, AddressError) as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    return Cluster(settings.bootstrap, timeout_s, settings)


def bootstrap_option(command: _Command) -> _Command:
    """Add the options -b, -X and -F to a command; see `open_cluster`."""
    for option in (_file_option, _settings_option, _bootstrap_option):
        command = option(command)
    return command


_settings_option = click.option(
    "-X",
    "--client-setting",
    multiple=True,
    metavar="KEY=VALUE",
    expose_value=False,
    callback=_note_settings,
    help="A client setting of Kafka, such as security.protocol=SSL; may be repeated.",
)
_file_option = click.option(
    "-F",
    "--command-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    expose_value=False,
    callback=_note_file,
    help="A file of client settings, one KEY=VALUE a line. Put passwords there: other"
    " users can see a command line.",
)
_bootstrap_option = click.option(
    "-b",
    "--bootstrap",
    "--bootstrap-server",
    "--broker",
    "bootstrap",
    metavar="HOST:PORT[,...]",
    default=default_bootstrap,
    show_default=f"bootstrap.servers of -X or -F, {BOOTSTRAP_VARIABLE}, or"
    f" {DEFAULT_BOOTSTRAP}",
    help="Brokers to connect to first.",
)

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0.1, max=86400),
    default=10.0,
    show_default=True,
    help="Seconds to wait for a connection or an answer.",
)


def complete_topic(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Complete a topic's name; ask the broker that the command line names so far."""
    from mpbroker.base.errors import MpbrokerError

    bootstrap = ctx.params.get("bootstrap") or default_bootstrap()
    try:
        # A shell waits for the answer, so it must be quick or empty.
        with ctx, open_cluster(bootstrap, timeout_s=1.0) as cluster:
            topics = cluster.metadata(None).topics
    except MpbrokerError:
        return []
    names = [topic.name or "" for topic in topics]
    return sorted(name for name in names if name.startswith(text))


def complete_group(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Complete a group's id; ask the broker that the command line names so far."""
    from mpbroker.base.errors import MpbrokerError
    from mpbroker.client.admin.group_admin import list_groups

    bootstrap = ctx.params.get("bootstrap") or default_bootstrap()
    try:
        with ctx, open_cluster(bootstrap, timeout_s=1.0) as cluster:
            names = [group.group_id for group in list_groups(cluster)]
    except MpbrokerError:
        return []
    return [name for name in names if name.startswith(text)]
