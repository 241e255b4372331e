"""How much of a vocabulary the compiled draw looks at: what it draws is tested with the samplers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tandem.engine.cpu import draw_kernel as kernel
from tandem.engine.cpu.vector_ir import has_wide_vectors

VOCAB = 128_256
NUM_GROUPS = VOCAB // kernel._GROUP


def weights_of(spread: float, seed: int = 1) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal(VOCAB) * spread
    return np.exp(logits - logits.max())


class Cut:
    """Room of one row, as the kernel has it."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights
        self.total = float(weights.sum())
        self.tops, self.kept, self.members = np.empty(NUM_GROUPS), np.empty(VOCAB + 1), np.empty(VOCAB)
        self.bins = np.empty(kernel._BINS)
        kernel._find_tops(weights, VOCAB, self.tops)

    def gather(self, wanted: float, *, by_weight: bool) -> int:
        """How many are gathered, of which the edge is looked for among them alone."""
        num: int = kernel._below_edge(
            self.weights, VOCAB, wanted, by_weight, self.total, self.tops, self.kept, self.members, self.bins
        )
        return num

    def edge(self, wanted: float, *, by_weight: bool) -> tuple[float, int]:
        edge, num_ties = kernel._edge(self.weights, VOCAB, wanted, by_weight, self.members, self.bins)
        return edge, num_ties

    def sum_blocks(self, edge: float, num_ties: int) -> tuple[float, list[float]]:
        sums, ties = np.empty(VOCAB // kernel._BLOCK + 1), np.empty(VOCAB // kernel._BLOCK + 1)
        total = kernel._sum_blocks(self.weights, VOCAB, edge, float(num_ties), self.tops, sums, ties)
        return total, sums[: VOCAB // kernel._BLOCK].tolist()


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("top_k", [1, 20, 1000])
def test_of_top_k_hardly_more_are_gathered_than_stay(spread: float, top_k: int) -> None:
    num = Cut(weights_of(spread)).gather(top_k, by_weight=False)
    assert top_k <= num <= 1.25 * top_k


@pytest.mark.long
@pytest.mark.parametrize(
    ("spread", "top_p"), [(3.0, 0.5), (3.0, 0.8), (5.0, 0.5), (5.0, 0.95), (8.0, 0.8), (8.0, 0.99)]
)
def test_of_top_p_hardly_more_are_gathered_than_stay(spread: float, top_p: float) -> None:
    for seed in range(5):
        weights = weights_of(spread, seed)
        num_left = 1 + int(np.count_nonzero(np.cumsum(np.sort(weights)[::-1]) < top_p * weights.sum()))
        num = Cut(weights).gather(top_p * float(weights.sum()), by_weight=True)
        assert num_left <= num <= 2 * num_left + 4


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_where_top_p_leaves_a_good_part_of_the_whole_none_are_gathered_first(spread: float) -> None:
    cut = Cut(weights_of(spread))
    assert cut.gather(0.95 * cut.total, by_weight=True) == -1


@pytest.mark.long
@pytest.mark.parametrize(("wanted", "by_weight"), [(20.0, False), (0.95, True)])
def test_neighbours_that_are_all_too_light_are_not_looked_at_again(wanted: float, by_weight: bool) -> None:
    cut = Cut(weights_of(5.0))
    wanted *= cut.total if by_weight else 1.0
    num = cut.gather(wanted, by_weight=by_weight)
    least = cut.kept[:num].min()
    edge, num_ties = cut.edge(wanted, by_weight=by_weight)
    total, sums = cut.sum_blocks(edge, num_ties)
    assert 0 < least <= edge

    groups = cut.weights.reshape(NUM_GROUPS, kernel._GROUP)
    is_light = groups.max(axis=1) < least
    groups[is_light] = 1.0  # would stay
    assert cut.gather(wanted, by_weight=by_weight) == num
    assert cut.sum_blocks(edge, num_ties) == (total, sums)
    assert is_light.sum() > 0.9 * NUM_GROUPS


@pytest.mark.parametrize("num_heavy", [1, 3, 80])
def test_where_fewer_than_top_k_have_any_weight_nothing_is_written_behind_the_room(num_heavy: int) -> None:
    """As where a grammar leaves few tokens. The last group is no whole one: it ends in zeros that are no tokens."""
    num, top_k = 5000, 100.0
    num_groups = -(-num // kernel._GROUP)
    weights = np.zeros(num_groups * kernel._GROUP)
    weights[np.arange(num_heavy) * 25] = np.linspace(1.0, 0.5, num_heavy)
    tops, bins = np.empty(num_groups), np.empty(kernel._BINS)
    kernel._find_tops(weights, num, tops)
    kept, members = np.full(num + 100, -1.0), np.full(num + 100, -1.0)
    room = tops, kept[: num + 1], members[:num], bins
    assert kernel._below_edge(weights, num, top_k, False, float(weights.sum()), *room) == num_heavy
    assert (kept[num + 1 :] == -1.0).all()
    assert (members[num:] == -1.0).all()
    edge, _ = kernel._edge(kept, num_heavy, top_k, False, members, bins)
    assert edge == weights[weights > 0].min()


def test_weights_are_made_on_vectors_and_none_are_gathered() -> None:
    """LLVM gathers what may lie behind a negative index, and by itself takes half of a register on some CPUs."""
    logits = np.zeros(100, np.float32)
    kernel._weigh(logits, 100, 0.0, 1.0, np.empty(128), np.empty(1), np.empty(4), False)
    code = "".join(kernel._weigh.inspect_asm().values())
    assert re.search(r"vfn?madd\w+pd\b.*%zmm", code) or not has_wide_vectors()
    assert "gather" not in code
    assert "scatter" not in code


def test_weights_are_those_of_a_wider_type() -> None:
    """To some last bits, fewer far below the greatest; what is lower still, or masked, weighs nothing at all."""
    num = 100_003
    logits = np.linspace(-699.0, 0.0, num)
    num_groups = -(-num // kernel._GROUP)
    room, sums, tops = np.zeros(num_groups * kernel._GROUP), np.empty(num // kernel._BLOCK + 1), np.empty(num_groups)
    total = kernel._weigh(logits, num, 0.0, 1.0, room, sums, tops, True)
    assert np.array_equal(tops, room.reshape(num_groups, -1).max(axis=1))
    weights = room[:num]
    exact = np.exp(logits.astype(np.longdouble))
    off = np.abs(weights / exact - 1)
    assert off.max() < 5e-14
    assert off[logits > -40].max() < 2.5e-15
    assert off[logits > -5].max() < 1e-15
    assert weights[-1] == 1.0
    assert total == pytest.approx(float(exact.sum()), rel=1e-13)
    few, greatest = np.array([-np.inf, -1e30, -701.0, -0.5, 0.0]), 2.0
    kernel._weigh(few + greatest, 5, greatest, 1.0, weights, sums, tops, False)
    assert weights[:3].tolist() == [0.0] * 3
    assert weights[3:5].tolist() == pytest.approx([np.exp(-0.5), 1.0], rel=1e-15)
