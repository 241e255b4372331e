"""What a worker's role, place and configuration make of its limits."""

from __future__ import annotations

import pytest

from tandem.core.config import Config, from_dict
from tandem.core.identity import Role
from tandem.worker.limits import Site, guess_rows, max_num_seqs, num_to_pair, scheduler_limits


def test_prompts_are_handed_off_in_twos_where_decode_has_a_core_to_give_and_no_prompts_of_its_own() -> None:
    config = from_dict({"scheduling": {"mixed_pool": False}})
    assert num_to_pair(config, Site(Role.PREFILL, on_cpu=True, shares_cores=True)) == 4


@pytest.mark.parametrize(
    ("site", "mixed_pool"),
    [
        (Site(Role.PREFILL, on_cpu=True, shares_cores=True), True),
        (Site(Role.PREFILL, on_cpu=True), False),
        (Site(Role.DECODE, on_cpu=True, shares_cores=True), False),
    ],
    ids=["mixed pool", "no shared cores", "decode"],
)
def test_elsewhere_they_are_handed_off_one_after_the_other(site: Site, mixed_pool: bool) -> None:
    assert num_to_pair(from_dict({"scheduling": {"mixed_pool": mixed_pool}}), site) == 0


@pytest.mark.parametrize(
    ("site", "asked", "tokens"),
    [
        (Site(Role.PREFILL, on_cpu=True), 0, 32),
        (Site(Role.PREFILL, on_cpu=True, in_tiles=True), 0, 256),
        (Site(Role.PREFILL, on_cpu=True, in_tiles=True), 7, 7),
        (Site(Role.PREFILL, on_cpu=False), 0, 512),
    ],
)
def test_a_step_is_full_where_more_tokens_take_longer_each(site: Site, asked: int, tokens: int) -> None:
    config = from_dict({"scheduling": {"saturating_tokens": asked}})
    assert scheduler_limits(config, site, 4096).saturating_tokens == tokens


@pytest.mark.parametrize(
    ("on_cpu", "widens", "in_tiles", "rows"),
    [(True, False, False, 12), (True, True, False, 5), (True, False, True, 16), (False, False, False, 0)],
)
def test_guesses_fill_the_rows_that_cost_hardly_more_than_one(
    on_cpu: bool, widens: bool, in_tiles: bool, rows: int
) -> None:
    assert guess_rows(on_cpu=on_cpu, widens=widens, in_tiles=in_tiles) == rows


@pytest.mark.parametrize(
    ("site", "mixed_pool", "computes"),
    [
        (Site(Role.PREFILL, on_cpu=True), True, False),
        (Site(Role.DECODE, on_cpu=True), True, True),
        (Site(Role.DECODE, on_cpu=False), True, True),
        (Site(Role.DECODE, on_cpu=False), False, False),
    ],
)
def test_only_decode_computes_prompts_beside_tokens_on_any_device(site: Site, mixed_pool: bool, computes: bool) -> None:
    config = from_dict({"scheduling": {"mixed_step_tokens": 16, "mixed_pool": mixed_pool}})
    assert scheduler_limits(config, site, 0).computes_prompts == computes
    assert scheduler_limits(config, site, 0).paced_tokens == 16
    assert scheduler_limits(Config(), site, 0).paced_tokens == 0, "bounded by time alone"


def test_prompts_that_wait_for_decode_may_hold_a_share_of_prefills_pool_only() -> None:
    config = from_dict({"scheduling": {"unacknowledged_share": 0.25}})
    assert scheduler_limits(config, Site(Role.PREFILL, on_cpu=True), 0).unpromoted_share == 0.25
    assert scheduler_limits(config, Site(Role.DECODE, on_cpu=True), 0).unpromoted_share == 1.0


@pytest.mark.parametrize(
    ("configured", "num_slots", "number"),
    [(0, 1000, 64), (0, 100 * 256 + 255, 100), (0, 10**6, 256), (7, 10**6, 7), (1000, 256, 1000)],
)
def test_a_batch_is_as_large_as_pages_allow_where_nothing_is_configured(
    configured: int, num_slots: int, number: int
) -> None:
    config = from_dict({"scheduling": {"max_num_seqs": configured}})
    assert max_num_seqs(config, num_slots) == number
    assert scheduler_limits(config, Site(Role.DECODE, on_cpu=True), num_slots).max_num_seqs == number


def test_a_step_has_a_token_for_each_sequence_of_a_batch() -> None:
    config = from_dict({"scheduling": {"max_num_batched_tokens": 32, "chunk_size": 32}})
    assert max_num_seqs(config, 10**6) == 32
