"""Start, drain, failure and stop of a worker, at whatever point: threads, descriptors and clients' streams all end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

import tandem.worker.parts
from decode_worker.worker import DecodeWorker
from kvtransfer.protocol.messages import AttemptKey
from kvtransfer.transports.loopback import LoopbackTransport
from prefill_worker.worker import PrefillWorker
from tandem.core.errors import CancelledError, InternalError, TandemError, TransportError
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.rpc import duplex
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import control_pb2, control_pb2_grpc, decode_pb2
from tandem.worker.request import AttemptFailed
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import (
    CONFIG,
    SHARED_LOOP,
    AnyWorker,
    Gate,
    Oracle,
    WorkerPair,
    make_worker,
    prompt_of,
)

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

# Loopback: what is asked here has nothing to do with the way pages travel.
LOOPBACK = CONFIG | {"transport": {"name": "loopback", "lease_s": 5.0}}
ROLES = [PrefillWorker, DecodeWorker]


def a_worker(cls: type[Any], model_dir: Path, config: dict[str, Any] = LOOPBACK) -> Any:
    return make_worker(cls, model_dir, 64, config, name=f"{cls.role}-life")


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.endswith("-life")]


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    yield
    await until(lambda: not own_threads(), "the end of all threads", 3)


@pytest_asyncio.fixture(loop_scope="session")
async def life(worker_model_dir: Path) -> AsyncIterator[WorkerPair]:
    """A pair of its own for one test; stopping it again does no harm."""
    prefill, decode = a_worker(PrefillWorker, worker_model_dir), a_worker(DecodeWorker, worker_model_dir)
    pair = WorkerPair(prefill, decode)
    prefill.start()
    decode.start()
    yield pair
    await asyncio.to_thread(pair.stop)


async def drain(worker: AnyWorker) -> None:
    async with make_channel(worker.parts.info.address) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        await stub.Drain(control_pb2.DrainWorkerRequest(), timeout=20)


async def test_a_worker_that_is_asked_to_stop_says_so_to_whoever_waits(life: WorkerPair) -> None:
    worker = life.decode
    waiting = asyncio.create_task(asyncio.to_thread(lambda: life.decode_process.wait_closed(20)))
    async with make_channel(worker.parts.info.address) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        await stub.Stop(control_pb2.StopWorkerRequest(), timeout=20)
        assert await waiting
        await stub.Status(control_pb2.StatusRequest(), timeout=20)  # it serves on until it is stopped


# ---- the next life


@pytest.mark.parametrize("first", ROLES)
async def test_the_model_serves_on_in_the_other_role(worker_model_dir: Path, oracle: Oracle, first: type[Any]) -> None:
    (second,) = (cls for cls in ROLES if cls is not first)
    life, other = a_worker(first, worker_model_dir), a_worker(first, worker_model_dir)
    life.start()
    life.stop()
    kept = life.kept_engine
    assert kept is life.parts.engine
    changed = make_worker(second, worker_model_dir, 64, LOOPBACK, name=f"{second.role}-life", engine=kept)
    other.start()
    changed.start()
    pair = WorkerPair(changed, other) if second is PrefillWorker else WorkerPair(other, changed)
    try:
        assert changed.parts.engine is kept
        async with Router(pair) as router:
            (told,) = await router.ask(Ask(prompt_of(60)))
    finally:
        await asyncio.to_thread(pair.stop)
    assert told.ids() == oracle.greedy(prompt_of(60), 12)


@pytest.mark.parametrize("state", ["used", "quarantined"])
async def test_a_process_with_pages_that_a_write_may_reach_has_no_next_life(worker_model_dir: Path, state: str) -> None:
    worker = a_worker(DecodeWorker, worker_model_dir)
    worker.start()
    pages = worker.parts.pool.allocate(2)
    if state == "quarantined":
        worker.parts.pool.quarantine(pages)
    await asyncio.to_thread(worker.stop)
    assert worker.kept_engine is None


# ---- drain


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_draining_worker_finishes_what_it_holds_and_takes_no_more(life: WorkerPair, side: str) -> None:
    worker = getattr(life, side)
    async with Router(life) as router:
        with Gate(worker.parts.engine, "forward", first=1) as gate:
            held = await router.begin(Ask(prompt_of(60)))
            await gate.wait()
            draining = asyncio.create_task(drain(worker))
            await until(lambda: worker.parts.life.draining, "the drain")
            late = await router.begin(Ask(prompt_of(20)))
            assert not draining.done()
            gate.open()
            await router.heard(late, f"{side}.failed")
            failure = router.outcomes[late.key].failures[side]
            assert (failure.code, failure.retryable) == ("draining", True)
            await router.cancel(late)
            await router.finish(held)
        await draining
        assert (life.prefill.core.num_wanted if side == "prefill" else life.decode.num_held()) == 0
        # Decode may ask only now that prefill confirms an idle grant: that of the late one, which it had never begun.
        await until(lambda: worker.num_held() == 0, "the answer to it")
        await router.until(lambda: router.statuses[side].draining, "the word of it")


async def test_an_idle_worker_is_drained_at_once(life: WorkerPair) -> None:
    await asyncio.gather(drain(life.prefill), drain(life.prefill), drain(life.decode))


async def test_a_drain_ends_when_the_last_request_is_cancelled(life: WorkerPair) -> None:
    async with Router(life) as router:
        router.attaches = False
        ask = await router.begin(Ask(prompt_of(20)))
        await router.heard(ask, "decode.granted")
        drains = [asyncio.create_task(drain(w)) for w in (life.prefill, life.decode)]
        await until(lambda: life.prefill.parts.life.draining and life.decode.parts.life.draining, "the drains")
        await router.cancel(ask)
        await asyncio.gather(*drains)


async def test_a_draining_decode_worker_refuses_what_waits_at_once(life: WorkerPair) -> None:
    """So that the router places it elsewhere; what runs goes on to its end, and does not come to it before."""
    decode = life.decode
    async with Router(life) as router:
        running = await router.begin(Ask(prompt_of(20), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)))
        await router.until(lambda: router.outcomes[running.key].tokens[0], "a token")
        with life.hogged(decode, num_free=0):
            queued = [await router.begin(Ask(prompt_of(40))), await router.reserve(Ask(prompt_of(41), local=512))]
            await until(lambda: len(decode.core.ledger.waiting) == 2, "two that wait")
            draining = asyncio.create_task(drain(decode))
            for ask in queued:
                await router.heard(ask, "decode.failed")
                failure = router.outcomes[ask.key].failures["decode"]
                assert (failure.code, failure.retryable) == ("draining", True)
            assert not draining.done()
            await until(lambda: decode.num_held() == 1, "only what runs")
        await router.finish(running)
        await draining
        await router.cancel(queued[0])
        await life.settled()


async def test_a_draining_decode_worker_still_takes_what_it_granted(life: WorkerPair) -> None:
    async with Router(life) as router:
        router.attaches = False
        granted = await router.begin(Ask(prompt_of(40)))
        await router.heard(granted, "decode.granted")
        with Gate(life.decode.parts.engine, "forward", first=1) as gate:
            here = await router.reserve(Ask(prompt_of(60), local=512))
            await gate.wait()
            draining = asyncio.create_task(drain(life.decode))
            await until(lambda: life.decode.parts.life.draining, "the drain")
        assert not draining.done()
        await router.attach(granted)
        for ask in (granted, here):
            await router.finish(ask)
        await draining


async def test_a_drain_does_not_outlive_its_worker(life: WorkerPair) -> None:
    async with Router(life) as router:
        router.attaches = False
        await router.heard(await router.begin(Ask(prompt_of(20))), "decode.granted")
        draining = asyncio.get_running_loop().run_in_executor(None, life.decode_process.drain)
        await until(lambda: life.decode.parts.life.draining, "the drain")
        await asyncio.to_thread(life.decode_process.stop)
        await asyncio.wait_for(draining, 60)


async def test_a_worker_that_closes_its_connections_hears_of_no_more_ends(life: WorkerPair) -> None:
    """All workers of a cluster end at about the same time; each end would change what is being closed."""
    decode = life.decode
    told: list[str] = []
    other = await asyncio.create_subprocess_exec("sleep", "60")
    life.decode_process._loop_thread.loop.call_soon_threadsafe(
        decode.parts.exits.watch, "other", other.pid, lambda: told.append("its end")
    )

    async def close(grace: float | None) -> None:
        told.append("closes")
        os.kill(other.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)

    decode._channels["another"] = cast(Any, SimpleNamespace(close=close))
    await asyncio.to_thread(life.decode_process.stop)
    await other.wait()
    assert told == ["closes"]


# ---- a router that hangs


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_router_that_reads_nothing_loses_its_requests(
    life: WorkerPair, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is alive, and stuck in a write: what it had started ends all the same, and others go on."""
    monkeypatch.setattr(duplex, "_MAX_PENDING_MESSAGES", 8)
    worker = getattr(life, side)
    async with Router(life, "good") as good:
        hung = Router(life, "hung")
        hung.attaches = False
        async with hung:
            ask = await hung.begin(Ask(prompt_of(40)))
            await hung.heard(ask, "decode.granted", "prefill.started")
            hung.stop_reading(side)
            event = AttemptFailed(AttemptKey("nobody", 0), InternalError("x" * 100_000))
            num_sent = 0
            while len(worker.hub._sessions) > 1:
                assert num_sent < 200, "it is still not cut off"
                worker.hub.broadcast([event])
                num_sent += 1
                await good.heard_of("nobody", num_sent, side)
            await hung.cancel(ask, "decode" if side == "prefill" else "prefill")
            await life.settled()
            monkeypatch.undo()  # eight steps of this model take less than their way to a router that reads
            await good.ask(Ask(prompt_of(20)))


