"""What is cut out for the comparison is there, and the comparison is arithmetic."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bench import wire
from tests.bench.brokers import CheckoutBroker
from tests.bench.machinery import (
    CHECKOUT,
    CUTS,
    Run,
    apply_cuts,
    copy_of_sources,
    costs_percent,
    is_fair,
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "mpbroker"
    for path in {cut.path for cut in CUTS}:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / "mpbroker" / path, copy / path)
    return copy


def test_every_cut_fits_the_sources_and_leaves_python_whole(package: Path) -> None:
    apply_cuts(package)
    for path in {cut.path for cut in CUTS}:
        source = (package / path).read_text()
        assert source != (CHECKOUT / "mpbroker" / path).read_text()
        if path.endswith(".py"):
            compile(source, path, "exec")


@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler"
)
def test_what_is_left_of_the_sources_serves() -> None:
    with (
        copy_of_sources(is_cut=True) as directory,
        CheckoutBroker(directory).broker() as broker,
        broker.connect() as connection,
    ):
        topic = broker.topic("cut")
        batch = wire.record_batch([wire.RecordSpec(b"value")])
        connection.ask(wire.produce(topic, 0, batch))
        assert connection.ask(wire.fetch(topic, 0, 0, max_bytes=4096)).count(batch[21:])


def test_sources_that_have_changed_are_not_taken_for_cut_ones(package: Path) -> None:
    apply_cuts(package)
    with pytest.raises(ValueError, match="has not exactly one"):
        apply_cuts(package)


def test_a_cost_is_the_share_of_throughput_that_is_lost() -> None:
    pairs = [(20.0, 19.0), (10.0, 10.0), (8.0, 10.0)]
    assert costs_percent(pairs) == pytest.approx([5.0, 0.0, -25.0])


def test_a_pair_of_which_one_stood_still_does_not_count() -> None:
    assert is_fair(Run(1000, 0.1), Run(900, 0.1))
    assert is_fair(Run(900, 0.1), Run(1000, 0.1))
    assert not is_fair(Run(1000, 0.1), Run(100, 0.1))
    assert not is_fair(Run(100, 0.1), Run(1000, 0.1))
