"""What requests cost their processor: shares that add up to what it has used."""

from __future__ import annotations

import os

import pytest

from mpbroker.ipc.counters.network_costs import NetworkCosts, network_ns
from mpbroker.ipc.layout import (
    CONTROL_WORDS,
    PROCESSOR_BEAT,
    PROCESSOR_COUNTERS,
    SLOTS_PER_PROCESSOR,
    ProcessorCounter,
    processor_row,
)
from mpbroker.ipc.segment import Segment

PROCESSOR = 2
SLOT = PROCESSOR * SLOTS_PER_PROCESSOR + 5
US = 1000
KIB = 1024


class Processor:
    """Its counters, and the time that it has used."""

    def __init__(self, words):
        self.words = words
        self.cpu_ns = 7_000_000
        self.costs = NetworkCosts(PROCESSOR, words, lambda: self.cpu_ns)

    def work(self, requests, in_bytes, out_bytes, cpu_ns):
        row = processor_row(PROCESSOR) + PROCESSOR_COUNTERS
        self.words[row + ProcessorCounter.REQUESTS] += requests
        self.words[row + ProcessorCounter.BYTES_IN] += in_bytes
        self.words[row + ProcessorCounter.BYTES_OUT] += out_bytes
        self.cpu_ns += cpu_ns
        self.costs.beat(123)


@pytest.fixture
def processor():
    segment = Segment.create("test-control", CONTROL_WORDS * 8)
    yield Processor(segment.words)
    os.close(segment.fd)


def test_small_requests_share_what_a_second_took(processor):
    assert network_ns(processor.words, SLOT, 100) == 0  # nobody knows yet
    processor.work(1000, 0, 0, 5000 * US)
    assert network_ns(processor.words, SLOT, 0) == 5 * US
    processor.work(1000, 0, 0, 9000 * US)
    assert network_ns(processor.words, SLOT, 0) == 9 * US
    # Of another processor's slots nothing is known.
    assert network_ns(processor.words, SLOT + SLOTS_PER_PROCESSOR, 0) == 0


def test_what_is_charged_adds_up_to_what_was_used(processor):
    small, large = 200, 20
    sent = small * KIB + large * 512 * KIB
    processor.work(small + large, sent, sent // 2, 50_000 * US)
    charged = small * network_ns(processor.words, SLOT, KIB + KIB // 2)
    charged += large * network_ns(processor.words, SLOT, (512 + 256) * KIB)
    assert charged == pytest.approx(50_000 * US, rel=0.01)


def test_a_second_with_few_requests_says_nothing(processor):
    processor.work(63, 0, 0, 10_000 * US)
    assert network_ns(processor.words, SLOT, 0) == 0
    # Nor does what it took count for those that come next.
    processor.work(100, 0, 0, 300 * US)
    assert network_ns(processor.words, SLOT, 0) == 3 * US
    processor.work(1, 0, 0, 10_000 * US)
    assert network_ns(processor.words, SLOT, 0) == 3 * US


def test_a_few_large_ones_are_enough(processor):
    processor.work(4, 4 * KIB * KIB, 0, 680 * US)
    assert network_ns(processor.words, SLOT, 0) == 10 * US
    assert network_ns(processor.words, SLOT, KIB * KIB) == 170 * US


def test_requests_do_not_pay_for_a_storm_of_connections(processor):
    processor.work(64, 0, 0, 1_000_000 * US)
    assert network_ns(processor.words, SLOT, 0) == 1000 * US


def test_a_successor_begins_anew_and_what_was_known_counts(processor):
    processor.work(1000, 0, 0, 5000 * US)
    successor = Processor(processor.words)
    assert network_ns(processor.words, SLOT, 0) == 5 * US
    successor.work(100, 0, 0, 600 * US)
    assert network_ns(processor.words, SLOT, 0) == 6 * US


def test_the_beat_is_told(processor):
    processor.costs.beat(99)
    assert processor.words[processor_row(PROCESSOR) + PROCESSOR_BEAT] == 99
