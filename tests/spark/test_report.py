"""A request log becomes a page that needs nothing else, and a table."""

from __future__ import annotations

import gzip
import io
import json
import re
from tempfile import NamedTemporaryFile

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.report import log_files, publish
from mpbroker.spark.pipeline.report_findings import Findings, examine
from mpbroker.spark.pipeline.report_page import page
from mpbroker.spark.pipeline.report_plots import bars, lines
from mpbroker.spark.pipeline.run import preview, run_file

pytestmark = pytest.mark.timeout(900)

BEGIN_S = 1_700_000_000
MS = 1_000_000


def request(number, api="Produce", total_ms=1.0, waited_ms=0.0, **more):
    """A line as the broker writes it."""
    received = number * MS
    parked = received + int((total_ms - waited_ms) * MS)
    completed = parked + int(waited_ms * MS)
    return {
        "time": BEGIN_S + number,
        "api": api,
        "api_version": 9,
        "correlation_id": number,
        "connection": "127.0.0.1:9092-10.0.0.7:40000-3",
        "client_software_name": "librdkafka",
        "client_software_version": "2.5.3",
        "request_bytes": 100,
        "response_bytes": 50,
        "received_ns": received,
        "dequeued_ns": received,
        "parked_ns": parked,
        "completed_ns": completed,
        "taken_ns": completed,
        "sent_ns": completed,
        "total_ms": total_ms,
        **more,
    }


def errors(at, count, error="NOT_LEADER_OR_FOLLOWER"):
    entry = {"api": "Produce", "error": error, "count": count}
    return {"time": BEGIN_S + at, "seconds": 5.0, "errors": [entry]}


def appended(at, *entries):
    names = ("topic", "partition", "records", "bytes")
    found = [dict(zip(names, entry, strict=True)) for entry in entries]
    return {"time": BEGIN_S + at, "seconds": 5.0, "appended": found}


