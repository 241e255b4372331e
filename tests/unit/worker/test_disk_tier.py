"""Pages in files: what comes back is what was written, by this life of the worker or the one before, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.layout import LayoutId
from tandem.worker.disk_tier import DiskTier, disk_directory

LAYOUT = LayoutId(weights_sha256="ab" * 32, dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, page_size=2)
PAGE_BYTES = LAYOUT.num_layers * LAYOUT.extent_bytes
KEYS = [bytes([number]) * 32 for number in range(8)]
MOST = 1 << 20


def page_of(key: bytes) -> memoryview:
    return memoryview((key * PAGE_BYTES)[:PAGE_BYTES])


def read(tier: DiskTier, key: bytes) -> bytes | None:
    into = memoryview(bytearray(PAGE_BYTES))
    return bytes(into) if tier.get(key, into) else None


def put(tier: DiskTier, *keys: bytes) -> None:
    """Pages of one prompt."""
    for number, key in enumerate(keys):
        tier.put(key, keys[number - 1] if number else b"", page_of(key))


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def file_bytes(tmp_path: Path) -> int:
    """Of one page's file."""
    put(DiskTier(tmp_path / "measure", LAYOUT, MOST), KEYS[0])
    (file,) = files(tmp_path / "measure")
    return file.stat().st_size


def test_what_was_written_is_read(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, *KEYS[:3])
    assert [read(tier, key) for key in KEYS[:4]] == [*(bytes(page_of(key)) for key in KEYS[:3]), None]
    assert [tier.has(key) for key in KEYS[:4]] == [True, True, True, False]
    assert tier.held()[1] == sum(file.stat().st_size for file in files(tmp_path))
    tier.discard(KEYS[0])
    assert not tier.has(KEYS[0])
    assert len(files(tmp_path)) == 2


def test_who_listens_hears_of_all_that_comes_and_goes(tmp_path: Path) -> None:
    size, told = file_bytes(tmp_path), dict[bytes, bool]()

    def opened() -> DiskTier:
        tier = DiskTier(tmp_path / "kv", LAYOUT, 3 * size)
        tier.on_change = lambda keys: told.update((key, tier.has(key)) for key in keys)
        return tier

    first = opened()
    put(first, *KEYS[:5])
    assert told == {key: first.has(key) for key in KEYS[:5]}
    assert sum(told.values()) == 3, "the others were evicted"
    held = [key for key in KEYS if first.has(key)]
    told.clear()
    second = opened()
    second.find()
    assert told == dict.fromkeys(held, True), "of an earlier life"
    second.discard(held[0])
    (file,) = [file for file in files(tmp_path / "kv") if file.parent.name + file.stem == held[1].hex()]
    file.write_bytes(b"no page")
    assert read(second, held[1]) is None
    assert told == {held[0]: False, held[1]: False, held[2]: True}


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, LAYOUT, MOST), KEYS[1])
    (file,) = files(tmp_path)
    header = file.read_bytes().partition(b"\n")[0].decode()
    for what in (KEYS[1].hex(), LAYOUT.weights_sha256, '"dtype": "float32"', '"page_size": 2'):
        assert what in header


def test_the_next_life_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, LAYOUT, MOST), *KEYS[:3])
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    assert not tier.has(KEYS[0])
    tier.find()
    assert tier.held()[0] == 3
    assert read(tier, KEYS[2]) == bytes(page_of(KEYS[2]))


def test_pages_of_another_model_or_layout_never_match(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, LAYOUT, MOST), KEYS[0])
    for other in (
        replace(LAYOUT, weights_sha256="cd" * 32), replace(LAYOUT, dtype="float16", head_dim=8),
        replace(LAYOUT, num_layers=1, num_kv_heads=2), replace(LAYOUT, page_size=4, head_dim=2),
    ):  # fmt: skip
        assert other.num_layers * other.extent_bytes == PAGE_BYTES, "equal sizes must not be mistaken either"
        tier = DiskTier(tmp_path, other, MOST)
        tier.find()
        assert not tier.has(KEYS[0])
        assert read(tier, KEYS[0]) is None
        assert tier.held()[0] == 1  # it counts, and goes first


