"""`mpbroker config`: list, explain, get, set and unset settings."""

from __future__ import annotations

from pathlib import Path

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.config_values import complete_key, get, set_, unset
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import format_option
from mpbroker.cli.output import print_json, print_table
from mpbroker.cli.serve import broker_environment
from mpbroker.config import BROKER_CONFIG_DEF, BrokerConfig, ConfigError, explain
from mpbroker.config.explanation import explain_topic_key
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF


def setting_names() -> list[str]:
    """Return the names of all broker settings, sorted."""
    return sorted(key.name for key in BROKER_CONFIG_DEF)


_config_file_option = click.option(
    "-c",
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="A file with settings, as for serve; the environment counts, too.",
)


@click.group("config", cls=CommandGroup)
def command() -> None:
    """List and explain settings; get, set and unset those of a running broker."""


for _each in (get, set_, unset):
    command.add_command(_each)


def _resolve(config_file: Path | None) -> BrokerConfig:
    return BrokerConfig.load({}, config_file, broker_environment())


@command.command("list", short_help="List settings, defaults and values.")
@click.option("--topic", is_flag=True, help="List settings of topics instead.")
@click.option("--changed", is_flag=True, help="Only settings that are set.")
@_config_file_option
@format_option
def list_settings(
    topic: bool, changed: bool, config_file: Path | None, output_format: str
) -> int:
    """List settings with type, default and, for a broker's, the value here."""
    config = _resolve(config_file)
    definition = LOG_CONFIG_DEF if topic else config.definition
    rows = []
    for name in sorted(key.name for key in definition):
        entry = explain_topic_key(name) if topic else explain(name, config)
        if changed and (entry.origin is None or entry.origin == "default"):
            continue
        rows.append(entry)
    if output_format == "json":
        print_json([row._asdict() for row in rows])
    else:
        print_table(
            ["SETTING", "TYPE", "DEFAULT", "VALUE", "UPDATE"],
            [
                [row.name, row.type, row.default, row.value, row.update_mode]
                for row in rows
            ],
        )
    return ExitCode.OK if rows or not changed else ExitCode.NOT_FOUND


@command.command("explain", short_help="Explain a setting.")
@click.argument("key", shell_complete=complete_key)
@_config_file_option
@format_option
def explain_setting(key: str, config_file: Path | None, output_format: str) -> None:
    """Show the meaning of KEY, its limits, its default and its value here."""
    try:
        explanation = explain(key, _resolve(config_file))
    except ConfigError as error:
        if key in BROKER_CONFIG_DEF or key in LOG_CONFIG_DEF:
            raise
        raise CliError(str(error), ExitCode.NOT_FOUND) from error
    if output_format == "json":
        print_json(explanation._asdict())
    else:
        click.echo(explanation.text())
