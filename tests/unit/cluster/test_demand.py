"""From counts to loads: rates, what one worker gives, and what is asked of each pool."""

from __future__ import annotations

import pytest

from tandem.cluster.supervisor.demand import Asked, Demand, Held, Rate, Sample, StepTimes, Worked
from tandem.core.identity import Role

TTFT_S, TPOT_S, DELAY_S = 2.0, 0.1, 120.0
NOTHING = Sample(Asked(), {}, Held())


def rate_of(amounts: list[tuple[float, float]], longest_s: float = DELAY_S) -> Rate:
    """Requests, and what they ask for, of one period of two seconds after the other, from 0 on."""
    rate = Rate(longest_s)
    rate.note(0.0, 0, 0)
    for number, (num, amount) in enumerate(amounts, 1):
        rate.note(2.0 * number, num, amount)
    return rate


def test_a_steady_rate_is_likely_and_a_little_less_is_certain() -> None:
    rate = rate_of([(20, 2000)] * 60)
    assert rate.likely == pytest.approx(1000)
    assert 900 < rate.certain < 950, "900 requests in 90 s: two thirtieths may be chance"


def test_of_few_requests_nothing_is_certain() -> None:
    rate = rate_of([(1, 5000), (1, 5000)])
    assert rate.certain == 0
    assert rate.likely == 2500


def test_a_rise_that_many_requests_show_is_certain_within_seconds() -> None:
    rate = rate_of([(20, 2000)] * 60 + [(200, 20_000)] * 2)
    assert rate.certain > 8000
    assert rate.likely < 2500


def test_a_fall_is_seen_by_the_longer_means() -> None:
    rate = rate_of([(20, 2000)] * 60 + [(0, 0)] * 20)
    assert rate.likely == pytest.approx(1000 * 50 / 90)
    rate = rate_of([(20, 2000)] * 60 + [(0, 0)] * 3, longest_s=4.0)
    assert rate.likely == 0, "where shrinking is not to wait, nor do means"


def test_what_came_before_the_first_look_is_of_no_known_time() -> None:
    rate = Rate(DELAY_S)
    rate.note(1000.0, 5000, 1e9)
    assert rate.likely == 0
    rate.note(1004.0, 4, 400)
    assert rate.likely == 100


@pytest.mark.parametrize("period_s", [0.7, 2.0, 3.0, 5.0, 25.0])
def test_a_rate_is_what_came_over_the_time_in_which_it_came(period_s: float) -> None:
    """However far apart the samples are, and whatever windows they fill."""
    rate = Rate(DELAY_S)
    for number in range(200):
        rate.note(1000.0 + period_s * number, 20, 100.0 * period_s)
        if period_s * number >= 4.0:
            assert [mean for _, mean in rate.means()] == pytest.approx([100.0] * len(rate.means()))
            assert (rate.recent, rate.likely) == pytest.approx((100.0, 100.0))


def test_a_time_of_which_nothing_is_known_counts_as_none() -> None:
    rate = rate_of([(20, 2000)] * 5)
    rate.pause()
    rate.note(50.0, 7, 700)
    assert (rate.recent, rate.likely) == (1000.0, 1000.0), "nor does what came meanwhile"
    rate.note(52.0, 40, 4000)
    assert rate.means() == [(60, 6000 / 4), (120, 12_000 / 10), (140, 14_000 / 12)]


def test_the_time_of_steps_is_a_line_through_what_batches_took() -> None:
    steps = StepTimes()
    for rows in (1, 8, 20, 40):
        steps.note(Worked(num_steps=100, busy_s=100 * (0.02 + 0.001 * rows), output_tokens=100 * rows))
    base_s, of_row_s = steps.line()
    assert base_s == pytest.approx(0.02, rel=0.05)
    assert of_row_s == pytest.approx(0.001, rel=0.05)
    assert steps.tokens_per_s(0.1, 0) == pytest.approx(80 / 0.1, rel=0.06), "80 rows take 100 ms"
    assert steps.tokens_per_s(0.1, 40) == pytest.approx(40 / 0.06, rel=0.06), "its batch holds 40"


def test_of_batches_that_are_alike_no_more_is_concluded_than_can_be() -> None:
    steps = StepTimes()
    steps.note(Worked(num_steps=100, busy_s=2.0, output_tokens=100))
    base_s, of_row_s = steps.line()
    assert base_s + of_row_s == pytest.approx(0.02)
    assert 0 < of_row_s < 0.001


def test_a_target_that_no_batch_keeps_does_not_ask_for_a_worker_a_request() -> None:
    steps = StepTimes()
    for rows in (1, 8, 20, 40):
        steps.note(Worked(num_steps=100, busy_s=100 * (0.2 + 0.01 * rows), output_tokens=100 * rows))
    assert steps.tokens_per_s(0.05, 0) == pytest.approx(20 / 0.4, rel=0.1), "steps take twice as long as with one row"


def test_without_figures_there_is_no_load() -> None:
    demand = Demand(TTFT_S, TPOT_S, DELAY_S)
    demand.hear(NOTHING, 0.0)
    assert demand.of(Role.PREFILL, 1) is None
    assert demand.of(Role.DECODE, 1) is None


def prefill_load(held: Held, by_decode: float = 0.0) -> tuple[Demand, float]:
    """After a minute of 10 requests a second with 100 tokens each to compute; one worker computes 500 a second."""
    demand = Demand(TTFT_S, TPOT_S, DELAY_S)
    for number in range(31):
        work = {Role.PREFILL: [Worked(10, 2.0, 1000)], Role.DECODE: [Worked(10, 2.0, by_decode)]}
        demand.hear(Sample(Asked(num_requests=20, prompt_tokens=2000), work, held), 2.0 * number)
    return demand, 60.0


