"""The pages between two workers: where they land, what is refused, and that the checks would notice wrong ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import prefill_worker.queued_driver
import prefill_worker.sender_driver
import tandem.engine.engine
from decode_worker.commits import Stream
from kvtransfer.extents import Descriptor
from kvtransfer.protocol.arrivals import ArrivedDigests
from kvtransfer.protocol.messages import AttemptKey, Commit, FirstToken, RefusalReason
from tandem.core.errors import TransportError
from tandem.engine.engine import Engine
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2
from tandem.worker.wire import call_to_message, commit_to_proto
from tests.support.scripted_router import Ask, Router, ask_commits
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    PAGE,
    SHARED_LOOP,
    Gate,
    HeldCommits,
    Oracle,
    Stash,
    WorkerPair,
    prompt_of,
    running_pair,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

NUM_LAYERS = 3
LEASE_S = 2.0


@pytest.fixture
def pair_with_scratch_pages(worker_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPair]:
    """Workers whose engines have a page for themselves, as on a GPU: padding of captured steps is written to it."""
    warmup = Engine.warmup
    monkeypatch.setattr(tandem.engine.engine, "_has_scratch_page", lambda backend, device: True)
    monkeypatch.setattr(Engine, "warmup", lambda engine, _max_num_seqs: warmup(engine, 0))  # nothing is captured here
    with running_pair(worker_model_dir, decode_pages=100) as pair:
        yield pair


async def test_a_page_that_is_the_engines_own_moves_no_layer(
    pair_with_scratch_pages: WorkerPair, oracle: Oracle
) -> None:
    """Layers lie one after the other: where the second begins follows from all pages, not from those of sequences."""
    pair = pair_with_scratch_pages
    assert pair.decode.parts.engine.arena.num_pages == pair.decode.parts.pool.num_pages + 1
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        (outcome,) = await router.ask(ask)
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    assert not outcome.failures
    await pair.settled()


async def test_no_grant_waits_for_a_decode_step(pair: WorkerPair) -> None:
    """Neither one that finds room nor one whose pages somebody else gives back, while a step hangs."""
    async with Router(pair) as router:
        router.attaches = False
        with Gate(pair.decode.parts.engine, "forward", first=1) as gate:
            running = await router.reserve(Ask(prompt_of(20), local=512))
            await gate.wait()
            large = await router.reserve(Ask(prompt_of(500)))
            await router.heard(large, "decode.granted")
            waits = await router.reserve(Ask(prompt_of(100)))
            await until(lambda: pair.decode.core.ledger.waiting, "one that waits")
            await router.cancel(large, "decode")
            await router.heard(waits, "decode.granted")
            await router.cancel(waits, "decode")
        await router.finish(running)


# ---- where the pages land


async def check_placement(pair: WorkerPair, asks: list[Ask]) -> None:
    """Bytes of each (layer, page of the prompt), here and there, when decode is about to compute its first step."""
    local: dict[tuple[AttemptKey, int, int], int] = {}
    sealed = pair.prefill.driver.sealed

    def watched(parts: Any) -> None:
        for part in parts:
            for n, page in enumerate(part.local_pages):
                local.update({(part.key, layer, part.first_index + n): page for layer in part.layers})
        sealed(parts)

    pair.prefill.driver.sealed = watched  # type: ignore[method-assign]
    try:
        async with Router(pair) as router:
            with Gate(pair.decode.parts.engine, "forward") as gate:
                with HeldCommits(pair.prefill):  # a runner that is held in its first step grants nothing more
                    for ask in asks:
                        await router.begin(ask)
                    for ask in asks:
                        await router.heard(ask, "decode.granted")
                for ask in asks:
                    await router.until(
                        lambda a=ask: (
                            "prefill.handoff_done" in router.outcomes[a.key].kinds  # type: ignore[misc]
                            or router.outcomes[a.key].failures
                        ),
                        "the handoff",
                    )
                    assert not router.outcomes[ask.key].failures, router.outcomes[ask.key].failures
                    grant = router.outcomes[ask.key].grant
                    assert grant is not None
                    compare(pair, ask, local, [*grant.pages], grant.num_cached_pages)
                gate.open()
            for ask in asks:
                await router.finish(ask)
    finally:
        del pair.prefill.driver.sealed
        await pair.settled()


def compare(pair: WorkerPair, ask: Ask, local: dict[Any, int], remote: list[int], first: int) -> None:
    here, there = pair.prefill.parts.engine.arena, pair.decode.parts.engine.arena
    assert first + len(remote) == -(-len(ask.prompt) // PAGE)
    for layer in range(NUM_LAYERS):
        for index, page in enumerate(remote, first):
            sent = here.extent_view(layer, local[ask.key, layer, index])
            assert any(sent), f"{ask.key}: layer {layer} page {index} is empty"
            assert sent == there.extent_view(layer, page), f"{ask.key}: layer {layer} page {index} differs"


def some_asks() -> list[Ask]:
    return [Ask(prompt_of(length)) for length in (40, PAGE, 100, 7)]


async def test_every_page_of_every_layer_lands_in_its_place(pair: WorkerPair) -> None:
    await check_placement(pair, some_asks())


async def test_pages_land_in_their_place_behind_cached_ones(pair: WorkerPair) -> None:
    shared = prompt_of(40)
    async with Router(pair) as router:
        await router.ask(Ask(shared + [3] * 10))
    await pair.settled()
    await check_placement(pair, [Ask(shared + [4] * 30), Ask(shared + [5] * 50)])


# ---- that these checks can fail


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes go to each other's pages."""
    merge = prefill_worker.sender_driver.merge_extents

    def wrong(writes: Any, local: Any, remote: Any) -> list[Descriptor]:
        pages = sorted({w.remote_page for w in writes})
        turned = dict(zip(pages, pages[1:] + pages[:1], strict=True))
        return merge([w._replace(remote_page=turned[w.remote_page]) for w in writes], local, remote)

    monkeypatch.setattr(prefill_worker.sender_driver, "merge_extents", wrong)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are not compared."""
    monkeypatch.setattr(ArrivedDigests, "find_mismatches", lambda *_: ())


@pytest.mark.usefixtures("swapped")
async def test_swapped_pages_are_refused(pair: WorkerPair) -> None:
    with pytest.raises(AssertionError, match="digest_mismatch"):
        await check_placement(pair, [Ask(prompt_of(100))])


@pytest.mark.usefixtures("swapped", "unchecked")
async def test_the_comparison_of_bytes_notices_swapped_pages(pair: WorkerPair) -> None:
    with pytest.raises(AssertionError, match="differs"):
        await check_placement(pair, [Ask(prompt_of(100))])


@pytest.mark.usefixtures("swapped", "unchecked")
async def test_the_comparison_of_tokens_notices_swapped_pages(pair: WorkerPair, oracle: Oracle) -> None:
    # Rotated keys know their place, so full pages may change theirs unseen: the last two are swapped, one half full.
    ask = Ask(prompt_of(90))
    async with Router(pair) as router:
        (outcome,) = await router.ask(ask)
    assert outcome.ids() != oracle.greedy(ask.prompt, 12)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_comparison_of_tokens_notices_lost_attention(pair: WorkerPair, oracle: Oracle, side: str) -> None:
    worker = getattr(pair, side)
    ask = Ask(prompt_of(100))
    forward = worker.parts.engine.forward

    def forgetful(sequences: Any, on_layer: Any = None) -> Any:
        logits = forward(sequences, on_layer)
        worker.parts.engine.arena.tensor[0, :, 1].zero_()  # values of the first layer
        return logits

    worker.parts.engine.forward = forgetful
    try:
        async with Router(pair) as router:
            await router.begin(ask)
            outcome = router.outcomes[ask.key]
            await router.until(lambda: outcome.finished or outcome.failures, "an end")
            assert outcome.failures or outcome.ids() != oracle.greedy(ask.prompt, 12)
            await router.cancel(ask)
    finally:
        del worker.parts.engine.forward


# ---- what is refused


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_one_flipped_byte_ends_the_attempt_at_both(pair: WorkerPair, side: str, oracle: Oracle) -> None:
    """Before it is sent, though sealed already; or when it has arrived, and before it is read."""
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        before_send, before_read = Stash(pair.prefill.driver, "_write"), Gate(pair.decode.driver, "on_transport")
        with before_send if side == "prefill" else before_read as held:
            await router.begin(ask)
            await held.wait()
            grant = router.outcomes[ask.key].grant
            assert grant is not None
            mine = sorted(pair.prefill.driver._entries[ask.key].pages)
            page = mine[0] if side == "prefill" else grant.pages[0]
            view = getattr(pair, side).parts.engine.arena.extent_view(0, page)
            view[5] ^= 1
        await router.heard(ask, "prefill.failed", "decode.failed")
        failures = router.outcomes[ask.key].failures
        assert {(f.code, f.reason, f.retryable) for f in failures.values()} == {("handoff", "digest_mismatch", True)}
        assert "layer 0" in failures["prefill"].message
        await pair.settled()
        # What is flipped in prefill's memory is not found in its cache again: it is computed anew.
        retry = Ask(ask.prompt, request_id=ask.request_id, attempt=2)
        (outcome,) = await router.ask(retry)
        assert outcome.ids() == oracle.greedy(ask.prompt, 12)


Change = Callable[[Commit], dict[str, Any]]
HARMLESS: dict[str, Change] = {
    "wrong_epoch": lambda c: {"epoch": c.epoch + 1},
    "wrong_attempt": lambda c: {"key": AttemptKey(c.key.request_id, 9)},
    "wrong_receiver": lambda c: {"receiver": "decode-0#before"},
    "wrong_sender": lambda c: {"sender": "prefill-7#1"},
    "unknown_grant": lambda c: {"grant_id": f"{c.receiver}/12345"},
    "bad_capability": lambda c: {"capability": bytes(len(c.capability))},
}
FATAL: dict[str, tuple[str, Change]] = {
    "layout": ("layout_mismatch", lambda c: {"layout": dataclasses.replace(c.layout, page_size=32)}),
    "weights": ("layout_mismatch", lambda c: {"layout": dataclasses.replace(c.layout, weights_sha256="other")}),
    "a page less": ("incomplete", lambda c: {"pages": c.pages[:-1]}),
    "another order": ("incomplete", lambda c: {"pages": c.pages[::-1]}),
    "a foreign page": ("outside_grant", lambda c: {"pages": (*c.pages[:-1], min({*range(128)}.difference(c.pages)))}),
    "a layer less": ("incomplete", lambda c: {"digests": c.digests[:-1]}),
    "a digest less": ("incomplete", lambda c: {"digests": (*c.digests[:-1], c.digests[-1][:-1])}),
    "another digest": ("digest_mismatch", lambda c: {"digests": (c.digests[1], *c.digests[1:])}),
}


async def commit_by_hand(pair: WorkerPair, router: Router, stash: Stash, change: Change) -> decode_pb2.CommitAnswer:
    commit: Commit = stash.first_argument
    message = commit_to_proto(dataclasses.replace(commit, **change(commit)), "prefill-0")
    (answer,) = await ask_commits(router.stub("decode"), decode_pb2.CommitCall(commit=message))
    return answer


@pytest.mark.parametrize("reason", HARMLESS)
async def test_a_commit_that_is_not_this_grants_changes_nothing(pair: WorkerPair, oracle: Oracle, reason: str) -> None:
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        with HeldCommits(pair.prefill) as stash:
            await router.begin(ask)
            await stash.wait()
            reply = await commit_by_hand(pair, router, stash, HARMLESS[reason])
            assert (reply.ok, reply.error.code, reply.error.reason) == (False, "handoff", reason)
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


@pytest.mark.parametrize("name", FATAL)
async def test_a_commit_of_something_else_ends_the_attempt(pair: WorkerPair, name: str) -> None:
    reason, change = FATAL[name]
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        with HeldCommits(pair.prefill) as stash:
            await router.begin(ask)
            await stash.wait()
            reply = await commit_by_hand(pair, router, stash, change)
            assert (reply.ok, reply.error.code, reply.error.reason) == (False, "handoff", reason)
            again = await commit_by_hand(pair, router, stash, change)
            assert again.error.reason == reason, "asking again gets the same answer"
        await router.heard(ask, "prefill.failed", "decode.failed")
        assert {f.reason for f in router.outcomes[ask.key].failures.values()} == {reason}


@pytest.mark.parametrize(
    "tokens", [(), (FirstToken(3, 5),), (FirstToken(0, 5), FirstToken(0, 6)), (FirstToken(0, 320),)]
)
async def test_first_tokens_that_make_no_sense_end_the_attempt(
    pair: WorkerPair, tokens: tuple[FirstToken, ...]
) -> None:
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        with HeldCommits(pair.prefill) as stash:
            await router.begin(ask)
            await stash.wait()
            await commit_by_hand(pair, router, stash, lambda _: {"first_tokens": tokens})
            await router.heard(ask, "decode.failed")
        await router.ask(Ask(prompt_of(61)))


async def test_strangers_cannot_touch_a_grant(pair: WorkerPair, oracle: Oracle) -> None:
    ask = Ask(prompt_of(60))
    async with Router(pair) as router:
        stub = router.stub("decode")
        with HeldCommits(pair.prefill) as stash:
            await router.begin(ask)
            await stash.wait()
            grant_id = stash.first_argument.grant_id
            fields = {"request_id": ask.request_id, "attempt": 1, "grant_id": grant_id, "sender_incarnation": "x"}
            reply = await stub.Attach(decode_pb2.AttachRequest(**fields), timeout=10)
            assert reply.error.reason == "writer_exited", "it has not paired"
            await stub.ConfirmIdle(decode_pb2.ConfirmIdleRequest(**fields), timeout=10)
            # Under the writer's own name, but without what only a holder of the grant has.
            fields |= {"sender_incarnation": pair.prefill.parts.incarnation}
            for renew in (False, True):
                reply = await stub.Attach(decode_pb2.AttachRequest(**fields, renew=renew), timeout=10)
                assert reply.error.reason == "bad_capability"
            await stub.ConfirmIdle(decode_pb2.ConfirmIdleRequest(**fields), timeout=10)
            fields |= {"grant_id": "none/1"}
            for renew in (False, True):
                reply = await stub.Attach(decode_pb2.AttachRequest(**fields, renew=renew), timeout=10)
                assert reply.error.reason == "unknown_grant"
            await stub.ConfirmIdle(decode_pb2.ConfirmIdleRequest(**fields), timeout=10)
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


async def test_a_call_that_decode_does_not_know_is_ignored_and_the_next_one_answered(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        stream = router.stub("decode").Commits(timeout=10)
        await stream.write(decode_pb2.CommitCall())
        await stream.write(decode_pb2.CommitCall(part=decode_pb2.CommitPart(grant_id="none/1")))
        answer = await stream.read()
        stream.cancel()
    assert (answer.grant_id, answer.ok, answer.error.reason) == ("none/1", False, "wrong_receiver")


# ---- which way commits go


class Ways:
    """What comes to decode, and which way: `message` or `stream`."""

    def __init__(self, pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[str] = []
        commits = pair.decode.commits
        heard, take = commits.heard, commits._take

        def hear(driver: Any, message: Any) -> None:
            self.came.append("message")
            heard(driver, message)

        def take_call(stream: Stream, call: decode_pb2.CommitCall) -> None:
            if not call.HasField("opened"):
                self.came.append("stream")
            take(stream, call)

        monkeypatch.setattr(commits, "heard", hear)
        monkeypatch.setattr(commits, "_take", take_call)


async def test_commits_and_parts_come_behind_the_pages(
    pair: WorkerPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways, ask = Ways(pair, monkeypatch), Ask(prompt_of(400))
    async with Router(pair) as router:
        with Gate(pair.prefill.parts.engine, "forward", first=3) as computing:
            await begin_attached(pair, router, ask)  # so that its pages go part by part
            await computing.wait()
            await until(lambda: ways.came, "a part of what has been computed")
        outcome = await router.finish(ask)
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    assert len(ways.came) > 1, "parts, and the commit"
    assert set(ways.came) == {"message"}
    await pair.settled()
    await until(lambda: not pair.prefill.commits._under_way, "the end of the commit")
    await until(lambda: not pair.prefill.parts.transfer._transport.wants_polling, "rest")


async def begin_attached(pair: WorkerPair, router: Router, ask: Ask) -> None:
    """With a place at decode before the last of its steps."""
    with Gate(pair.prefill.parts.engine, "forward") as computing:
        await router.begin(ask)
        await computing.wait()
        await until(lambda: ask.key in pair.prefill.core._newly_attached, "a place at decode")


async def test_the_runner_goes_on_when_the_driver_knows_what_is_computed(
    pair: WorkerPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the commit does not wait for Python's lock behind all that follows a step."""
    monkeypatch.setattr(prefill_worker.queued_driver, "COMMIT_FIRST_S", 20.0)
    ask = Ask(prompt_of(60, seed=7))
    async with Router(pair) as router:
        with Gate(pair.prefill.driver, "computed") as gate:
            await begin_attached(pair, router, ask)
            await gate.wait()
            with pytest.raises(TimeoutError):
                await router.until(lambda: router.outcomes[ask.key].tokens, "the first token", 0.3)
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


