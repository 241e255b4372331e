"""Conversations of a simulation: each turn's prompt is all that was said before, and a new text, and it comes when the
turn before has its answer. Drawn, or found in a trace that names its blocks. Pure.

Words are those of `tandem bench run --conversations`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tandem.bench.load.block_names import BlockNames
from tandem.core.pages import pages_for
from tandem.sim.load import Arrival, Following, Lengths

# A beginning behind which more different blocks follow than this is what prompts have in common (instructions, say),
# and not the history of one of them.
_MOST_BRANCHES = 8


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """What all conversations of a load have in common.

    Attributes:
        turns: of each.
        texts, answers: tokens that a user says, and that are answered.
        think_s: mean pause between an answer and the next text, of an exponential distribution.
        concurrency: users that hold one conversation after the other, all from the beginning on; 0: conversations begin
            at `rate` a second (a Poisson process), however many are held.
        num_common: tokens that all of them begin with, as instructions.
        most_tokens: a conversation ends before the turn that would be longer, with its answer.
    """

    num: int
    turns: Lengths
    texts: Lengths
    answers: Lengths
    think_s: float = 0.0
    concurrency: int = 0
    rate: float = 1.0
    num_common: int = 0
    most_tokens: int = 1 << 40


def drawn_conversations(plan: ConversationPlan, seed: int) -> list[Arrival]:
    """The first turn of each conversation, or of each user, which the others follow. Turns of all conversations are
    numbered one conversation after the other."""
    rng, now_s, number, found = random.Random(seed), 0.0, 0, list[list[Arrival]]()
    for _ in range(plan.num):
        now_s += rng.expovariate(plan.rate)
        turns = _drawn(plan, rng, number)
        number += len(turns)
        found.append([replace(turns[0], arrived_s=0.0 if plan.concurrency else now_s), *turns[1:]])
    return _held(found, plan, rng)


def recorded_conversations(
    conversations: Iterable[Sequence[tuple[int, int]]], rate: float, think_s: float, concurrency: int, seed: int
) -> list[Arrival]:
    """As `drawn_conversations`, of conversations whose lengths were recorded: of each turn the tokens of its prompt,
    which holds all that was said before, and of its output."""
    plan = ConversationPlan(0, Lengths(1), Lengths(1), Lengths(1), think_s, concurrency)
    rng, now_s, number, found = random.Random(seed), 0.0, 0, list[list[Arrival]]()
    for lengths in conversations:
        now_s += rng.expovariate(rate)
        turns = [
            Arrival(number + index, 0.0 if concurrency or index else now_s, *each, conversation=number, turn=index + 1)
            for index, each in enumerate(lengths)
        ]
        number += len(turns)
        found.append(turns)
    return _held(found, plan, rng)


def _held(found: list[list[Arrival]], plan: ConversationPlan, rng: random.Random) -> list[Arrival]:
    """By users, or each by itself."""
    lines: list[list[list[Arrival]]]
    if plan.concurrency:
        lines = [found[user :: plan.concurrency] for user in range(min(plan.concurrency, len(found)))]
    else:
        lines = [[turns] for turns in found]
    return [_chained([turn for turns in line for turn in turns], plan, rng) for line in lines]


def _drawn(plan: ConversationPlan, rng: random.Random, first: int) -> list[Arrival]:
    """The turns of one conversation, numbered from `first`."""
    turns, num_before = list[Arrival](), plan.num_common
    for number in range(plan.turns.draw(rng)):
        num_input, num_output = num_before + plan.texts.draw(rng), plan.answers.draw(rng)
        num_before = num_input + num_output
        if turns and num_before > plan.most_tokens:
            break
        turns.append(
            Arrival(
                first + number, 0.0, num_input, num_output,
                conversation=first, turn=number + 1, num_common=plan.num_common,
            )
        )  # fmt: skip
    return turns


def _chained(turns: Sequence[Arrival], plan: ConversationPlan, rng: random.Random) -> Arrival:
    """Each follows the one before it; only who goes on with a conversation has to think."""
    found = turns[-1]
    for before, turn in zip(reversed(turns[:-1]), reversed(turns), strict=False):
        think_s = rng.expovariate(1.0) * plan.think_s if turn.turn > 1 else 0.0
        found = replace(before, then=Following(found, think_s))
    return found


def closed(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The requests of a trace, in order of time, as the first turns of conversations, which the others follow: as long
    after the turn before as was recorded, and never before that has its answer.

    A request goes on from an earlier one where its prompt begins with all full blocks of that one's prompt, and is long
    enough to hold also its answer. What a turn's answer is called is known then, too: as its next turn's prompt has it.
    """
    before = _turns_before(arrivals)
    after = {one: place for place, one in enumerate(before) if one is not None}
    names = _names_of_last_blocks(arrivals, after)
    turns = list[tuple[int, int]]()  # of each the conversation, and which turn of it
    for previous, arrival in zip(before, arrivals, strict=True):
        turns.append((arrival.number, 1) if previous is None else (turns[previous][0], turns[previous][1] + 1))
    found = dict[int, Arrival]()
    for place in reversed(range(len(arrivals))):
        arrival, then, ids = arrivals[place], None, arrivals[place].block_ids
        if (following := found.pop(after.get(place, -1), None)) is not None:
            then = Following(following, gap_s=following.arrived_s - arrival.arrived_s)
            ids = following.block_ids[: pages_for(arrival.num_input + arrival.num_output, arrival.block_size)]
        elif ids:
            ids = (*ids[:-1], names.get(ids[-1], ids[-1]))
        conversation, turn = turns[place]
        found[place] = replace(arrival, block_ids=ids, conversation=conversation, turn=turn, then=then)
    return [found[place] for place in sorted(found)]


def _turns_before(arrivals: Sequence[Arrival]) -> list[int | None]:
    """The place of the request that each goes on from; `None`: it goes on from none. Each has one next turn at most."""
    names = BlockNames()
    chains = [names.keys(arrival.block_ids)[0] for arrival in arrivals]
    branches = _num_branches(chains)
    last: dict[int, int] = {}  # by a beginning: the last request whose full blocks it is
    found: list[int | None] = []
    for place, (arrival, chain) in enumerate(zip(arrivals, chains, strict=True)):
        full = chain[: arrival.num_input // arrival.block_size]
        previous = None
        for beginning in reversed(full):
            other = last.get(beginning)
            if other is not None and arrivals[other].num_input + arrivals[other].num_output <= arrival.num_input:
                previous = last.pop(beginning)
                break
        if full and branches[full[-1]] <= _MOST_BRANCHES:
            last[full[-1]] = place
        found.append(previous)
    return found


def _num_branches(chains: Iterable[Sequence[int]]) -> dict[int, int]:
    """By a beginning: how many different blocks follow it."""
    behind = defaultdict[int, set[int]](set)
    for chain in chains:
        for beginning, following in pairwise(chain):
            behind[beginning].add(following)
    return defaultdict(int, {beginning: len(others) for beginning, others in behind.items()})


def _names_of_last_blocks(arrivals: Sequence[Arrival], after: dict[int, int]) -> dict[int, int]:
    """The last block of a prompt is mostly a part of one, and has another name when the next turn has filled it: that
    one by this."""
    names: dict[int, int] = {}
    for place in sorted(after, reverse=True):
        arrival, following = arrivals[place], arrivals[after[place]]
        last = arrival.num_input // arrival.block_size
        if arrival.num_input % arrival.block_size:
            full = following.block_ids[last]
            names[arrival.block_ids[last]] = names.get(full, full)
    return names
