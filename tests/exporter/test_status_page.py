"""The status page in a real browser, headless."""

from __future__ import annotations

import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.exporter.asking import METRICS, get, url_of
from tests.support.broker import Broker

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGE = Path(__file__).parents[2] / "mpbroker" / "exporter" / "page.html"


class Cells(HTMLParser):
    """Text by the id of the element that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.points: list[str] = []
        self._id = ""

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self._id = named.get("id") or self._id
        if tag == "polyline":
            self.points.append(named.get("points") or "")

    def handle_data(self, data):
        if data.strip():
            self.texts.setdefault(self._id, []).append(data.strip())


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    return found


def run(profile: Path, *arguments: str) -> str:
    """Run the browser; ten seconds of its own time, which it may spend at once."""
    done = subprocess.run(
        [
            browser(),
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--user-data-dir={profile}",
            "--window-size=1200,1500",
            "--timeout=15000",
            "--virtual-time-budget=10000",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("page") / "data", METRICS) as made:
        producer = Producer({"bootstrap.servers": made.bootstrap})
        for number in range(50):
            producer.produce("flights", str(number).encode())
        assert not producer.flush(30)
        yield made


def test_the_page_shows_the_broker_in_a_browser(broker, tmp_path):
    cells = Cells()
    cells.feed(run(tmp_path, "--dump-dom", url_of(broker)))
    assert cells.texts["state"] == ["live"]
    assert {"flights", "In a second", "0 B"} <= set(cells.texts["topics"])
    assert cells.texts["tls"][0] == "none"
    assert "processor" in cells.texts["processes"]
    assert "Produce" in cells.texts["apis"]
    assert any(len(points.split()) >= 2 for points in cells.points)


def test_the_page_fetches_nothing_from_elsewhere():
    text = PAGE.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in text and "<script src" not in text


def test_the_page_is_served_as_it_is(broker):
    assert get(broker, "") == (200, PAGE.read_text())
