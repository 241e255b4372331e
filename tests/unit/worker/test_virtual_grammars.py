"""Grammars through prefill, handoff, decode and recovery, in virtual time: real matchers, a scripted model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher

from router.request.request import Request
from tandem.core.errors import InvalidRequestError, WorkersDiedError
from tandem.core.grammar import CompiledGrammar
from tandem.core.identity import Role
from tandem.core.sampling import SamplingParams
from tandem.worker.guide import Guide
from tandem.worker.guides import Guides
from tests.support.handoff_world import DECODE, PREFILL, World, WorldSpec
from tests.support.inline import InlineExecutor
from tests.support.link import LinkSpec
from tests.support.scripted_model import EOS, TEXTS, allowed_token, vocabulary

NUM_REQUESTS = 40
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
ENDLESS = LLMatcher.grammar_from_regex("[a-z]+")


@cache
def compiled(grammar: str) -> CompiledGrammar:
    return CompiledGrammar(grammar, vocabulary().tokens)


def expected(request: Request, choice: int) -> list[int]:
    """What the scripted model gives by the grammar, without any worker."""
    matcher, output, params = compiled(request.sampling.grammar).new_matcher(), [], request.sampling
    while len(output) < params.max_tokens:
        token_id = allowed_token(matcher.inner.compute_bitmask(), params.seed, choice, len(output))
        output.append(token_id)
        if token_id == EOS:
            break
        matcher.take([token_id])
    return output


def text_of(token_ids: list[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids if token_id != EOS)


def requests(world: World, seed: int) -> list[Request]:
    rng, at_s, found = random.Random(seed), world.kernel.now_s, []
    for number in range(NUM_REQUESTS):
        at_s += rng.expovariate(100.0)
        params = SamplingParams(
            seed=rng.randrange(1 << 32), max_tokens=rng.choice([3, 40]), grammar=rng.choice([JSON, JSON, ENDLESS])
        )
        prompt = tuple(rng.randrange(64) for _ in range(rng.randint(1, 30)))
        found.append(Request(f"r{number}", prompt, params, at_s, num_choices=rng.choice([1, 1, 3])))
    return found


def serve(spec: WorldSpec, crashes: dict[str, float] | None = None) -> World:
    world = World(spec)
    for request in requests(world, spec.seed):
        world.ask(request)
    for worker_id, after_s in (crashes or {}).items():
        world.crash(worker_id, world.kernel.now_s + after_s)
    return world.run()


def check(world: World) -> None:
    for in_flight in world.requests.values():
        request = in_flight.request
        if not request.sampling.grammar:
            assert in_flight.error is None
            continue
        right = [expected(request, choice) for choice in range(request.num_choices)]
        if isinstance(in_flight.error, WorkersDiedError) or in_flight.is_cancelled:
            assert all(there[: len(here)] == here for here, there in zip(in_flight.tokens, right, strict=True))
            continue
        assert in_flight.error is None
        assert in_flight.tokens == right
        for output in in_flight.tokens:
            if EOS in output and request.sampling.grammar == JSON:
                assert output.index(EOS) == len(output) - 1
                assert set(json.loads(text_of(output))) == {"a", "b"}
        assert not in_flight.journal.dropped["disagreed"]


@pytest.mark.long
def test_every_choice_follows_its_grammar_and_ends_where_it_ends() -> None:
    world = serve(WorldSpec(seed=1))
    check(world)
    ended = [out for flight in world.requests.values() for out in flight.tokens if out[-1] == EOS]
    assert len(ended) > NUM_REQUESTS / 4
    assert any(out[-1] != EOS for flight in world.requests.values() for out in flight.tokens), "some are cut short"
    assert sum(node.counters.num_masks for node in world.of_role(Role.DECODE)) > 100


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_faults_and_crashes_in_mid_json_change_no_byte(seed: int) -> None:
    spec = WorldSpec(seed=seed, link=LinkSpec(fault_share=0.03), mixed_pool_tokens=12)
    world = serve(spec, crashes={"prefill-0": 0.1, "decode-1": 0.3})
    check(world)
    moved = [flight for flight in world.requests.values() if flight.journal.attempt > 1 and flight.error is None]
    assert any(len(output) > 3 for flight in moved for output in flight.tokens)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("compile_s", [0.03, 0.4, 3.0])
def test_grammars_that_compile_slowly_hold_up_their_own_requests_only_and_nothing_is_left(
    seed: int, compile_s: float
) -> None:
    """Grants come, leases pass, clients leave and workers die meanwhile."""
    spec = WorldSpec(
        seed=seed,
        prefill=replace(PREFILL, compile_s=compile_s),
        decode=replace(DECODE, compile_s=compile_s),
        link=LinkSpec(fault_share=0.02),
        mixed_pool_tokens=12,
    )
    world = World(spec)
    for number, request in enumerate(requests(world, seed)):
        world.ask(request)
        if number % 5 == 0:
            world.leave(request.request_id, request.arrived_s + 0.02 * number)
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    world.ask(Request("plain", (1, 2, 3), plain, world.kernel.now_s + 0.01))
    world.crash("prefill-0", world.kernel.now_s + 0.15)
    world.run()
    check(world)


@pytest.mark.long
def test_a_preempted_choice_goes_on_in_its_grammar() -> None:
    world = serve(WorldSpec(seed=1, decode=replace(DECODE, num_pages=26)))
    check(world)
    assert sum(node.counters.num_preemptions for node in world.of_role(Role.DECODE))


@pytest.mark.long
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_masks_that_are_late_change_no_byte_and_hold_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A choice whose mask is not there is computed again at the next step, whatever else that step is about."""
    rng, num_late = random.Random(1), 0

    def late(_: Guides, guides: Sequence[Guide | None], *, awaits_one: bool) -> set[int]:
        nonlocal num_late
        found = {at for at, guide in enumerate(guides) if guide is not None and rng.random() < share}
        if awaits_one and len(found) == len(guides):
            found.pop()
        num_late += len(found)
        return found

    monkeypatch.setattr(Guides, "late", late)
    spec = WorldSpec(seed=3, decode=replace(DECODE, num_pages=26), mixed_pool_tokens=12)
    world = World(spec)
    for request in requests(world, spec.seed)[:20]:
        world.ask(request)
    plain = SamplingParams(max_tokens=40, ignore_eos=True)
    world.ask(Request("plain", (1, 2, 3), plain, world.kernel.now_s))
    world.run()
    check(world)
    assert world.requests["plain"].error is None
    assert len(world.requests["plain"].tokens[0]) == 40
    assert 100 < sum(node.counters.num_late_masks for node in world.of_role(Role.DECODE)) <= num_late