# ---- stop


@pytest.mark.parametrize("held", ["nothing", "prefill", "decode"])
async def test_stop_with_work_in_hand(life: WorkerPair, held: str) -> None:
    async with Router(life) as router:
        if held != "nothing":
            with Gate(getattr(life, held).parts.engine, "forward", first=1) as gate:
                await router.begin(Ask(prompt_of(60), SamplingParams(temperature=0, max_tokens=300)))
                await gate.wait()
                stopping = (life.prefill_process, life.decode_process)
                stops = asyncio.gather(*(asyncio.to_thread(process.stop) for process in stopping))
                await router.until(lambda: len(router.ended) == 2, "the end of both streams")
                gate.open()
                await stops
        processes = (life.prefill_process, life.decode_process)
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes * 2))
        for process in processes:
            process.wait_closed()
            process.parts.pool.check()
            assert not process.parts.transfer.is_alive
        assert not own_threads()


def opens(sender: str) -> decode_pb2.CommitCall:
    return decode_pb2.CommitCall(opened=decode_pb2.CommitsOpened(sender_incarnation=sender))


async def test_a_stream_of_commits_is_of_one_writer_that_has_paired(life: WorkerPair) -> None:
    async with Router(life) as router:
        await router.ask(Ask(prompt_of(20)))
        mine = life.prefill.parts.incarnation
        for names in (["prefill-7#1"], [""], [mine, mine], [mine, "prefill-7#1"]):
            commits = router.stub("decode").Commits()
            for name in names:
                await commits.write(opens(name))
            async with asyncio.timeout(10):
                answers = [answer async for answer in commits]
            assert answers == [decode_pb2.CommitAnswer()] * (len(names) - 1)
            assert await commits.code() is grpc.StatusCode.OK
        ask = Ask(prompt_of(30))
        (outcome,) = await router.ask(ask)  # its answer finds no stream, and is asked for on another
        await router.heard(ask, "prefill.handoff_done")
        assert outcome.finished


