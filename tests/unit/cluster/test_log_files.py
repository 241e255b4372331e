"""The logs of a cluster's processes: their ends, and what comes after."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tandem.cluster import log_files
from tandem.cluster.log_files import LogFiles


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for process in ("decode-0", "prefill-0", "router", "router-1", "supervisor", "watcher"):
        (tmp_path / f"{process}.log").write_text("".join(f"{process} {n}\n" for n in range(5)))
    for other in ("monitor.log", "gcs_server.out", "log_monitor.log", "decode-0.txt", "my-decode-0.log"):
        (tmp_path / other).write_text("of Ray\n")
    return tmp_path


def test_only_tandems_own_processes_are_read(directory: Path) -> None:
    files = LogFiles(directory)
    assert files.processes() == ["decode-0", "prefill-0", "router", "router-1", "supervisor", "watcher"]
    assert list(files.tail(1)) == files.processes()


def test_the_last_lines_of_one(directory: Path) -> None:
    assert LogFiles(directory, "decode-0").tail(2) == {"decode-0": "decode-0 3\ndecode-0 4\n"}
    assert LogFiles(directory, "decode-0").tail(0) == {"decode-0": ""}
    assert LogFiles(directory, "decode-0").tail(99)["decode-0"].count("\n") == 5


def test_long_logs_are_read_from_their_end(directory: Path) -> None:
    lines = [f"{n} {'x' * 200}\n" for n in range(10_000)]
    (directory / "decode-0.log").write_text("".join(lines))
    assert LogFiles(directory, "decode-0").tail(1000)["decode-0"] == "".join(lines[-1000:])


def test_of_more_lines_than_one_answer_has_the_others_come_in_the_next_ones(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_MOST_BYTES", 1 << 12)
    monkeypatch.setattr(log_files, "_BLOCK_BYTES", 1 << 10)
    texts = {process: "".join(f"{process} {n}\n" for n in range(900)) for process in ("decode-0", "router", "watcher")}
    for process, text in texts.items():
        (directory / f"{process}.log").write_text(text + "half")
    files, found, num_answers = LogFiles(directory), dict[str, str](), 0
    answer = files.tail(1_000_000)
    while answer:
        assert sum(map(len, answer.values())) <= 1 << 12
        for process, text in answer.items():
            found[process] = found.get(process, "") + text
        answer, num_answers = files.tail_on(), num_answers + 1
    assert {process: found[process] for process in texts} == texts
    assert num_answers > 8
    assert files.more(0.0) == {}


def test_lines_that_hold_a_text_are_found_beyond_what_is_given_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_MOST_BYTES", 1 << 16)
    lines = [f"{n} {'of mine ' * (n in (7, 1500, 2999))}{'x' * 200}\n" for n in range(3000)]
    (directory / "decode-0.log").write_text("".join(lines) + "half of mine")
    files = LogFiles(directory, "decode-0", holds="of mine")

    def all_of(num_lines: int) -> str:
        texts, answer = "", files.tail(num_lines)
        while answer:
            texts, answer = texts + answer["decode-0"], files.tail_on()
        return texts

    assert all_of(2999).split("\n") == [lines[n].rstrip("\n") for n in (7, 1500, 2999)] + [""]
    assert all_of(1500) == lines[1500] + lines[2999]
    with (directory / "decode-0.log").open("a") as log:
        log.write(", and its rest\n")
    assert files.more(0.0) == {"decode-0": "half of mine, and its rest\n"}


def test_what_comes_is_given_once_and_in_whole_lines(directory: Path) -> None:
    files = LogFiles(directory, "decode-0")
    files.tail(1)
    assert files.more(0.0) == {}
    with (directory / "decode-0.log").open("a") as log:
        log.write("new\nhalf of")
        log.flush()
        assert files.more(0.0) == {"decode-0": "new\n"}
        log.write(" a line\n")
    assert files.more(0.0) == {"decode-0": "half of a line\n"}
    assert files.more(0.0) == {}


def test_half_a_line_at_the_end_waits_for_its_rest(directory: Path) -> None:
    files = LogFiles(directory, "decode-0")
    with (directory / "decode-0.log").open("a") as log:
        log.write("half of")
    assert files.tail(1) == {"decode-0": "decode-0 4\n"}
    with (directory / "decode-0.log").open("a") as log:
        log.write(" a line\n")
    assert files.more(0.0) == {"decode-0": "half of a line\n"}


@pytest.mark.long
def test_a_process_that_starts_later_is_read_from_its_beginning(directory: Path) -> None:
    files = LogFiles(directory)
    files.tail(0)
    threading.Timer(0.3, (directory / "decode-7.log").write_text, ["begins\n"]).start()
    assert files.more(30.0) == {"decode-7": "begins\n"}


def test_what_is_no_text_is_shown_all_the_same(directory: Path) -> None:
    (directory / "decode-0.log").write_bytes(b"a\xff\n")
    assert LogFiles(directory, "decode-0").tail(1) == {"decode-0": "a�\n"}


def test_a_log_that_is_cut_back_is_read_from_its_beginning(directory: Path) -> None:
    """As logrotate does by `copytruncate`: whoever writes by appending goes on in the same file."""
    files = LogFiles(directory, "decode-0")
    files.tail(1)
    (directory / "decode-0.log").write_text("after\n")
    assert files.more(0.0) == {"decode-0": "after\n"}


def test_a_log_that_is_gone_keeps_nobody_from_the_others(directory: Path) -> None:
    (directory / "decode-0.log").unlink()
    (directory / "decode-0.log").symlink_to(directory / "nothing")
    files = LogFiles(directory)
    assert files.tail(1)["decode-0"] == ""
    (directory / "prefill-0.log").write_text("after\n")
    assert files.more(0.0) == {"prefill-0": "after\n"}


def test_a_line_longer_than_what_is_read_at_once_comes_in_parts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_MOST_BYTES", 1000)
    files = LogFiles(directory, "decode-0")
    files.tail(0)
    with (directory / "decode-0.log").open("a") as log:
        log.write("x" * 2500 + "\nnext\n")
    assert "".join(files.more(0.0).get("decode-0", "") for _ in range(4)) == "x" * 2500 + "\nnext\n"
