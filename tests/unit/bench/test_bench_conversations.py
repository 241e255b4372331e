"""Conversations: histories that hold the server's own answers, who follows whom, and what is told of their turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from bench_peers import DONE, LAST, REFUSED, STREAM, Peer, chunk, event, serving, usage

from tandem import cli
from tandem.bench.load.conversations import Api, ConversationPlan, make_conversations
from tandem.bench.load.drive import Load
from tandem.bench.load.stream_log import StreamLog
from tandem.bench.report import results
from tandem.bench.report.results import Run
from tandem.bench.report.summary import summarise
from tandem.bench.report.tables import remarks
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.errors import ConfigError
from tests.support.router_site import opened_site, write_checkpoint

pytestmark = pytest.mark.long


def delta(content: str | None = None, finish_reason: str | None = None, **more: Any) -> bytes:
    """One event of a chat."""
    said = more if content is None else {"content": content, **more}
    choice = {"index": 0, "delta": said, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def text_of(body: dict[str, Any]) -> str:
    """All that a request says."""
    if "messages" in body:
        return "\n".join(message["content"] for message in body["messages"])
    return str(body["prompt"])


class Talker:
    """Answers the nth request with `answer <n>`, counts words as tokens, and has cached what it saw or said before."""

    def __init__(self, *, refuses: tuple[int, ...] = (), tells_cache: bool = True) -> None:
        """`refuses` are the numbers of requests, from 1."""
        self.refuses, self.tells_cache = refuses, tells_cache
        self.peer = Peer(self)
        self._num_known: dict[str, int] = {}

    async def __call__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        number = len(self.peer.bodies)
        if number in self.refuses:
            writer.write(REFUSED)
            return True
        said, answer = text_of(body), f"answer {number}"
        num = len(said.split())
        cached = max((known for text, known in self._num_known.items() if said.startswith(text)), default=0)
        self._num_known[said] = num
        events = [event(answer[:3]), event(answer[3:], "length")]
        if "messages" in body:
            events = [delta(role="assistant"), delta(answer[:3]), delta(answer[3:]), delta(finish_reason="length")]
        told = usage(2, num, cached if self.tells_cache else None)
        writer.write(STREAM)
        for content in (*events, told, DONE):
            writer.write(chunk(content))
            await asyncio.sleep(0.001)
        writer.write(LAST)
        return True


def plan(num: int = 2, num_turns: int = 3, **more: Any) -> ConversationPlan:
    return ConversationPlan(num, num_turns, num_words=4, num_output=2, **more)


async def held(talker: Talker, of: ConversationPlan, shape: Shape) -> Load:
    async with serving(talker.peer) as url:
        session = Session(Target(url, "toy", timeout_s=20.0), Workload.of_conversations(of, num_warm_up=0))
        return await session.measure(shape)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_turn_says_all_that_was_said_before(api: Api) -> None:
    talker = Talker()
    load = await held(talker, plan(2, 3, api=api), Shape(concurrency=1))
    assert [record.failure for record in load.records] == [None] * 6
    assert [record.turn for record in load.records] == [1, 2, 3] * 2
    bodies = talker.peer.bodies
    said = [text_of(body) for body in bodies]
    for before, after, number in ((0, 1, 1), (1, 2, 2), (3, 4, 4), (4, 5, 5)):
        assert said[after].startswith(said[before])
        history = said[after][len(said[before]) :].split()
        assert history[:2] == ["answer", str(number)]
        assert len(history) == 2 + 4
    assert not said[3].startswith(said[0])
    if api == "chat":
        roles = [message["role"] for message in bodies[2]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert {(body["max_tokens"], body["temperature"], body["ignore_eos"]) for body in bodies} == {(2, 0, True)}


async def test_what_was_there_before_is_the_turn_before_and_its_answer() -> None:
    load = await held(Talker(), plan(1, 3), Shape(concurrency=1))
    assert [(r.num_input, r.num_repeated, r.num_cached) for r in load.records] == [(4, 0, 0), (10, 6, 4), (16, 12, 10)]
    assert {record.num_input_asked for record in load.records} == {None}
    found = summarise(load.records, 1.0)
    assert [(t.turn, t.num, t.mean_input_tokens) for t in found.turns] == [(1, 1, 4), (2, 1, 10), (3, 1, 16)]
    assert found.turns[2].cache is not None
    assert found.turns[2].cache.of_possible == pytest.approx(10 / 12)
    assert found.cache is not None
    assert (found.cache.hit_ratio, found.cache.of_possible) == (pytest.approx(14 / 30), pytest.approx(14 / 18))
    assert found.num_wrong_input == 0


async def test_a_turn_waits_for_the_answer_before_it_and_conversations_do_not() -> None:
    num_waiting, all_there = 0, asyncio.Event()
    talker = Talker()

    async def together(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Nobody is answered before three are there."""
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 3:
            all_there.set()
        await all_there.wait()
        return await talker(body, writer)

    talker.peer.answer = together
    load = await held(talker, plan(3, 2), Shape(concurrency=3))
    assert [record.failure for record in load.records] == [None] * 6
    first = {record.number: record for record in load.records}
    for number in (0, 2, 4):
        assert first[number + 1].sent_s >= first[number].ended_s


