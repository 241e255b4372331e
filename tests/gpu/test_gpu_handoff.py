"""Prefill on one GPU, decode on another or in another process on the same one: the tokens are the same."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import pytest
import torch

from kvtransfer.digest import digests_of
from kvtransfer.extents import ArenaShape, PageArea, PageWrite, merge_extents
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import PeerId, WriteArrived, WriteCompleted
from kvtransfer.transports.registry import create_transport
from tandem.engine.engine import Engine, SequenceInput
from tests.support.waiting import wait_until

PAGE_SIZE = 256  # every kernel takes it
NUM_PAGES = 8
NUM_NEW = 16
TIMEOUT_S = 60.0
PROMPT = helpers.make_prompt(2 * PAGE_SIZE + 20, seed=3)
SENT_PAGES, RECEIVED_PAGES = (5, 0, 3), (1, 2, 6)


@dataclass
class End:
    """An engine on one GPU, and its transport over the engine's pages."""

    engine: Engine
    transport: Transport

    @classmethod
    def make(cls, name: str, agent_name: str, model_dir: Path, device: str) -> End:
        torch.cuda.set_device(device)
        engine = helpers.load_engine(
            model_dir, page_size=PAGE_SIZE, num_pages=NUM_PAGES, device=device, dtype="bfloat16"
        )
        engine.warmup(2)
        transport = create_transport(name, agent_name)
        arena = engine.arena
        transport.register(arena.base_address, arena.num_bytes, owner=arena.tensor, device=device)
        return cls(engine, transport)

    @property
    def shape(self) -> ArenaShape:
        layout = self.engine.layout
        return ArenaShape(layout.num_layers, self.engine.arena.num_pages, layout.extent_bytes)

    def digests(self, pages: tuple[int, ...]) -> list[tuple[int, ...]]:
        """`[layer][index into pages]`."""
        take = self.engine.device_digests() or digests_of(self.engine.arena.extent_view)
        return take([(layer, pages) for layer in range(self.engine.layout.num_layers)])

    def continued(self, token: int, pages: tuple[int, ...]) -> list[int]:
        """Decode greedily after the prompt and its first token."""
        tokens = [token]
        for start in range(len(PROMPT), len(PROMPT) + NUM_NEW):
            tokens.append(int(self.engine.forward([SequenceInput(tokens[-1:], start, pages)])[0].argmax()))
        return tokens

    def poll_until(self, is_done: Callable[[list[Any]], bool]) -> list[Any]:
        """All events until then."""
        events: list[Any] = []

        def polled() -> list[Any]:
            events.extend(self.transport.poll())
            return events

        return wait_until(polled, "the end of the write", TIMEOUT_S, wanted=is_done, every_s=0.0002)


def decode_worker(pipe: Connection, name: str, model_dir: Path, device: str) -> None:
    """Main of the decoding process: describes itself, lets the pages land, verifies them, decodes."""
    end: End | None = None
    try:
        end = End.make(name, "decode#1", model_dir, device)
        pipe.send((end.transport.metadata(), end.shape))
        peer = end.transport.connect(pipe.recv())
        end.transport.expect_incoming("grant", peer, PageArea(RECEIVED_PAGES, end.shape))
        pipe.send("granted")
        end.poll_until(lambda events: any(isinstance(event, WriteArrived) for event in events))
        token, digests = pipe.recv()
        end.transport.end_incoming("grant")
        torch.cuda.synchronize(device)
        pipe.send((end.digests(RECEIVED_PAGES) == digests, end.continued(token, RECEIVED_PAGES)))
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send(traceback.format_exc())
    finally:
        if end is not None:
            end.transport.close()


@dataclass
class DecodeProcess:
    """The decoding process, as the test talks to it."""

    process: Any
    pipe: Connection

    def receive(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), "the decoding process does not answer"
        answer = self.pipe.recv()
        assert not isinstance(answer, str) or answer == "granted", answer
        return answer


@pytest.fixture(params=["one", "two"])
def gpus(request: pytest.FixtureRequest) -> tuple[torch.device, torch.device]:
    """Where a request is prefilled, and where it is decoded."""
    if request.param == "two":
        found: tuple[torch.device, torch.device] = request.getfixturevalue("two_gpus")
        return found
    gpu = request.getfixturevalue("gpu")
    return gpu, gpu


@pytest.fixture(params=["ucx", "nccl"])
def name(request: pytest.FixtureRequest, gpus: tuple[torch.device, torch.device]) -> str:
    del gpus  # first of all they must be there
    if request.param == "ucx":
        major = (torch.version.cuda or "").partition(".")[0]
        pytest.importorskip(f"nixl_cu{major}")
    return str(request.param)


@pytest.fixture
def decode(name: str, gpus: tuple[torch.device, torch.device], model_dir: Path) -> Iterator[DecodeProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode_worker, args=(theirs, name, model_dir, str(gpus[1])), daemon=True)
    process.start()
    theirs.close()
    yield DecodeProcess(process, ours)
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def test_pages_prefilled_in_one_process_are_decoded_in_another(
    name: str, gpus: tuple[torch.device, torch.device], decode: DecodeProcess, model_dir: Path
) -> None:
    end = End.make(name, "prefill#1", model_dir, str(gpus[0]))
    try:
        metadata, remote = decode.receive()
        peer: PeerId = end.transport.connect(metadata)
        decode.pipe.send(end.transport.metadata())
        assert decode.receive() == "granted"

        logits = end.engine.forward([SequenceInput(PROMPT, 0, SENT_PAGES)], lambda layer: None)
        token = int(logits[0].argmax())
        digests = end.digests(SENT_PAGES)
        writes = [
            PageWrite(layer, here, there)
            for layer in range(end.engine.layout.num_layers)
            for here, there in zip(SENT_PAGES, RECEIVED_PAGES, strict=True)
        ]
        handle = end.transport.post_write(peer, merge_extents(writes, end.shape, remote), b"pages")
        ended = end.poll_until(lambda events: any(getattr(event, "handle", None) == handle for event in events))
        assert WriteCompleted(handle) in ended
        decode.pipe.send((token, digests))
        are_same, tokens = decode.receive()

        assert are_same
        assert tokens == end.continued(token, SENT_PAGES)
    finally:
        end.transport.close()