def test_pages_stay_what_they_are_where_others_behind_a_window_are_kept_no_more(tmp_path: Path) -> None:
    """As where the greatest context is set below the window, or above it."""
    put(DiskTier(tmp_path, LAYOUT, MOST), KEYS[0])
    tier = DiskTier(tmp_path, replace(LAYOUT, window=64), MOST)
    tier.find()
    assert read(tier, KEYS[0]) == bytes(page_of(KEYS[0]))
    (file,) = files(tmp_path)
    assert b"window" not in file.read_bytes().partition(b"\n")[0], "files of before are read, too"


def flip(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def of_another_page(file: Path) -> None:
    """Whole and right, but not what its name says."""
    other = next(path for path in files(file.parents[1]) if path != file)
    file.write_bytes(other.read_bytes())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "a bit of the payload": flip(-1),
    "a bit of the digest": flip(-PAGE_BYTES - 1),
    "a bit of the header": flip(20),
    "another page": of_another_page,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss_and_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, *KEYS[:2])
    file = next(path for path in files(tmp_path) if path.stem in KEYS[0].hex())
    damage(file)
    assert read(tier, KEYS[0]) is None
    assert (tier.counters.num_corrupt, tier.counters.num_read) == (1, 0)
    assert "removed" in caplog.text
    assert not tier.has(KEYS[0])
    assert not file.exists()
    assert read(tier, KEYS[1]) == bytes(page_of(KEYS[1]))
    put(tier, KEYS[0])
    assert read(tier, KEYS[0]) == bytes(page_of(KEYS[0]))


def test_pages_of_a_disk_that_cannot_be_written_any_more_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, KEYS[0])

    def refuse(_: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert read(tier, KEYS[0]) == bytes(page_of(KEYS[0]))
    assert tier.has(KEYS[0])
    assert tier.counters.num_corrupt == 0


def test_a_file_that_vanished_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, KEYS[0])
    files(tmp_path)[0].unlink()
    assert read(tier, KEYS[0]) is None
    assert tier.counters.num_corrupt == 0
    assert not tier.has(KEYS[0])


def test_no_more_bytes_are_kept_than_were_asked_for(tmp_path: Path) -> None:
    most = 3 * file_bytes(tmp_path)
    root = tmp_path / "w"
    tier = DiskTier(root, LAYOUT, most)
    put(tier, *KEYS[:2])
    put(tier, *KEYS[2:4])
    assert [tier.has(key) for key in KEYS[:4]] == [True, False, True, True]  # the older prompt lost its end
    assert len(files(root)) == 3
    assert tier.counters.num_evicted == 1
    tier.use(KEYS[:1])
    put(tier, *KEYS[4:6])
    assert [tier.has(key) for key in KEYS[:6]] == [True, False, False, False, True, True]


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    """What goes then: other layouts first, then what was used least recently, a prompt from its end."""
    most = 3 * file_bytes(tmp_path)
    root = tmp_path / "w"
    put(DiskTier(root, LAYOUT, MOST), *KEYS[:3])
    for number, key in enumerate(KEYS[:2]):  # a prompt of two pages, used long ago
        (file,) = (path for path in files(root) if path.stem == key.hex()[2:])
        os.utime(file, (1000 + number, 1000 + number))
    put(DiskTier(root, replace(LAYOUT, weights_sha256="cd" * 32), MOST), KEYS[3])
    tier = DiskTier(root, LAYOUT, most)
    tier.find()
    assert [tier.has(key) for key in KEYS[:3]] == [True, True, True]
    assert len(files(root)) == 3
    tier = DiskTier(root, LAYOUT, most - 1)
    tier.find()
    assert [tier.has(key) for key in KEYS[:3]] == [True, False, True]
    assert len(files(root)) == 2


