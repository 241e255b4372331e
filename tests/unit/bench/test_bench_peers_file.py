"""Servers side by side: the order, the file, and which code its runs are of."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.code import Code
from benchmarks.peers.turns import (
    LOADS,
    GoodputLoad,
    Measured,
    Plan,
    Turn,
    chosen_loads,
    read,
    seed_of,
    turns,
)
from tandem.core.errors import ConfigError

A, B, C, D, E, F = LOADS
SETTINGS: dict[str, Any] = {"machine": {"num_cores": 2}, "seed": 1, "loads": {"A": A.settings()}}


# --- the order --------------------------------------------------------------------------------------------------------


def test_servers_take_turns_to_begin_and_do_all_loads_in_each() -> None:
    plan = Plan(("tandem", "peer"), (A, B), num_repetitions=2, goodput=GoodputLoad("trace.csv"))
    assert list(turns(plan)) == [
        Turn(1, "tandem", (A, B)),
        Turn(1, "peer", (A, B)),
        Turn(2, "peer", (A, B)),
        Turn(2, "tandem", (A, B)),
        Turn(1, "tandem", has_goodput=True),
        Turn(1, "peer", has_goodput=True),
    ]


def test_what_is_done_is_not_done_again() -> None:
    plan = Plan(("tandem", "peer"), (A, B), num_repetitions=2, goodput=GoodputLoad("trace.csv"))
    done = {("tandem", "A", 1), ("tandem", "B", 1), ("peer", "A", 1), ("peer", "A", 2), ("peer", "B", 2)}
    assert list(turns(plan, done, {"tandem"})) == [
        Turn(1, "peer", (B,)),
        Turn(2, "tandem", (A, B)),
        Turn(1, "peer", has_goodput=True),
    ]


def test_every_load_of_every_repetition_has_prompts_of_its_own() -> None:
    plan = Plan(("tandem",), LOADS)
    seeds = [seed_of(plan, load.name, repetition) for repetition in (1, 2, 3) for load in LOADS]
    assert len(set(seeds)) == len(seeds)
    assert seed_of(replace(plan, loads=(B,)), "B", 2) == seed_of(plan, "B", 2)


def test_loads_are_chosen_by_name() -> None:
    assert chosen_loads(["C", "A"]) == (A, C)
    assert chosen_loads(["D"], 3) == (replace(D, num_requests=3),)
    assert chosen_loads([]) == ()
    with pytest.raises(ConfigError, match="no load is called G; there are A, B, C, D, E, F"):
        chosen_loads(["A", "G"])


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_holds_each_run_as_soon_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "peers.json"
    measured = Measured.opened(path, SETTINGS)
    assert not path.exists()
    measured.add_run({"contestant": "tandem", "load": "A", "repetition": 1})
    measured.add_goodput({"contestant": "peer"})
    # Another load later, in the same file.
    again = Measured.opened(path, {**SETTINGS, "loads": {"B": B.settings()}})
    assert again.done == {("tandem", "A", 1)}
    assert again.done_goodput == {"peer"}
    again.add_run({"contestant": "tandem", "load": "B", "repetition": 1})
    assert read(path)["settings"]["loads"] == {"A": A.settings(), "B": B.settings()}
    assert [path.name for path in path.parent.iterdir()] == ["peers.json"]
    assert sum('"repetition"' in line for line in path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"machine": {"num_cores": 4}}, "machine.num_cores is 2 there and 4 here"),
        ({"loads": {"A": replace(A, num_requests=8).settings()}}, "loads.A.num_requests is 64 there and 8 here"),
    ],
)
def test_runs_of_other_settings_do_not_join(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    Measured.opened(path, SETTINGS).add_run({"contestant": "tandem", "load": "A", "repetition": 1})
    with pytest.raises(ConfigError, match=f"{said}.*--fresh"):
        Measured.opened(path, {**SETTINGS, **settings})
    assert Measured.opened(path, {**SETTINGS, **settings}, is_fresh=True).runs == []


def test_what_other_code_did_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    old = Measured.opened(path, SETTINGS)
    for contestant, code in (("tandem", {"digest": "old"}), ("strict", {"digest": "new"}), ("peer", None)):
        old.add_run({"contestant": contestant, "code": code, "load": "A", "repetition": 1})
        old.add_goodput({"contestant": contestant, "code": code})
        old.add_answers({"contestant": contestant, "code": code, "answers": []})
    old.add_run({"contestant": "strict", "load": "A", "repetition": 2})  # as the file was before code was recorded

    now = Measured.opened(path, SETTINGS, digests={"tandem": "new", "strict": "new"})
    assert now.done == {("strict", "A", 1), ("peer", "A", 1)}
    assert now.done_goodput == now.done_answers == {"strict", "peer"}
    assert now.num_outdated == 3
    assert len(read(path)["runs"]) == 4, "nothing is lost before there is something new"
    now.add_run({"contestant": "tandem", "code": {"digest": "new"}, "load": "A", "repetition": 1})
    assert len(read(path)["runs"]) == 3
    # What is not measured now is left as it is.
    assert Measured.opened(path, SETTINGS, digests={"strict": "newest"}).done == {("peer", "A", 1), ("tandem", "A", 1)}


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('{"format": "tandem-bench/1"}')
    with pytest.raises(ConfigError, match="no file of a comparison"):
        Measured.opened(path, SETTINGS)
    assert path.read_text() == '{"format": "tandem-bench/1"}'


# --- the code ---------------------------------------------------------------------------------------------------------


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    answer = subprocess.run(
        ("git", "-C", str(directory), *identity, *arguments), check=True, capture_output=True, text=True
    )
    return answer.stdout.strip()


@pytest.mark.processes
def test_code_is_known_by_its_commit_and_its_sources(tmp_path: Path) -> None:
    for name in ("tandem", "router"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("a\n")
    git(tmp_path, "init", "-q")
    assert Code.of(tmp_path) == Code(Code.of(tmp_path).digest), "git does not know these files yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    clean = Code.of(tmp_path)
    assert (clean.commit, clean.is_dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    # Text beside the sources changes nothing, also when it is committed.
    (tmp_path / "tandem" / "README.md").write_text("read me")
    assert Code.of(tmp_path) == clean
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "two")
    later = Code.of(tmp_path)
    assert (later.digest, later.is_dirty) == (clean.digest, False)
    assert later.commit != clean.commit

    digests = {clean.digest}
    for path, text in (("tandem/a.py", "b\n"), ("tandem/new/b.py", ""), ("router/a.py", "a\n\n")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        changed = Code.of(tmp_path)
        assert (changed.commit, changed.is_dirty) == (later.commit, True)
        digests.add(changed.digest)
    assert len(digests) == 4


@pytest.mark.processes
def test_code_outside_a_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "a.py").write_text("a\n")
    found = Code.of(tmp_path)
    assert (found.commit, found.is_dirty) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Code.of(tmp_path) == found, "there is no git either"
