"""Processes of one host that serve the same weights have them in memory once, and nobody can change them."""

from __future__ import annotations

import fcntl
import gc
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.cpu import shared_weights
from tandem.engine.cpu.shared_weights import Shared, Weight, WeightRegister
from tandem.engine.cpu.vector_ir import is_fast_here
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.random_model import ModelSpec, save


class Model:
    """Of some tensors, which can be put elsewhere."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = [tensor.clone() for tensor in tensors]

    def weights(self) -> Iterator[Weight]:
        for index in range(len(self.tensors)):
            yield Weight(partial(self.tensors.__getitem__, index), partial(self.tensors.__setitem__, index))

    def share(self, register: Path, name: str = "a model") -> Shared | None:
        return WeightRegister(register).share(name, list(self.weights()))


TENSORS = torch.arange(1000.0).view(50, 20), torch.arange(77, dtype=torch.uint8), torch.ones(3, dtype=torch.bfloat16)


@pytest.fixture
def register(tmp_path: Path) -> Path:
    return tmp_path / "register"


def shared(register: Path, *tensors: torch.Tensor, name: str = "a model") -> tuple[Model, Shared]:
    model = Model(*tensors)
    found = model.share(register, name)
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(model.tensors, tensors, strict=True))
    return model, found


def lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return memory.data_ptr() <= tensor.data_ptr() <= memory.data_ptr() + memory.nbytes - tensor.nbytes


def inode(found: Shared) -> int:
    return os.fstat(found.file).st_ino


def test_the_second_uses_what_the_first_has_made(register: Path) -> None:
    first, made = shared(register, *TENSORS)
    second, found = shared(register, *TENSORS)
    assert (made.is_own, found.is_own) == (True, False)
    assert inode(made) == inode(found)
    for model, memory in ((first, made.memory), (second, found.memory)):
        assert all(lies_in(tensor, memory) for tensor in model.tensors)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in model.tensors), "kernels read whole lines"
    assert made.memory.data_ptr() % (2 << 20) == 0


@pytest.mark.long
def test_each_leaves_its_old_place_before_the_next_one_moves(register: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for one copy, and not for two."""
    model = Model(*(torch.full((1000,), float(number)) for number in range(5)))
    old = [weakref.ref(tensor) for tensor in model.tensors]
    alive: list[int] = []
    write = shared_weights._write

    def noted(*arguments: Any) -> None:
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in old))
        write(*arguments)

    monkeypatch.setattr(shared_weights, "_write", noted)
    found = model.share(register)
    assert found is not None
    assert alive == [5, 4, 3, 2, 1]


def test_who_waits_too_long_for_another_keeps_its_own(
    register: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "_PATIENCE_S", 0.1)
    with register.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert Model(*TENSORS).share(register) is None
    assert "another worker has" in caplog.text
    assert shared(register, *TENSORS)[1].is_own


def test_what_cannot_be_noted_is_shared_with_nobody_else(
    register: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.BytesIO):
        def write(self, *_: object) -> int:
            raise OSError("no space is left")

    @contextmanager
    def locked(_: object) -> Iterator[io.BytesIO]:
        yield Full()

    monkeypatch.setattr(WeightRegister, "_locked", locked)
    assert shared(register, *TENSORS)[1].is_own
    assert "will not find the weights: no space is left" in caplog.text


def test_a_register_is_no_way_to_other_files(register: Path) -> None:
    precious = register.parent / "precious"
    precious.write_text("text")
    register.symlink_to(precious)
    assert Model(*TENSORS).share(register) is None
    assert precious.read_text() == "text"


def test_nobody_can_change_it(register: Path) -> None:
    _, made = shared(register, *TENSORS)
    with pytest.raises(OSError, match=r"permitted|Bad file"):
        os.pwrite(made.file, b"x", 0)
    writable = os.open(f"/proc/self/fd/{made.file}", os.O_RDWR)
    try:
        for change in (lambda: os.pwrite(writable, b"x", 0), lambda: os.ftruncate(writable, 1)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(writable)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [(TENSORS, "another model"), ((TENSORS[0].view(20, 50), *TENSORS[1:]), "a model"), (TENSORS[:2], "a model")],
    ids=["name", "shape", "number"],
)
def test_others_have_memory_of_their_own(register: Path, tensors: tuple[torch.Tensor, ...], name: str) -> None:
    _, made = shared(register, *TENSORS)
    _, other = shared(register, *tensors, name=name)
    assert other.is_own
    assert inode(made) != inode(other)


