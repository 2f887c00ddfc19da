"""Options that several commands share, so that they are spelled alike everywhere."""

from __future__ import annotations

import os
from typing import Final

import click

from mpbroker.cli.serve import BOOTSTRAP_VARIABLE

DEFAULT_BOOTSTRAP: Final = "localhost:9092"

format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="text for people (default), json for programs.",
)


def default_bootstrap() -> str:
    """Return MPBROKER_BOOTSTRAP, or localhost:9092 where it is unset or empty."""
    return os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP


bootstrap_option = click.option(
    "-b",
    "--bootstrap",
    "--bootstrap-server",
    "--broker",
    "bootstrap",
    metavar="HOST:PORT[,...]",
    default=default_bootstrap,
    show_default=f"{BOOTSTRAP_VARIABLE}, or {DEFAULT_BOOTSTRAP}",
    help="Brokers to ask first.",
)

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1, max=86400),
    default=10.0,
    show_default=True,
    help="Seconds to wait for a connection or an answer.",
)


def complete_topic(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Offer the topics of the broker that the command line so far names."""
    from mpbroker.client.addresses import parse_addresses
    from mpbroker.client.cluster import Cluster
    from mpbroker.errors import MpbrokerError

    bootstrap = ctx.params.get("bootstrap") or default_bootstrap()
    try:
        # A shell waits for this: better no proposals than slow ones.
        with Cluster(parse_addresses(bootstrap), timeout_s=1.0) as cluster:
            topics = cluster.metadata(None).topics
    except MpbrokerError:
        return []
    names = [topic.name or "" for topic in topics]
    return sorted(name for name in names if name.startswith(text))


def complete_group(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Offer the consumer groups of that broker."""
    from mpbroker.client.addresses import parse_addresses
    from mpbroker.client.cluster import Cluster
    from mpbroker.client.group_admin import list_groups
    from mpbroker.errors import MpbrokerError

    bootstrap = ctx.params.get("bootstrap") or default_bootstrap()
    try:
        with Cluster(parse_addresses(bootstrap), timeout_s=1.0) as cluster:
            names = [group.group_id for group in list_groups(cluster)]
    except MpbrokerError:
        return []
    return [name for name in names if name.startswith(text)]
