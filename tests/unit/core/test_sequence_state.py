"""What penalties know of the tokens of one choice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.sampling import SequenceState

IDS = st.lists(st.integers(0, 9), max_size=12)


@given(IDS, IDS, IDS, IDS)
def test_each_different_token_is_seen_once_whenever_it_is_asked(
    prompt: list[int], replayed: list[int], before: list[int], behind: list[int]
) -> None:
    state = SequenceState(prompt, replayed)
    for token_id in before:
        state.append(token_id)
    assert sorted(state.seen) == sorted({*prompt, *replayed, *before})
    for token_id in behind:
        state.append(token_id)
    output = replayed + before + behind
    assert list(state.seen) == list(dict.fromkeys(prompt + output))
    assert (state.output_ids, state.output_counts) == (output, Counter(output))


class Prompt(list[int]):
    """Counts how often it is gone through."""

    num_walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.num_walks += 1
        return super().__iter__()


def test_a_prompt_is_gone_through_only_for_who_asks_and_once() -> None:
    prompt = Prompt(range(5))
    state = SequenceState(prompt)
    state.append(3)
    assert prompt.num_walks == 0
    assert len(state.seen) == 5
    state.append(7)
    assert list(state.seen) == [0, 1, 2, 3, 4, 7]
    assert prompt.num_walks == 1