def test_other_weights_under_the_same_name_are_not_taken(register: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, made = shared(register, *TENSORS)
    _, other = shared(register, TENSORS[0] + 1, *TENSORS[1:])
    assert other.is_own
    assert inode(made) != inode(other)
    assert f"process {os.getpid()} has other weights of the same model" in caplog.text


@pytest.mark.long
def test_what_nobody_has_any_more_is_made_anew(register: Path) -> None:
    model, made = shared(register, *TENSORS)
    before = inode(made)
    model.tensors.clear()
    del made
    gc.collect()
    _, new = shared(register, *TENSORS)
    assert new.is_own
    assert inode(new) != before
    assert len(register.read_text().splitlines()) == 1, "what has ended is forgotten"


@pytest.mark.parametrize("text", ["", "12", "x y\n", "\0\xff", "PID 0\n", "4194304 5\n1 1\n"])
def test_a_register_that_makes_no_sense_costs_a_copy(register: Path, text: str) -> None:
    register.write_text(text.replace("PID", str(os.getpid())), encoding="latin-1")
    _, made = shared(register, *TENSORS)
    assert made.is_own
    assert not shared(register, *TENSORS)[1].is_own


def test_what_is_not_sealed_is_not_taken(register: Path) -> None:
    """Its maker has died before it was whole, or means no good."""
    _, made = shared(register, *TENSORS)
    name = os.readlink(f"/proc/self/fd/{made.file}").removeprefix("/memfd:").removesuffix(" (deleted)")
    bare = os.memfd_create(name)
    try:
        os.write(bare, bytes(made.memory.numpy()))
        register.write_text(f"{os.getpid()} {bare}\n")
        assert shared(register, *TENSORS)[1].is_own
    finally:
        os.close(bare)


def test_where_it_cannot_be_had_weights_stay(register: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(*TENSORS)
    places = [tensor.data_ptr() for tensor in model.tensors]
    assert model.share(register.parent / "nowhere" / "register") is None
    assert [tensor.data_ptr() for tensor in model.tensors] == places
    assert "not shared" in caplog.text


def test_workers_far_from_each_other_do_not_share(
    register: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = min(os.sched_getaffinity(0))
    for number, cpus in enumerate([f"{cpu}-{cpu + 3}", "100000,100002-100004"]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(shared_weights, "_NODES", tmp_path)
    assert shared_weights._memory_nodes() == ["node0"]
    _, made = shared(register, *TENSORS)
    assert made.is_own
    assert not shared(register, *TENSORS)[1].is_own
    (tmp_path / "node0").rename(tmp_path / "node5")
    assert shared(register, *TENSORS)[1].is_own


_HOLDER = """
import sys
import torch
from pathlib import Path
from tandem.engine.cpu.shared_weights import Weight, WeightRegister
weights = [Weight(lambda: torch.arange(1000.0), lambda _: None)]
shared = WeightRegister(Path(sys.argv[1])).share("a model", weights)
print(shared.is_own, flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_it_outlives_its_maker_and_nobody_else(register: Path) -> None:
    tensor = torch.arange(1000.0)
    maker = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(register)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == "True\n"
    model, found = shared(register, tensor)
    assert not found.is_own
    maker.kill()
    maker.wait()
    assert torch.equal(model.tensors[0], tensor)
    assert not shared(register, tensor)[1].is_own, "found at the second one, whose maker is gone"
    model.tensors.clear()
    del found
    gc.collect()
    assert shared(register, tensor)[1].is_own


# -- engines

NEEDS_VECTORS = pytest.mark.skipif(not is_fast_here(), reason="this CPU has no vectors that the kernels need")


@pytest.mark.long
@NEEDS_VECTORS
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_engines_that_share_compute_the_same_bits(tmp_path: Path, kind: str) -> None:
    dtype = "float32" if kind == "float32" else "bfloat16"
    model_dir = save(ModelSpec(dtype=dtype, layers=2), tmp_path / "model")
    quantize = kind if kind.startswith("int") else "none"

    def load(register: Path | None) -> Engine:
        return Engine.load(model_dir, num_threads=1, num_pages=8, quantize=quantize, weight_register=register)

    own, first, second = load(None), load(tmp_path / "register"), load(tmp_path / "register")
    assert own.shared is None
    assert first.shared is not None
    assert second.shared is not None
    assert (first.shared.is_own, second.shared.is_own) == (True, False)
    assert len({engine.weights_sha256 for engine in (own, first, second)}) == 1
    for sequence in (SequenceInput(list(range(20)), 0, range(1)), SequenceInput([7], 20, range(1))):
        logits = [engine.forward([sequence]).clone() for engine in (own, first, second)]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])


@NEEDS_VECTORS
def test_all_that_is_large_lies_there(tmp_path: Path) -> None:
    """Panels and embeddings: of the model only what is small is left."""
    model_dir = save(ModelSpec(layers=2), tmp_path / "model")
    engine = Engine.load(model_dir, num_threads=1, num_pages=8, weight_register=tmp_path / "register")
    assert engine.shared is not None
    left = [p for p in engine._model.parameters() if not lies_in(p.data, engine.shared.memory)]
    assert all(p.dim() == 1 for p in left)
    panels = [m.panels for m in engine._model.modules() if hasattr(m, "panels")]
    assert len(panels) == 2 * 4 + 1
    assert all(lies_in(each.numbers, engine.shared.memory) for each in panels)


def test_a_register_that_another_has_is_waited_for_and_given_up_in_time(tmp_path: Path) -> None:
    path = tmp_path / "register"
    path.touch()
    with path.open("r+b") as late:
        with path.open("r+b") as holder:
            assert shared_weights._lock(holder, 30)
            assert not shared_weights._lock(late, 0.01)
        # The holder has closed it: the thread that still waits for `late` gets it, as does who asks again.
        assert shared_weights._lock(late, 30)
        with path.open("r+b") as third:
            assert not shared_weights._lock(third, 0.01)