async def test_conversations_come_at_a_rate_and_their_users_think() -> None:
    load = await held(Talker(), plan(3, 2, think_s=0.02), Shape(rate=100.0))
    assert [record.failure for record in load.records] == [None] * 6
    assert [record.planned_s is None for record in load.records] == [False, True] * 3
    thoughts = [conversation._turns[1].think_s for conversation in make_conversations(plan(3, 2, think_s=0.02), "1:0")]
    pauses = [load.records[n + 1].sent_s - load.records[n].ended_s for n in (0, 2, 4)]
    assert all(pause >= thought - 1e-3 for pause, thought in zip(pauses, thoughts, strict=True))
    assert max(thoughts) > 0


async def test_a_turn_that_fails_ends_its_conversation() -> None:
    talker = Talker(refuses=(2,))
    load = await held(talker, plan(2, 4), Shape(concurrency=1))
    assert [record.number for record in load.records] == [0, 1, 4, 5, 6, 7]
    assert [record.number for record in load.records if record.failure == "http_429"] == [1]
    assert load.num_unsent == 2


@pytest.mark.parametrize("shape", [Shape(concurrency=2), Shape(rate=5.0)])
async def test_a_run_that_is_stopped_counts_what_is_left_of_every_conversation(shape: Shape) -> None:
    """One has its second turn under way, others think or have not begun."""
    of = plan(5, 3, think_s=0.2)
    talker = Talker()
    async with serving(talker.peer) as url:
        session = Session(Target(url, "toy", timeout_s=20.0), Workload.of_conversations(of, num_warm_up=0))
        load = await session.measure(shape, watch=lambda record: record.turn == 1)
    assert load.is_partial
    assert len(load.records) < 15
    assert load.num_unsent == 15 - len(load.records)
    said = list(remarks(Run.of(shape, load, None)))
    assert f"{load.num_unsent} turns were not sent" in said


def test_turns_that_a_failure_came_before_are_said_so() -> None:
    load = Load([], 1.0, num_unsent=2)
    assert "2 turns were not sent, as one before them failed" in list(remarks(Run.of(Shape(concurrency=1), load, None)))


def test_a_seed_gives_the_same_texts_and_pauses() -> None:
    of = plan(2, 2, think_s=1.0)
    first, again, other = (make_conversations(of, seed) for seed in ("1", "1", "2"))
    said = [[(turn.text, turn.think_s) for c in side for turn in c._turns] for side in (first, again, other)]
    assert said[0] == said[1]
    assert len({text for side in (said[0], said[2]) for text, _ in side}) == 8
    assert [turn.think_s > 0 for turn in first[0]._turns] == [False, True]


def test_a_chats_role_and_its_end_say_nothing() -> None:
    log = StreamLog()
    for at_s, content in enumerate(
        [delta("", role="assistant"), delta(reasoning_content="hm"), delta("a"), delta(finish_reason="stop")]
    ):
        log.take(content.removeprefix(b"data: "), float(at_s))
    assert (log.event_s, log.text, log.finish_reason) == ([1.0, 2.0], "a", "stop")
    silent = StreamLog()
    silent.take(delta(finish_reason="stop").removeprefix(b"data: "), 1.0)
    assert (silent.event_s, silent.is_whole) == ([1.0], True)
    broken = StreamLog()
    broken.take(b'{"choices": [{"delta": 3}]}', 1.0)
    assert broken.error is not None


async def test_conversations_longer_than_the_context_are_refused() -> None:
    async with serving(Talker().peer) as url:
        workload = Workload.of_conversations(ConversationPlan(1, 6, num_words=700, num_output=20))
        with pytest.raises(ConfigError, match="longer than the context of 4096 tokens: take fewer --turns"):
            await Session(Target(url, "toy"), workload).open()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_command_tells_of_turns(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "talk.json"
    with opened_site(write_checkpoint(tmp_path / "toy"), {"transport.lease_s": 10.0}) as site:
        given = ("--conversations", "2", "--turns", "3", "--input-len", "3", "--output-len", "4", "--concurrency", "2")
        command = ["bench", "run", "--url", site.url, *given, "--api", api, "--warmup", "1", "--json", str(path)]
        assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "6 of 6 succeeded" in said
    assert "turn" in said
    content = results.read(path)
    assert (content["options"]["conversations"], content["options"]["api"]) == (2, api)
    turns = content["runs"][0]["figures"]["turns"]
    assert [(turn["turn"], turn["num"]) for turn in turns] == [(1, 2), (2, 2), (3, 2)]
    sizes = [turn["mean_input_tokens"] for turn in turns]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0
    assert cli.main(["bench", "compare", str(path), str(path)]) == 0
    assert "TTFT p50 of turn 3, ms" in capsys.readouterr().out
    if api == "completions":  # plots know of no API, and take seconds
        assert cli.main(["bench", "plot", str(path), "--output", str(tmp_path / "plots")]) == 0
        assert (tmp_path / "plots-turns.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("more", [("--trace", "x"), ("--num-requests", "3"), ("--vocab", "1:9"), ("--cut",)])
def test_what_does_not_go_with_conversations_is_refused(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "run", "--conversations", "2", "--concurrency", "1", *more]) == 1
    assert f"{more[0]} does not go with --conversations" in capsys.readouterr().err
