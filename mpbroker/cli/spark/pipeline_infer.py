"""`mpbroker pipeline infer`: print a pipeline's file from a sample of a topic."""

from __future__ import annotations

import re
import sys

import click

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    client_settings,
    complete_topic,
    open_cluster,
    timeout_option,
)

_SECRET = re.compile("password|secret|jaas")


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@bootstrap_option
@click.option(
    "--rows",
    type=click.IntRange(min=2),
    default=10_000,
    show_default=True,
    help="The size of the sample: half of it the oldest records, half the newest.",
)
@click.option(
    "--lake",
    default="lake",
    show_default=True,
    metavar="DIRECTORY",
    help="Where tables and the checkpoint are to be: a directory or a URI.",
)
@click.option(
    "--registry",
    default="",
    metavar="URL",
    help="The schema registry that describes the values.",
)
@timeout_option
def infer(
    topic: str, bootstrap: str, rows: int, lake: str, registry: str, timeout_s: float
) -> None:
    """Print a pipeline's file for TOPIC from a sample.

    What the sample shows is on standard error: fields, types, nulls and examples.

    \b
      mpbroker pipeline infer flights > flights.toml
      mpbroker pipeline run flights.toml
    """
    try:
        from mpbroker.spark.pipeline import infer as inference
        from mpbroker.spark.pipeline.schemas.sample import read_sample
    except ImportError as error:
        raise CliError(
            f"pipelines need Spark ({error}): pip install 'mpbroker-server[spark]'",
            ExitCode.UNAVAILABLE,
        ) from None
    settings = client_settings(bootstrap)
    with open_cluster(bootstrap, timeout_s) as cluster:
        sample = read_sample(cluster, settings, topic, rows)
    if not sample.values:
        raise CliError(f"topic {topic} has no records", ExitCode.NOT_FOUND)
    if registry:
        found = inference.infer_registered(sample, registry)
    else:
        found = inference.infer(sample)
    for line in inference.picture(found):
        print(line, file=sys.stderr)
    if not registry and _framed(sample.values):
        print(
            "The values begin as those of a schema registry do: --registry URL reads"
            " them.",
            file=sys.stderr,
        )
    source: dict[str, object] = {"bootstrap": bootstrap}
    for name, value in settings.items():
        key = name.replace("_", ".")
        if key != "bootstrap.servers":
            source[f"kafka.{key}"] = value
        if _SECRET.search(key):
            print(f"The file has {key}: keep it from others.", file=sys.stderr)
    print(inference.toml(found, source, lake.rstrip("/")), end="")


def _framed(values: list[bytes | None]) -> bool:
    some = [each for each in values if each is not None]
    return bool(some) and all(len(each) > 5 and not each[0] for each in some)
