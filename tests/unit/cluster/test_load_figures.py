"""What routers and workers report, as increments: nothing is counted twice, and nothing that is of no known time."""

from __future__ import annotations

from tandem.cluster.supervisor.demand import Asked, Held, Worked
from tandem.cluster.supervisor.load_figures import WARM_UP_S, LoadFigures, RouterReport, WorkerReport
from tandem.core.identity import Role
from tandem.rpc.v1.common_pb2 import PageCounts, WorkerStatus
from tandem.rpc.v1.control_pb2 import RequestLoad

PAGE = 16


def router(life: str, num: int, **more: float) -> RouterReport:
    return RouterReport(life, 0.0, RequestLoad(num_requests=num, prompt_tokens=100.0 * num, **more))


def worker(role: Role, life: str, ready_s: float = 100.0, **status: object) -> WorkerReport:
    return WorkerReport(role, life, ready_s, WorkerStatus(**status))


def test_increments_of_all_routers_add_up_and_who_is_new_counts_from_then_on() -> None:
    figures = LoadFigures(PAGE)
    assert figures.sample([], [router("a", 50), router("b", 7)]).asked == Asked()
    assert figures.sample([], [router("a", 53), router("b", 8)]).asked == Asked(num_requests=4, prompt_tokens=400)
    # One was killed, and its successor has counted some already.
    assert figures.sample([], [router("a", 54), router("c", 9)]).asked == Asked(num_requests=1, prompt_tokens=100)
    assert figures.sample([], [router("a", 54), router("c", 10)]).asked == Asked(num_requests=1, prompt_tokens=100)


def test_figures_of_a_worker_that_warms_up_count_as_nothing() -> None:
    figures = LoadFigures(PAGE)
    counted = [(WARM_UP_S / 2, 10), (WARM_UP_S - 0.1, 20), (WARM_UP_S + 1, 50), (WARM_UP_S + 3, 90)]
    found = [
        figures.sample([worker(Role.PREFILL, "life", ready_s, steps=steps, busy_s=steps / 10)], []).worked[Role.PREFILL]
        for ready_s, steps in counted
    ]
    assert found == [[], [], [Worked(num_steps=30, busy_s=3.0)], [Worked(num_steps=40, busy_s=4.0)]]


def test_what_waits_and_what_is_held() -> None:
    pages = PageCounts(free=40, used=30, reserved=10, cached=20, quarantined=4)
    held = (
        LoadFigures(PAGE)
        .sample(
            [
                worker(Role.PREFILL, "p", num_queued_tokens=500, pages=PageCounts(used=1000)),
                worker(Role.DECODE, "d", pages=pages, num_running=3, num_incoming=1, num_queued=2, max_num_seqs=64),
            ],
            [router("a", 1, waiting_tokens=120.5), router("b", 1, num_held_for_decode=1)],
        )
        .held
    )
    of_request = 40 / 4
    assert held == Held(
        waiting_tokens=620.5,
        kv_tokens=40 * PAGE,
        waiting_kv_tokens=3 * of_request * PAGE,
        kv_capacity=100 * PAGE,
        max_num_seqs=64,
    )


def test_without_decode_workers_nothing_is_known_of_room() -> None:
    assert LoadFigures(PAGE).sample([], [router("a", 1, num_held_for_decode=5)]).held == Held()