LINES = [
    *(request(number, total_ms=number + 1) for number in range(100)),
    *(request(n, "Fetch", 501, 500, client_software_name="") for n in range(10)),
    *(errors(at, 4) for at in (5, 10, 15)),
    errors(60, 7),
    errors(60, 1, "<script>"),
    appended(5, ("orders", 0, 90, 900), ("clicks", 2, 10, 100)),
    appended(10, ("orders", 0, 100, 1000)),
    {"processor": 0, "lost": 12},
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "requests.log"
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    path.write_text(text + '{"torn": \n')
    return path


@pytest.fixture(scope="module")
def found(log):
    return examine([str(log)])


def describe(log, tmp_path, **more):
    out = str(tmp_path / "report.html")
    section = {"log": str(log), "out": out, **more}
    return parse({"pipeline": {"job": "report", "name": "requests"}, "report": section})


def test_percentiles_bursts_and_hot_partitions_are_the_log_s(found):
    assert found.span["requests"] == 110
    assert (found.span["lost"], found.span["unreadable"]) == (12, 1)
    produce, fetch = found.apis
    assert produce["total"] == [50, 95, 99, 100]
    assert fetch["total"][0] == 501
    assert fetch["served"] == [pytest.approx(1)] * 4  # it waited for the rest
    assert fetch["remote"] == pytest.approx(500)
    assert {(row["api"], row["client"]) for row in found.clients} == {
        ("Produce", "librdkafka 2.5.3"),
        ("Fetch", "2.5.3"),
    }
    hottest, other = found.partitions
    assert (hottest["topic"], hottest["partition"], hottest["records"]) == (
        *("orders", 0),
        190,
    )
    assert hottest["share"] == pytest.approx(0.95)
    assert hottest["peak_per_s"] == 20
    assert other["topic"] == "clicks"
    bursts = [
        (row["error"], row["count"], row["first_s"] - BEGIN_S, row["last_s"] - BEGIN_S)
        for row in found.bursts
    ]
    assert bursts == [
        ("NOT_LEADER_OR_FOLLOWER", 12, 0, 15),
        ("NOT_LEADER_OR_FOLLOWER", 7, 55, 60),
        ("<script>", 1, 55, 60),
    ]
    assert found.peers[0]["peer"] == "10.0.0.7"
    assert found.slowest[0]["total_ms"] == 100


def test_the_page_and_the_table_are_written_and_need_nothing_else(found, log, tmp_path):
    description = describe(log, tmp_path, table=str(tmp_path / "table.parquet"))
    assert list(preview(description))[1].startswith("reads 1 files")
    progress = Progress("requests", io.StringIO())
    publish(description, found, progress)
    assert (progress.rows, progress.bad) == (110, 1)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 5
    links = re.findall(
        r"(?:src|href)\s*=|url\(|https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert not links
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    table = pyarrow.parquet.read_table(tmp_path / "table.parquet").to_pylist()
    (produce,) = [row for row in table if row["api"] == "Produce"]
    assert produce["total_p99_ms"] == 99
    assert produce["total_p99.9_ms"] == 100


def test_what_is_no_request_log_is_refused_and_no_page_written(tmp_path):
    other = tmp_path / "other.log"
    other.write_text("INFO started\n")
    description = tmp_path / "p.toml"
    description.write_text(
        f"[pipeline]\njob = 'report'\n[report]\nlog = '{other}'\n"
        f"out = '{tmp_path}/report.html'\n"
    )
    with pytest.raises(PipelineError, match=r"no request in .*1 lines are not JSON"):
        run_file(description)
    assert not (tmp_path / "report.html").exists()
    # Without Java, and without Spark's start of seconds.
    other.write_text(json.dumps(request(0)))
    assert run_file(description)["rows"] == 1
    assert (tmp_path / "report.html").exists()


def test_lines_of_another_kind_are_counted_and_compressed_files_read(log, tmp_path):
    strange = [
        *(b"[1]", b"3", b'{"api":"Fetch"}', b'{"time":"now","lost":1}', b"\xff", b""),
        json.dumps(request(0) | {"total_ms": "1"}).encode(),
        json.dumps(errors(0, 1) | {"seconds": None, "errors": 7}).encode(),
    ]
    path = tmp_path / "requests.log.1.gz"
    path.write_bytes(gzip.compress(b"\n".join(strange) + b"\n"))
    found = examine([str(log), str(path)])
    assert (found.span["requests"], found.span["unreadable"]) == (110, 1 + 7)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PipelineError, match=r"log\.1\.gz cannot be read"):
        examine([str(path)])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Fetch", "Produce"]),
            st.sampled_from(["a", "b", ""]),
            st.integers(0, 3),
            st.integers(1, 1000),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_groups_have_the_percentiles_and_sums_of_their_requests(requests):
    lines = [
        request(at, api, total_ms=ms, client_software_name=name)
        for api, name, at, ms in requests
    ]
    with NamedTemporaryFile(suffix=".log") as file:
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file.flush()
        found = examine([file.name])
    assert sum(row["requests"] for row in found.apis) == len(requests)
    for row in [*found.apis, *found.clients, *found.timeline]:
        values = sorted(
            ms
            for api, name, at, ms in requests
            if row["api"] in (None, api)
            and row["client"] in (None, f"{name} 2.5.3".strip())
            and row["at_s"] in (None, BEGIN_S + at)
        )
        # As Spark's: a value that is there, at the rank or the next one above it.
        ranks = [-(-len(values) * per_mille // 1000) for per_mille in (500, 950, 990)]
        assert row["requests"] == len(values)
        assert row["total"][:3] == [values[rank - 1] for rank in ranks]
        assert row["max_ms"] == values[-1]
        assert row["bytes_in"] == 100 * len(values)
    assert [row["served_ms"] for row in found.slowest] == sorted(
        (pytest.approx(ms) for *_, ms in requests), key=lambda ms: -ms.expected
    )[:10]


def test_a_log_that_is_not_there_and_a_page_that_cannot_be_are_named(tmp_path, log):
    with pytest.raises(PipelineError, match=r"report\.log: there is no file .*nothing"):
        list(preview(describe(tmp_path / "nothing*", tmp_path)))
    nowhere = describe(log, tmp_path, out=str(tmp_path / "no" / "report.html"))
    with pytest.raises(PipelineError, match=r"report\.out=.*cannot write into"):
        list(preview(nowhere))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"out": "x"}, r"report\.log is not set"),
        ({"log": "x"}, r"report\.out is not set"),
        ({"log": 3, "out": "x"}, r"report\.log=3 must be the file .*or a list"),
        ({"log": "x", "outt": "x"}, r"outt.*did you mean 'out'"),
    ],
)
def test_a_wrong_section_is_named(section, message):
    with pytest.raises(PipelineError, match=message):
        parse({"pipeline": {"job": "report"}, "report": section})


def test_rotated_files_are_read_by_a_pattern(tmp_path):
    for name in ("requests.log", "requests.log.1"):
        (tmp_path / name).touch()
    description = describe(tmp_path / "requests.log*", tmp_path)
    assert description.report is not None
    assert len(log_files(description.report)) == 2


def test_a_page_of_a_quiet_minute_has_no_plot_but_says_so():
    span = dict.fromkeys(("requests", "lost", "unreadable", "first_s", "last_s"), 0) | {
        "bytes_in": 0,
        "bytes_out": 0,
    }
    empty = Findings(span, 1, *[[] for _ in range(8)])
    assert page("quiet", empty).count("None.") >= 5


def test_plots_draw_single_points_zeros_and_gaps():
    one = lines({"a": [(0, 5)]}, unit="ms", logarithmic=True)
    assert "<circle" in one
    zeros = lines({"a": [(0, 0), (1, 0)]}, unit="ms", logarithmic=True)
    assert "nan" not in zeros and "inf" not in zeros
    gap = lines({"a": [(0, 1), (1, 1), (9, 1), (10, 1)]}, unit="", gap_s=3)
    assert gap.count("<polyline") == 2
    assert "None" in bars({}, unit="", note={})


def test_a_bar_has_room_for_its_name_and_the_whole_of_it_under_the_pointer():
    name = "a-topic-with-a-rather-long-name.of.a.department-17"
    drawn = bars({name: {"records": 3}}, unit="records", note={})
    (shown,) = re.findall(r'text-anchor="end">(.*?)</text>', drawn)
    assert len(shown) <= 28
    assert shown.startswith("a-topic-with") and shown.endswith("department-17")
    assert f"<title>{name}: records 3 records</title>" in drawn