def test_rows_without_a_grammar_ask_for_no_mask() -> None:
    world = World(WorldSpec())
    world.ask(Request("plain", (1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True), world.kernel.now_s))
    world.run()
    assert not any(node.counters.num_masks for role in (Role.PREFILL, Role.DECODE) for node in world.of_role(role))


@pytest.mark.parametrize("grammar", ["no grammar at all", LLMatcher.grammar_from_regex("(")])
def test_a_grammar_that_does_not_compile_ends_its_request_alone(grammar: str) -> None:
    world = World(WorldSpec(mixed_pool_tokens=12))
    start_s = world.kernel.now_s
    for number, params in enumerate([SamplingParams(max_tokens=5, grammar=grammar), SamplingParams(max_tokens=5)]):
        world.ask(Request(f"r{number}", (1, 2, 3), params, start_s))
    world.run()
    assert isinstance(world.requests["r0"].error, InvalidRequestError)
    assert world.requests["r1"].error is None


def test_what_a_journal_holds_against_its_grammar_is_an_error_of_that_request() -> None:
    """A worker that is told so must not go on with it."""
    guides = World(WorldSpec()).of_role(Role.DECODE)[0].guides
    made: list[Any] = []
    guides._submit, guides._compiler = lambda call: call(), InlineExecutor()
    guides.prepare(JSON, [[TEXTS.index("{")], [TEXTS.index("x")]], made.append)
    assert "does not follow the grammar" in made[0].message
