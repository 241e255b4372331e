"""Figures against ones computed by hand, and the definitions of vLLM's `bench serve`."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.load.drive import Load
from tandem.bench.load.records import RequestRecord, Slo
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.results import Run
from tandem.bench.report.summary import cache_use, distribution, goodput, itl_over_time, percentile, summarise
from tandem.bench.report.tables import remarks
from tandem.bench.session import Shape


def record(
    number: int = 0, sent_s: float = 0.0, events_s: tuple[float, ...] = (1.0, 1.5, 2.5), **fields: object
) -> RequestRecord:
    plain = RequestRecord(
        number=number,
        num_input_asked=10,
        num_output_asked=3,
        sent_s=sent_s,
        ended_s=events_s[-1] + 0.1,
        event_s=events_s,
        num_input=10,
        num_output=len(events_s),
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def failed(number: int, kind: str = "broken", message: str = "gone") -> RequestRecord:
    return RequestRecord(number, 10, 3, sent_s=0.5, ended_s=100.0, failure=kind, message=message)


def test_one_request_by_hand() -> None:
    one = record(sent_s=0.25)
    assert one.ttft_s == 0.75
    assert one.e2e_s == 2.25  # to the last token, not to the end of the answer
    assert one.tpot_s == 0.75
    assert one.itl_s == [0.5, 1.0]
    assert one.second_gap_s == 0.5


def test_tokens_that_come_together_count_for_tpot_and_not_for_itl() -> None:
    one = record(events_s=(1.0, 2.0), num_output=5)
    assert one.itl_s == [1.0]
    assert one.tpot_s == 0.25


def test_a_single_token_has_no_time_per_token() -> None:
    one = record(events_s=(1.0,))
    assert (one.tpot_s, one.itl_s, one.second_gap_s) == (None, [], None)
    assert Slo(tpot_s=1e-9).is_met_by(one)


def test_a_run_by_hand() -> None:
    records = [
        record(0),
        record(1, sent_s=1.0, events_s=(3.0, 3.5), num_output=2),
        record(2, sent_s=2.0, events_s=(2.5,), num_input=9),
        failed(3, "http_429", "full"),
        failed(4, "http_429", "still full"),
        failed(5),
    ]
    found = summarise(records, 4.0, Slo(ttft_s=1.0, tpot_s=0.75))
    assert (found.num_requests, found.num_succeeded) == (6, 3)
    assert found.num_failed == {"broken": 1, "http_429": 2}
    assert found.failure_examples == {"broken": "gone", "http_429": "full"}
    assert (found.num_input_tokens, found.num_output_tokens, found.num_events) == (29, 6, 6)
    assert (found.num_short, found.num_wrong_input) == (2, 1)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.75, 1.5, 8.75)
    assert found.ttft_s is not None
    assert found.ttft_s.num == 3  # the failed ones' 100 seconds are nowhere
    assert (found.ttft_s.p50, found.ttft_s.max) == (1.0, 2.0)
    assert found.ttft_s.mean == pytest.approx(3.5 / 3)
    assert found.tpot_s is not None
    assert (found.tpot_s.num, found.tpot_s.mean) == (2, 0.625)
    assert found.itl_s is not None
    assert (found.itl_s.num, found.itl_s.mean) == (3, pytest.approx(2 / 3))
    assert found.e2e_s is not None
    assert found.e2e_s.max == 2.5
    assert found.goodput is not None
    assert (found.goodput.num_good, found.goodput.share, found.goodput.per_s) == (2, pytest.approx(1 / 3), 0.5)
    json.dumps(dataclasses.asdict(found))


def test_what_a_server_had_cached_is_of_the_answers_that_tell() -> None:
    records = [
        record(0, num_input=100, num_cached=0, num_repeated=0),
        record(1, num_input=300, num_cached=60, num_repeated=80),
        record(2, num_input=50),
        failed(3),
    ]
    found = summarise(records, 1.0).cache
    assert found is not None
    assert (found.num_answers, found.num_input_tokens, found.num_cached_tokens) == (2, 400, 60)
    assert (found.hit_ratio, found.of_possible) == (0.15, 0.75)
    unknown = cache_use([record(num_cached=3)])
    assert unknown is not None
    assert (unknown.num_repeated_tokens, unknown.of_possible) == (None, None)
    assert cache_use([record()]) is None


def test_a_run_without_success_has_no_latencies() -> None:
    found = summarise([failed(0)], 1.0, Slo(ttft_s=100.0))
    assert (found.ttft_s, found.tpot_s, found.itl_s, found.e2e_s, found.second_gap_s) == (None,) * 5
    assert found.goodput is not None
    assert found.goodput.num_good == 0
    assert summarise([], 0.0).requests_per_s == 0.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-9)


@pytest.mark.long
@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_a_distribution_is_in_order(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.p50 <= found.p90 <= found.p99 <= found.max
    assert min(values) <= found.mean + 1e-9
    assert found.mean <= found.max + 1e-9


def test_an_slo_may_bound_one_latency_alone() -> None:
    late_start, slow = record(events_s=(5.0, 5.1, 5.2)), record(events_s=(0.1, 2.0, 4.0))
    assert [Slo(ttft_s=1).is_met_by(r) for r in (late_start, slow)] == [False, True]
    assert [Slo(tpot_s=1).is_met_by(r) for r in (late_start, slow)] == [True, False]
    assert goodput([late_start, slow], 2.0, Slo()).num_good == 2
    assert not Slo().is_met_by(failed(0))


def test_gaps_fall_into_the_window_of_their_end() -> None:
    windows = itl_over_time([record(events_s=(0.5, 0.9, 1.1)), record(events_s=(3.0, 3.5))], 1.0)
    assert [(window.at_s, window.num) for window in windows] == [(0.0, 1), (1.0, 1), (3.0, 1)]
    assert [window.p50 for window in windows] == pytest.approx([0.4, 0.2, 0.5])


def test_lateness_is_of_planned_requests_alone() -> None:
    found = summarise([record(0, sent_s=0.5, planned_s=0.25), record(1)], 1.0).lateness_s
    assert found is not None
    assert (found.num, found.max) == (1, 0.25)


@pytest.mark.parametrize(
    ("late_s", "said"), [(0.009, []), (0.02, ["requests left up to 20 ms (p99) after their time"])]
)
def test_a_generator_that_could_not_keep_the_times_says_so(late_s: float, said: list[str]) -> None:
    load = Load([record(0, sent_s=0.5 + late_s, planned_s=0.5), record(1)], 4.0)
    assert list(remarks(Run.of(Shape(rate=2.0), load, None))) == said


@given(limit=st.floats(0.05, 500), start=st.floats(0.05, 500))
def test_the_search_closes_in_on_the_limit(limit: float, start: float) -> None:
    search = RateSearch(start, precision=1.05, max_probes=100)
    while not search.is_done:
        search.tell(went_well=search.rate <= limit)
    assert search.best <= limit < search.worst <= search.best * 1.05
    assert search.num_probes < 40


def test_the_search_ends_with_its_probes() -> None:
    search = RateSearch(1.0, max_probes=3)
    while not search.is_done:
        search.tell(went_well=False)
    assert (search.num_probes, search.best, search.worst, search.rate) == (3, 0.0, 0.25, 0.125)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": 1, "precision": 1}, {"rate": 1, "max_probes": 0}])
def test_a_search_that_could_not_end_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        RateSearch(**wrong)  # type: ignore[arg-type]
