"""What `ctl top` reckons from two looks, and which stage it names."""

from __future__ import annotations

from mpbroker.cli.ctl.ctl_rates import render
from mpbroker.inspect.load import Look, Page, ProcessLoad, compare, diagnose

SECOND = 1_000_000_000


def processor(requests=0, idle_s=0.0, **words):
    return {
        "id": 0,
        "pid": 10,
        "listener": 0,
        "response_queue": 0,
        "connections": 2,
        "requests": requests,
        "bytes_in": 100 * requests,
        "bytes_out": 10 * requests,
        "idle_ns": int(idle_s * SECOND),
        "waits_for_slot": 0,
        "waits_for_extent": 0,
        **words,
    }


def handler(requests=0, idle_s=0.0, apis=None, **words):
    return {
        "role": "handler",
        "id": 0,
        "pid": 20,
        "requests": requests,
        "parked": 0,
        "idle_ns": int(idle_s * SECOND),
        "apis": apis or {},
        **words,
    }


def look(at_s, processors, handlers, *, cpu=None, idle_s=0.0, clients=None, queue=0):
    children = [("processor", each) for each in processors] + [
        (each["role"], each) for each in handlers
    ]
    return Look(
        {
            "at_ns": int(at_s * SECOND),
            "phase": "SERVING",
            "ring_waiting": queue,
            "limits": {"queued_max_requests": 500},
            "processors": processors,
            "handlers": handlers,
            "processes": [
                {
                    "role": role,
                    "id": each["id"] if role != "coordinator" else 0,
                    "pid": each["pid"],
                    "state": "READY",
                    "restarts": 0,
                    "last_exit": "",
                }
                for role, each in children
            ],
        },
        cpu or {},
        idle_s,
        clients or {},
    )


def test_rates_are_what_counters_grew_by_a_second():
    page = compare(
        look(10, [processor(100)], [handler(100)]),
        look(12, [processor(500)], [handler(500)]),
    )
    assert page.seconds == 2
    assert (page.requests, page.in_rate, page.out_rate) == (200, 20_000, 2_000)
    assert page.connections == 2
    assert {(each.role, each.rate) for each in page.processes} == {
        ("processor", 200),
        ("handler", 200),
    }


def test_apis_are_summed_over_handlers_and_sorted_by_their_share_of_time():
    before = [handler(apis={"Fetch": [1, 10]}), handler(id=1, pid=21)]
    after = [
        handler(apis={"Fetch": [3, 2_000_010], "Produce": [1, 7_000_000]}),
        handler(id=1, pid=21, apis={"Produce": [1, 1_000_000]}),
    ]
    page = compare(look(0, [processor()], before), look(1, [processor()], after))
    assert [(a.name, a.rate, a.mean_ms, a.share) for a in page.apis] == [
        ("Produce", 2, 4.0, 0.8),
        ("Fetch", 2, 1.0, 0.2),
    ]


def test_a_process_that_has_just_come_has_no_rate_yet():
    page = compare(
        look(0, [processor(pid=10)], [handler()]),
        look(1, [processor(5, pid=11)], [handler()]),
    )
    (newcomer,) = [each for each in page.processes if each.role == "processor"]
    assert newcomer.rate is None and newcomer.busy is None


def test_counters_of_a_retired_process_make_no_rate_negative():
    page = compare(
        look(0, [processor(900), processor(900, id=1, pid=11)], [handler(9)]),
        look(1, [processor(910)], [handler(3)]),
    )
    assert page.requests == 10
    assert all(each.rate is None or each.rate >= 0 for each in page.processes)


def test_busy_is_the_time_not_waited_and_at_least_the_cpu():
    page = compare(
        look(0, [processor()], [handler()], cpu={10: 1.0, 20: 1.0}),
        look(
            1,
            [processor(idle_s=0.4)],
            [handler(idle_s=0.9)],
            cpu={10: 1.3, 20: 1.5},
        ),
    )
    loads = {each.role: each for each in page.processes}
    assert round(loads["processor"].busy, 3) == 0.6
    assert round(loads["handler"].busy, 3) == 0.5
    assert round(loads["processor"].cpu, 3) == 0.3