def test_a_read_page_is_young_for_the_next_life(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, KEYS[0])
    (file,) = files(tmp_path)
    os.utime(file, (1.0, 1.0))
    read(tier, KEYS[0])
    assert file.stat().st_mtime > 1e9


def test_a_write_that_fails_turns_writing_off_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk. What is there is still read."""
    now_s = 0.0
    tier = DiskTier(tmp_path, LAYOUT, MOST, clock=lambda: now_s)
    put(tier, KEYS[0])
    blocked = next(iter(files(tmp_path))).parents[1] / KEYS[1].hex()[:2]
    blocked.write_text("no directory can be made here")
    put(tier, KEYS[1])
    put(tier, KEYS[2])
    assert caplog.text.count("no pages are written") == 1
    assert [tier.has(key) for key in KEYS[:3]] == [True, False, False]
    assert tier.counters.num_lost == 2
    assert read(tier, KEYS[0]) == bytes(page_of(KEYS[0]))
    blocked.unlink()
    now_s = 61.0
    put(tier, KEYS[1])
    assert read(tier, KEYS[1]) == bytes(page_of(KEYS[1]))


def test_pages_are_kept_again_after_somebody_has_removed_all_files(tmp_path: Path) -> None:
    root = tmp_path / "worker"
    tier = DiskTier(root, LAYOUT, MOST)
    put(tier, KEYS[0])
    shutil.rmtree(root)
    put(tier, KEYS[1])
    assert read(tier, KEYS[1]) == bytes(page_of(KEYS[1]))
    assert read(tier, KEYS[0]) is None
    assert tier.held()[0] == 1
    assert root.stat().st_mode & 0o777 == 0o700


def test_nobody_else_may_look(tmp_path: Path) -> None:
    root = disk_directory(str(tmp_path / "pages"), "prefill-0")
    put(DiskTier(root, LAYOUT, MOST), KEYS[0])
    modes = {path: path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    root = tmp_path / "w"
    root.mkdir(mode=0o755)
    DiskTier(root, LAYOUT, MOST)
    assert root.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_life_left_half_written_is_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LAYOUT, MOST)
    put(tier, KEYS[0])
    (file,) = files(tmp_path)
    stale, young = file.with_suffix(".1.part"), file.with_suffix(".2.part")
    for path in (stale, young):
        path.write_bytes(b"half")
    os.utime(stale, (1.0, 1.0))
    DiskTier(tmp_path, LAYOUT, MOST).find()
    assert not stale.exists()
    assert young.exists()  # another life may be writing it


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, LAYOUT, MOST), KEYS[0])
    (file,) = files(tmp_path)
    strange = [file.with_name("notes.txt"), file.with_name("no-key.kv"), tmp_path / "README", tmp_path / "x" / "y.kv"]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("somebody's")
        os.utime(path, (1.0, 1.0))
    tier = DiskTier(tmp_path, LAYOUT, 1)
    tier.find()
    assert files(tmp_path) == sorted(strange)


def test_two_lives_in_one_directory_do_each_other_no_harm(tmp_path: Path) -> None:
    first, second = DiskTier(tmp_path, LAYOUT, MOST), DiskTier(tmp_path, LAYOUT, MOST)
    put(first, *KEYS[:2])
    put(second, *KEYS[:1])
    second.discard(KEYS[0])
    assert read(first, KEYS[0]) is None
    assert read(first, KEYS[1]) == bytes(page_of(KEYS[1]))
    assert first.counters.num_corrupt == second.counters.num_corrupt == 0


def test_each_worker_has_a_directory_of_its_own(tmp_path: Path) -> None:
    names = ["prefill-0", "prefill-1", "a/b", "..", "a%2Fb"]
    directories = [disk_directory(str(tmp_path), name) for name in names]
    assert len(set(directories)) == len(names)
    assert all(directory.resolve().parent == tmp_path.resolve() for directory in directories)