async def test_a_stop_ends_the_streams_of_commits_in_order(life: WorkerPair) -> None:
    """It does not wait until the server cuts them off."""
    async with Router(life) as router:
        await router.ask(Ask(prompt_of(20)))  # they are paired from now on
        commits = router.stub("decode").Commits()
        await commits.write(opens(life.prefill.parts.incarnation))
        assert await commits.read() == decode_pb2.CommitAnswer()
        await asyncio.to_thread(life.decode_process.stop)
        assert await commits.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("cls", ROLES)
async def test_starts_and_stops_leave_no_descriptor(worker_model_dir: Path, cls: type[Any]) -> None:
    counts = []
    for _ in range(3):
        worker = a_worker(cls, worker_model_dir)
        await asyncio.to_thread(worker.start)
        await asyncio.to_thread(worker.stop)
        counts.append(num_descriptors())
    assert counts[2] <= counts[1] + 1, counts


async def test_stop_before_start(worker_model_dir: Path) -> None:
    worker = a_worker(DecodeWorker, worker_model_dir)
    worker.stop()
    worker.stop()
    worker.wait_closed()
    with pytest.raises(CancelledError, match="stopped while it started"):
        worker.start()


@pytest.mark.parametrize("cls", ROLES)
async def test_stop_while_it_loads(worker_model_dir: Path, cls: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = a_worker(cls, worker_model_dir)
    with Gate(SimpleNamespace(warmup=lambda: None), "warmup") as gate:
        monkeypatch.setattr(Engine, "warmup", lambda _engine, _max_num_seqs: gate())
        started = asyncio.get_running_loop().run_in_executor(None, worker.start)
        await gate.wait()
        stopped = asyncio.get_running_loop().run_in_executor(None, worker.stop)
        await until(lambda: worker.life.stopping, "the wish to stop")
        gate.open()
        with pytest.raises(CancelledError):
            await started
        await stopped


# ---- a start that fails


@pytest.mark.parametrize("cls", ROLES)
async def test_a_port_that_is_taken(worker_model_dir: Path, cls: type[Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = a_worker(cls, worker_model_dir)
        worker.place = replace(worker.place, port=taken.getsockname()[1])
        with pytest.raises((OSError, RuntimeError)):
            await asyncio.to_thread(worker.start)
    assert not own_threads()
    await asyncio.to_thread(worker.stop)
    with pytest.raises((OSError, RuntimeError)):
        worker.wait_closed()


@pytest.mark.parametrize("step", ["load", "register", "metadata"])
@pytest.mark.parametrize("cls", ROLES)
async def test_a_start_that_fails_half_way_leaves_nothing(
    worker_model_dir: Path, cls: type[Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise TransportError("no such luck")

    if step == "load":
        monkeypatch.setattr(tandem.worker.parts, "create_transport", fail)
    else:
        monkeypatch.setattr(LoopbackTransport, step, fail)
    worker = a_worker(cls, worker_model_dir)
    with pytest.raises(TandemError, match="no such luck"):
        await asyncio.to_thread(worker.start)
    assert not own_threads()
    await asyncio.to_thread(worker.stop)


# ---- failure


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_failed_runner_fails_the_worker(life: WorkerPair, side: str) -> None:
    """Three steps in a row: the process is no use any more, and says why."""
    worker, process = getattr(life, side), getattr(life, f"{side}_process")

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    async with Router(life) as router:
        worker.parts.engine.forward = failing
        for n in range(3):
            ask = await router.begin(Ask(prompt_of(20, seed=n)))
            if n < 2:
                await router.heard(ask, f"{side}.failed")
        with pytest.raises(RuntimeError, match="out of luck"):
            await asyncio.to_thread(process.wait_closed)
        await asyncio.to_thread(process.stop)
        await router.until(lambda: side in router.ended, "the end of the stream")


async def test_a_defect_of_the_receiver_driver_is_not_swallowed(life: WorkerPair) -> None:
    def failing(*_: Any) -> Any:
        raise KeyError("lost")

    life.decode.driver.commit = failing  # type: ignore[method-assign]
    async with Router(life) as router:
        ask = await router.begin(Ask(prompt_of(20)))
        with pytest.raises(KeyError, match="lost"):
            await asyncio.to_thread(life.decode_process.wait_closed)
        await router.cancel(ask)


async def test_a_worker_that_failed_says_so_even_when_it_is_stopped(life: WorkerPair) -> None:
    life.decode.parts.life.fail(InternalError("first"))
    life.decode.parts.life.fail(InternalError("second"))
    await asyncio.to_thread(life.decode_process.stop)
    with pytest.raises(InternalError, match="first"):
        life.decode_process.wait_closed()
