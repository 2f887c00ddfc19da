"""`mpbroker sql`: query topics and lake tables, through Spark."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import bootstrap_option, client_settings
from mpbroker.cli.output import print_table, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS: Final = 1000


@click.command("sql")
@click.argument("query")
@bootstrap_option
@click.option(
    "-t",
    "--table",
    "tables",
    multiple=True,
    metavar="NAME=PATH",
    help="A Delta or Iceberg table, or a directory of Parquet files: a path or a URI.",
)
@click.option(
    "-p",
    "--pipeline",
    "pipelines",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="A pipeline's file: its topic has the columns described there, NAME_table and"
    " NAME_dead_letters are its tables.",
)
@click.option(
    "--json", "form", flag_value="json", help="An object of JSON for each row."
)
@click.option("--csv", "form", flag_value="csv", help="CSV, with a line of names.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the rows: .png, .svg or .pdf. The first column is across; text makes"
    " bars, times and numbers lines. Needs matplotlib.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_ROWS,
    show_default=True,
    help="Rows at most.",
)
@click.option(
    "--master",
    metavar="URL",
    default="local[*]",
    show_default=True,
    help="Spark's master.",
)
def command(
    query: str,
    bootstrap: str,
    tables: tuple[str, ...],
    pipelines: tuple[str, ...],
    form: str | None,
    plot: Path | None,
    limit: int,
    master: str,
) -> None:
    """Query topics and lake tables with SQL.

    \b
        mpbroker sql 'select carrier, avg(dep_delay) from flights group by 1'
        mpbroker sql 'select key, value, offset from `a-topic` order by offset desc'
        mpbroker sql 'select count(*) from `/lake/flights`'

    A name is a topic, unless --table or --pipeline gives it, or it is a path; put
    backticks around names with other characters than letters, digits and _. Fields of
    JSON values are columns; further ones are key, value, partition, offset, timestamp
    and headers.

    Needs `pip install mpbroker-server[spark]` and Java 17 or newer. Exit code 2: the
    SQL is wrong; 10: no such topic or table.
    """
    paths = dict(_named(each) for each in tables)
    if plot is not None:
        _check_plot(plot)
    found = _run(query, bootstrap, paths, pipelines, master, limit)
    cut = found.num_rows > limit  # _run() has asked for one row more
    found = found.slice(0, limit)
    columns = [column.to_pylist() for column in found.columns]
    rows: Sequence[tuple[Any, ...]] = list(zip(*columns, strict=True))
    if plot is not None:
        draw(found.column_names, rows, plot)
    if form == "json":
        for row in rows:
            named = dict(zip(found.column_names, row, strict=True))
            write_bytes(orjson.dumps(named, default=_plain) + b"\n")
    elif form == "csv":
        write_bytes(_csv(found.column_names, rows))
    elif plot is None:
        shown = (
            [None if cell is None else _text(cell) for cell in row] for row in rows
        )
        print_table(found.column_names, shown)
    if cut:
        click.echo(f"only the first {limit:,} rows: --limit gives more", err=True)


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise click.BadParameter(f"--table {text!r} is not NAME=PATH")
    return name, path


def _run(
    query: str,
    bootstrap: str,
    tables: Mapping[str, str],
    pipelines: Sequence[str],
    master: str,
    limit: int,
) -> pa.Table:
    """Run a query with Spark; return at most ``limit`` + 1 rows."""
    try:
        from mpbroker.spark import session, sql
        from mpbroker.spark.pipeline.errors import DescriptionError
        from mpbroker.spark.quiet import errors_not_logged, quiet_start
        from mpbroker.spark.sql_query import (
            QueryError,
            UnknownTableError,
            patiently,
            reason,
        )
    except ImportError as error:
        raise CliError(
            f"queries need Spark ({error}): pip install 'mpbroker-server[spark]'",
            ExitCode.UNAVAILABLE,
        ) from None
    with quiet_start():
        spark = session("mpbroker sql", master=master, config=_settings())
    spark.sparkContext.setLogLevel("OFF")
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    given = client_settings(bootstrap)
    options = {f"kafka.{name}": str(value) for name, value in given.items()}
    try:
        # So few tasks that none is empty; Spark's default is 200.
        cores = max(1, spark.sparkContext.defaultParallelism)
        spark.conf.set("spark.sql.shuffle.partitions", str(cores))

        def ask() -> pa.Table:
            rows = sql(
                query,
                bootstrap=bootstrap,
                tables=tables,
                pipelines=pipelines,
                options=options,
                spark=spark,
            )
            return rows.limit(limit + 1).toArrow()

        with errors_not_logged():
            return patiently(ask)
    except UnknownTableError as error:
        raise CliError(str(error), ExitCode.NOT_FOUND) from error
    except QueryError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    except DescriptionError as error:
        raise CliError(str(error), ExitCode.CONFIG) from error
    except (PySparkException, Py4JError) as error:
        raise CliError(f"the query failed: {reason(error)}") from error
    finally:
        spark.stop()


def _settings() -> dict[str, str]:
    # By default Spark uses spark-warehouse in the current directory, and may make it.
    return {"spark.sql.warehouse.dir": "/nonexistent/mpbroker-sql"}


def _plain(value: object) -> object:
    """Return a value of Spark that JSON has no type for, as a string or a number."""
    if isinstance(value, bytes):
        return _of_bytes(value)
    if isinstance(value, decimal.Decimal):
        return float(value)
    return str(value)


def _of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def _text(value: object) -> str:
    if isinstance(value, float):
        # Six digits are enough for a table; --json and --csv have all.
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}"
    if isinstance(value, bytes):
        return _of_bytes(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ").removesuffix("+00:00")
    if isinstance(value, (dict, list)):
        return orjson.dumps(value, default=_plain, option=_ANY_KEY).decode()
    return str(value).replace("\n", "\\n")


_ANY_KEY: Final = orjson.OPT_NON_STR_KEYS


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(
            "" if cell is None else cell if isinstance(cell, float) else _text(cell)
            for cell in row
        )
    return out.getvalue().encode()


# -- pictures --------------------------------------------------------------------------


def _check_plot(path: Path) -> None:
    """Raise CliError before Spark is started if no picture can be drawn."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise CliError(
            f"--plot {path}: give a file that ends in .png, .svg or .pdf",
            ExitCode.USAGE,
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CliError(
            f"--plot needs matplotlib ({error}): pip install 'mpbroker-server[plot]'",
            ExitCode.UNAVAILABLE,
        ) from None