def test_the_coordinator_is_found_under_its_own_role():
    row = handler(7, role="coordinator", id=59, pid=30)
    later = handler(9, role="coordinator", id=59, pid=30)
    page = compare(look(0, [processor()], [row]), look(1, [processor()], [later]))
    assert [each.rate for each in page.processes if each.role == "coordinator"] == [2]


def test_clients_are_sorted_by_what_they_move():
    page = compare(
        look(0, [processor()], [handler()], clients={"a": (1, 0, 0), "b": (1, 5, 5)}),
        look(
            1,
            [processor()],
            [handler()],
            clients={"a": (1, 10, 0), "b": (2, 105, 205), "new": (1, 1000, 0)},
        ),
    )
    assert [(c.address, c.connections, c.in_rate) for c in page.clients] == [
        ("b", 2, 100),
        ("a", 1, 10),
        ("new", 1, 0),  # it may have moved those before we looked
    ]


# -- the verdict ---------------------------------------------------------------------


def page(handlers=(), processors=(), *, requests=1000.0, spare=1.0, queue=0, parked=0):
    def loads(role, shares):
        return [
            ProcessLoad(role, number, 1, "READY", share, share, 1.0, "")
            for number, share in enumerate(shares)
        ]

    return Page(
        seconds=1.0,
        requests=requests,
        in_rate=0.0,
        out_rate=0.0,
        queue=queue,
        queue_limit=500,
        parked=parked,
        connections=1,
        spare_cores=spare,
        processes=loads("handler", handlers) + loads("processor", processors),
        apis=[],
        clients=[],
        verdict="",
        advice="",
    )


def test_nothing_to_do_is_no_bottleneck():
    assert diagnose(page([1.0], [1.0], requests=0.2))[0].endswith("is idle")


def test_busy_handlers_are_named_and_more_of_them_suggested():
    verdict, advice = diagnose(page([0.95, 0.9], [0.3]))
    assert verdict.startswith("the handlers: busy 92%")
    assert advice == "mpbroker ctl resize --handlers 3"


def test_a_full_queue_is_the_handlers_however_idle_they_look():
    verdict, _ = diagnose(page([0.5], [0.3], queue=400))
    assert "400 requests wait" in verdict


def test_busy_processors_are_named_and_one_more_suggested():
    verdict, advice = diagnose(page([0.2], [0.95, 0.9]))
    assert verdict.startswith("the processors")
    assert advice == "mpbroker ctl resize --processors 3"


def test_one_busy_processor_among_idle_ones_is_named_by_its_id():
    verdict, advice = diagnose(page([0.2], [0.1, 0.95, 0.1]))
    assert verdict.startswith("processor 1")
    assert advice.startswith("mpbroker ctl restart processor 1")


def test_without_a_spare_core_no_more_processes_are_suggested():
    verdict, advice = diagnose(page([0.95], [0.9], spare=0.1))
    assert verdict.startswith("the machine") and "resize" not in advice


def test_no_more_than_there_can_be_is_suggested():
    assert (
        diagnose(page([0.95] * 119, [0.1]))[1] == "mpbroker ctl resize --handlers 119"
    )


def test_connections_that_wait_for_memory_come_first():
    verdict, advice = diagnose(page([0.95], [0.95]), starved=True)
    assert verdict.startswith("memory") and "queued.max.request.bytes" in advice


def test_parked_requests_and_idle_processes_wait_for_something_else():
    assert "wait for data" in diagnose(page([0.1], [0.1], parked=30))[0]


def test_idle_processes_under_load_mean_the_clients():
    assert "clients send no more" in diagnose(page([0.4], [0.4]))[0]


def test_a_page_fits_the_screen_and_keeps_what_matters_most():
    made = page([0.95] * 50, [0.3] * 16)._replace(verdict="v", advice="a")
    lines = render(made, "title", 24)
    assert len(lines) == 24
    assert lines[0] == "title" and lines[2] == "Bottleneck: v"
    assert lines[3] == "Suggestion: a"