async def test_a_driver_that_hangs_does_not_hold_the_first_token(pair: WorkerPair, oracle: Oracle) -> None:
    ask = Ask(prompt_of(60, seed=8))
    async with Router(pair) as router:
        with Gate(pair.prefill.driver, "computed") as gate:
            await begin_attached(pair, router, ask)
            await gate.wait()
            await router.until(lambda: router.outcomes[ask.key].tokens, "the first token")
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


@pytest.mark.parametrize("fate", ["lost", "refused by the transport", "not carried", "no stream"])
async def test_what_cannot_go_behind_the_pages_goes_on_the_stream(
    pair: WorkerPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    transport = pair.prefill.parts.transfer._transport
    async with Router(pair) as router:
        await router.ask(Ask(prompt_of(20)))  # they are paired from now on
    (peer,) = pair.prefill.peers.peers.values()

    def refuse(*_: Any) -> None:
        raise TransportError("out of order")

    match fate:
        case "lost":
            monkeypatch.setattr(transport, "send", lambda *_: None)
        case "refused by the transport":
            monkeypatch.setattr(transport, "send", refuse)
        case "not carried":
            monkeypatch.setattr(type(transport), "carries_messages", False)
        case "no stream":
            monkeypatch.setattr(peer.commits, "is_open", False)
    ways, ask = Ways(pair, monkeypatch), Ask(prompt_of(60, seed=3))
    async with Router(pair) as router:
        (outcome,) = await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    assert set(ways.came) == {"stream"}
    await pair.settled()


async def test_a_commit_whose_answer_is_lost_with_its_stream_is_repeated_on_another(
    pair: WorkerPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Stream] = []
    tell = pair.decode.commits._tell

    def break_and_tell(sender: str, answer: decode_pb2.CommitAnswer) -> None:
        streams.append(pair.decode.commits._of_senders[sender])
        streams[0].drop()
        tell(sender, answer)

    monkeypatch.setattr(pair.decode.commits, "_tell", break_and_tell)
    ways, ask = Ways(pair, monkeypatch), Ask(prompt_of(60, seed=4))
    async with Router(pair) as router:
        (outcome,) = await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
        assert pair.decode.commits._of_senders[pair.prefill.parts.incarnation] is not streams[0]
    assert outcome.ids() == oracle.greedy(ask.prompt, 12)
    assert ways.came[-2:] == ["message", "stream"]


async def test_a_forged_message_changes_nothing_and_nobody_hears_of_it(
    pair: WorkerPair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that says nothing. The writer would give up, were it told that its commit is refused."""
    ask, driver = Ask(prompt_of(60, seed=5)), pair.decode.driver
    told = Stash(pair.decode.commits, "_tell")
    async with Router(pair) as router:
        with HeldCommits(pair.prefill) as stash, told:
            await router.begin(ask)
            await stash.wait()
            commit: Commit = stash.first_argument
            wrong = dataclasses.replace(commit, digests=commit.digests[::-1], capability=bytes(32))
            before, ignored = driver.refusals[RefusalReason.BAD_CAPABILITY], driver.num_arrivals_ignored
            name = next(iter(pair.prefill.peers.peers.values())).name
            for content in (call_to_message(wrong, "prefill-0"), b"nothing"):
                pair.prefill.parts.transfer.submit(lambda t, c=content: t.send(name, c)).result()
            await until(lambda: driver.num_arrivals_ignored > ignored, "both messages")
            assert driver.refusals[RefusalReason.BAD_CAPABILITY] == before + 1
            assert told.num_calls == 0
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
    await until(lambda: pair.decode.parts.read_status().refused["bad_capability"] > before, "its counter")


async def test_only_the_decode_worker_that_was_asked_answers_a_commit(pair: WorkerPair, oracle: Oracle) -> None:
    ask = Ask(prompt_of(60, seed=6))
    async with Router(pair) as router:
        with HeldCommits(pair.prefill) as stash:
            await router.begin(ask)
            await stash.wait()
            commit: Commit = stash.first_argument
            for receiver, grant_id in (("decode-9#1", commit.grant_id), (commit.receiver, "another")):
                answer = decode_pb2.CommitAnswer(
                    request_id=commit.key.request_id, attempt=commit.key.attempt, grant_id=grant_id, ok=True
                )
                pair.prefill._answered(receiver, answer)
                pair.prefill.parts.transfer.submit(lambda _: None).result()
                assert commit.key in pair.prefill.driver._entries, "its pages would be free before decode has read them"
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)


async def test_a_grant_of_another_request_is_not_written_into(pair: WorkerPair) -> None:
    async with Router(pair) as router:
        router.attaches = False
        mine, other = await router.begin(Ask(prompt_of(20))), await router.begin(Ask(prompt_of(21)))
        await router.heard(mine, "decode.granted")
        await router.heard(other, "decode.granted")
        await router.attach(mine, router.outcomes[other.key].grant)
        await router.heard(mine, "prefill.failed")
        assert router.outcomes[mine.key].failures["prefill"].reason == "grant_mismatch"
        await router.cancel(mine)
        await router.attach(other)
        await router.finish(other)


@pytest.mark.parametrize(("field", "value"), [("page_size", 32), ("weights_sha256", "other"), ("dtype", "float16")])
async def test_workers_that_differ_do_not_pair(pair: WorkerPair, field: str, value: Any) -> None:
    async with Router(pair) as router:
        info = pb.WorkerInfo()
        info.CopyFrom(pair.prefill.parts.info)
        info.worker_id, info.incarnation = "prefill-9", "prefill-9#1"
        setattr(info.layout, field, value)
        reply = await router.stub("decode").Pair(decode_pb2.PairRequest(prefill=info), timeout=10)
        assert reply.error.code == "incompatible"
        for word in ("prefill-9", "decode-0", field, str(value)):
            assert word in reply.error.message


# ---- time


@pytest.fixture(scope="module")
def hasty_pair(worker_model_dir: Path) -> Iterator[WorkerPair]:
    """Short leases."""
    config = CONFIG | {"transport": {"lease_s": LEASE_S, "grace_s": 0.1}}
    with running_pair(worker_model_dir, config=config) as pair:
        yield pair


async def test_a_lease_is_kept_for_as_long_as_the_prompt_takes(hasty_pair: WorkerPair, oracle: Oracle) -> None:
    pair = hasty_pair
    async with Router(pair) as router:
        with Gate(pair.prefill.parts.engine, "forward") as gate:
            ask = await router.begin(Ask(prompt_of(60)))
            await router.until_attached(ask)
            record = pair.decode.driver._handoffs.record(ask.key)
            assert record is not None
            ends_s = record.lease_ends_s
            await until(lambda: record.lease_ends_s > ends_s + LEASE_S, "several renewals")
            gate.open()
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
    await pair.settled()


async def test_a_lease_that_is_not_renewed_ends_the_attempt(hasty_pair: WorkerPair) -> None:
    pair = hasty_pair
    attach = pair.prefill.peers.attach

    async def once(*args: Any, renew: bool) -> Any:
        if renew:
            raise TransportError("not today")
        return await attach(*args, renew=renew)

    pair.prefill.peers.attach = once  # type: ignore[method-assign]
    try:
        async with Router(pair) as router:
            with Gate(pair.prefill.parts.engine, "forward") as gate:
                ask = await router.begin(Ask(prompt_of(60)))
                await router.until_attached(ask)
                await until(lambda: not pair.prefill.driver.num_handoffs, "the end of the handoff")
                gate.open()
            # The writer stops in time, by its own clock, and says so: decode has nothing to add.
            await router.heard(ask, "prefill.failed")
            failures = router.outcomes[ask.key].failures
            assert {side: f.reason for side, f in failures.items()} == {"prefill": "lease_lost"}
            await pair.settled()
    finally:
        del pair.prefill.peers.attach


async def test_every_router_hears_of_a_writer_that_does_not_answer(hasty_pair: WorkerPair) -> None:
    """The request that it wrote for is gone by then, and with it the session that had it."""
    pair = hasty_pair
    pages = pair.decode.parts.pool
    async with Router(pair, "bystander") as bystander:
        with Gate(pair.prefill.parts.engine, "forward") as gate:
            async with Router(pair) as router:
                ask = await router.begin(Ask(prompt_of(60, seed=9)))
                await router.until_attached(ask)
                with Stash(pair.prefill, "confirm_idle"):
                    router.close("decode")
                    await bystander.until(lambda: bystander.suspected, "a suspicion")
                    assert bystander.suspected[0].writer_incarnation == pair.prefill.parts.incarnation
                    assert bystander.suspected[0].writer_worker_id == "prefill-0"
                    assert pair.on_runner(pair.decode, pages.counts).quarantined == 4
            gate.open()
        await pair.settled()


async def test_a_start_that_comes_again_when_the_driver_is_through_leaves_nothing_open(
    pair: WorkerPair, oracle: Oracle
) -> None:
    async with Router(pair) as router:
        with Stash(pair.prefill, "closed") as closed:
            ask = await router.begin(Ask(prompt_of(30)))
            await closed.wait()
            assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
            await router.start(ask)
            await until(lambda: pair.prefill.driver.num_handoffs, "the handoff that is open again")
    await pair.settled()


async def test_a_reserve_that_comes_again_when_its_record_is_forgotten_queues_nothing(
    pair: WorkerPair, oracle: Oracle
) -> None:
    async with Router(pair) as router:
        with Gate(pair.decode.parts.engine, "forward") as gate:
            ask = await router.begin(Ask(prompt_of(30)))
            await gate.wait()
            handoffs = pair.decode.driver._handoffs
            record = handoffs.record(ask.key)
            assert record is not None
            pair.decode.parts.transfer.submit(lambda _: handoffs._forget(record)).result()
            await router.reserve(ask)
        assert (await router.finish(ask)).ids() == oracle.greedy(ask.prompt, 12)
    await pair.settled()