def test_prefill_is_asked_for_prompts_over_what_one_worker_computes() -> None:
    demand, _ = prefill_load(Held())
    load = demand.of(Role.PREFILL, 2)
    assert load is not None
    assert load.likely == pytest.approx(2.0)
    assert 1.7 < load.certain < 2.0
    assert load.backlog_s == 0
    assert load.inputs["tokens_per_s_of_one"] == pytest.approx(500)


def test_what_decode_computes_is_not_asked_of_prefill() -> None:
    demand, _ = prefill_load(Held(), by_decode=1000)
    load = demand.of(Role.PREFILL, 2)
    assert load is not None
    assert load.likely == pytest.approx(1.0)


def test_what_waits_counts_beyond_what_is_done_in_half_the_target() -> None:
    demand, _ = prefill_load(Held(waiting_tokens=3000))
    load = demand.of(Role.PREFILL, 2)
    assert load is not None
    assert load.backlog_s == pytest.approx(3000 / 500 - 2 * TTFT_S / 2)


def decode_load(held: Held, output_tokens: float, ended: float = 20.0, tokens: float = 50.0) -> Demand:
    """After a minute: 10 requests a second come, and so many of `tokens` each end every two seconds."""
    demand = Demand(TTFT_S, TPOT_S, DELAY_S)
    for number in range(31):
        steps = [Worked(100, 100 * (0.02 + 0.001 * rows), 0, 100 * rows) for rows in (10, 40)]
        asked = Asked(num_requests=20, num_ended=ended, ended_tokens=ended * tokens, output_tokens=output_tokens)
        demand.hear(Sample(asked, {Role.DECODE: steps}, held), 2.0 * number)
    return demand


def test_decode_is_asked_for_output_tokens_over_what_one_worker_gives() -> None:
    demand = decode_load(Held(kv_tokens=100, kv_capacity=10_000, max_num_seqs=40), output_tokens=1000)
    load = demand.of(Role.DECODE, 1)
    assert load is not None
    assert load.bound == "output tokens"
    assert load.likely == pytest.approx(500 / (40 / 0.06), rel=0.05)


def test_a_pool_that_generates_too_few_is_asked_for_those_that_come() -> None:
    held = Held(kv_tokens=100, kv_capacity=10_000, max_num_seqs=40)
    few = decode_load(held, output_tokens=200, ended=4).of(Role.DECODE, 1)
    assert few is not None
    assert few.inputs["served_tokens_per_s"] == pytest.approx(100)
    assert few.likely == pytest.approx(500 / (40 / 0.06), rel=0.05), "10 a second, of 50 tokens each"


def test_decode_is_asked_for_room_where_that_is_more() -> None:
    held = Held(kv_tokens=15_000, waiting_kv_tokens=5000, kv_capacity=10_000, max_num_seqs=40)
    load = decode_load(held, output_tokens=1000).of(Role.DECODE, 2)
    assert load is not None
    assert load.bound == "resident KV"
    assert (load.certain, load.likely) == (2.0, 2.0)


def test_prompts_that_decode_computes_do_not_make_its_steps_look_slow() -> None:
    held = Held(kv_tokens=100, kv_capacity=10_000, max_num_seqs=40)
    loads = []
    for prompts in (0, 1000):
        demand = Demand(TTFT_S, TPOT_S, DELAY_S)
        for number in range(31):
            plain = [Worked(100, 100 * (0.02 + 0.001 * rows), 0, 100 * rows) for rows in (10, 40)]
            mixed = [Worked(100, 6.0 + prompts / 500, prompts, 4000)]
            work = {Role.PREFILL: [Worked(10, 2.0, 1000)], Role.DECODE: [*plain, *mixed]}
            demand.hear(Sample(Asked(num_requests=20, output_tokens=1000), work, held), 2.0 * number)
        load = demand.of(Role.DECODE, 1)
        assert load is not None
        loads.append(load.likely)
    assert loads[1] == pytest.approx(loads[0], rel=0.02)


def test_late_first_tokens_are_not_prefills_while_prompts_wait_for_decode() -> None:
    for waiting_kv, late in ((0.0, 10), (5000.0, 0)):
        demand, now_s = prefill_load(Held(waiting_kv_tokens=waiting_kv))
        sample = Sample(
            Asked(num_first=10, num_first_late=10), {Role.PREFILL: [Worked(1, 1.0, 1000)]},
            Held(waiting_kv_tokens=waiting_kv),
        )  # fmt: skip
        demand.hear(sample, now_s + 2)
        load = demand.of(Role.PREFILL, 1)
        assert load is not None
        assert load.num_late == late


def test_what_decode_computed_without_prefill_workers_says_nothing_of_a_share() -> None:
    demand = Demand(TTFT_S, TPOT_S, DELAY_S)
    for number in range(100):
        alone = {Role.DECODE: [Worked(10, 2.0, 50_000)]}
        demand.hear(Sample(Asked(num_requests=5, prompt_tokens=50_000), alone, Held()), 2.0 * number)
    both = {Role.PREFILL: [Worked(10, 2.0, 20_000)], Role.DECODE: [Worked(10, 2.0, 0, 100)]}
    demand.hear(Sample(Asked(num_requests=5, prompt_tokens=20_000), both, Held()), 202.0)
    load = demand.of(Role.PREFILL, 1)
    assert load is not None
    assert load.inputs["share_of_prefill"] == 1.0