def draw(names: Sequence[str], rows: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw rows: lines over a column of times or numbers, bars over one of text.

    The first column is the horizontal axis. Each other column of numbers is a line or a
    group of bars; another column of text divides it into one for each of its values.

    Args:
        names: the names of the columns.
        rows: the cells of each row.
        path: the file of the picture; its suffix names the format.

    Raises:
        CliError: there are no rows, or no numbers in another column than the first.
    """
    series = _series(names, rows)
    if not any(series.values()):
        raise CliError("--plot: the query has no rows", ExitCode.NOT_FOUND)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    if isinstance(across[0], str):
        width = 0.8 / len(series)
        places = {x: at for at, x in enumerate(across)}
        for number, (name, points) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            axes.bar(
                [places[x] + shift for x, _ in points],
                [y for _, y in points],
                width,
                label=name,
            )
        axes.set_xticks(range(len(across)), across)
        if sum(map(len, across)) > 80:
            axes.tick_params(axis="x", rotation=90)
    else:
        for name, points in series.items():
            points = sorted(points)
            marker = "o" if len(points) < 40 else None
            axes.plot(*zip(*points, strict=True), label=name, marker=marker, ms=3)
    axes.set_xlabel(names[0])
    if len(series) == 1:
        axes.set_ylabel(next(iter(series)))
    else:
        axes.legend()
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _series(
    names: Sequence[str], rows: Sequence[Sequence[Any]]
) -> dict[str, list[tuple[Any, float]]]:
    """Return the points (x, y) of each line or group of bars, by its name."""

    def is_number(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] is not None]
        kinds = (int, float, decimal.Decimal)
        return all(isinstance(c, kinds) and not isinstance(c, bool) for c in cells)

    drawn = [column for column in range(1, len(names)) if is_number(column)]
    if rows and not drawn:
        raise CliError(
            "--plot: no column after the first one has numbers: what is across comes"
            " first, then what is drawn",
            ExitCode.USAGE,
        )
    by = next((column for column in range(1, len(names)) if column not in drawn), None)
    found: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        x = row[0]
        if not isinstance(x, (int, float, decimal.Decimal, datetime.date)):
            x = "-" if x is None else _text(x)
        for column in drawn:
            if row[column] is None:
                continue
            name = names[column]
            if by is not None:
                value = "-" if row[by] is None else _text(row[by])
                name = value if len(drawn) == 1 else f"{value} {name}"
            found.setdefault(name, []).append((x, float(row[column])))
    return found
