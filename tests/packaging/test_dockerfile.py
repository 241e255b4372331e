"""What the Dockerfile copies is there and goes to the engine; tests/image carries out the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.image.dockerfile import Context, Instruction, Stage, stages_of

ROOT = Path(__file__).resolve().parents[2]


def test_stages_have_their_instructions_with_continued_lines_joined() -> None:
    text = '# syntax=docker/dockerfile:1\nFROM a AS b\nRUN x && \\\n    y\n\nFROM c\n# why\nCMD ["z"]\n'
    assert stages_of(text) == [
        Stage("a", "b", [Instruction("RUN", "x && y")]),
        Stage("c", "", [Instruction("CMD", '["z"]')]),
    ]


def test_what_stands_before_the_first_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="RUN stands before"):
        stages_of("RUN x\nFROM a\n")


def test_the_last_rule_of_a_dockerignore_that_matches_decides(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("# why\n*\n!kept\n!one.txt\n**/__pycache__\n")
    for name in ("kept/a.py", "kept/deep/b.py", "kept/deep/__pycache__/b.pyc", "left/c.py", "one.txt", "two.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    context = Context(tmp_path)
    assert {str(name) for _, name in context.files_of("kept")} == {"a.py", "deep/b.py"}
    assert [str(name) for _, name in context.files_of("one.txt")] == ["one.txt"]
    assert not [*context.files_of("left"), *context.files_of("two.txt")]


def test_what_the_dockerfile_copies_is_all_of_it_that_the_repository_has() -> None:
    """No more, such as a stale build; no less, such as a package that the .dockerignore forgot."""
    context = Context(ROOT)
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sources = [
        source
        for stage in stages_of((ROOT / "Dockerfile").read_text())
        for instruction in stage.instructions
        if instruction.name == "COPY" and "--from" not in instruction.value
        for source in instruction.value.split()[:-1]
    ]
    assert sources
    for source in sources:
        copied = {str(path.relative_to(ROOT)) for path, _ in context.files_of(source)}
        assert copied == {name for name in tracked if name == source or name.startswith(f"{source}/")}, source


def test_the_image_has_the_build_of_nixl_for_its_torch() -> None:
    image = stages_of((ROOT / "Dockerfile").read_text())[-1]
    installs = [instruction.value for instruction in image.instructions if "/tmp/*.whl" in instruction.value]
    assert installs
    assert all('print("[cuda13]" * ' in command and '"$(echo /tmp/*.whl)$extra"' in command for command in installs)


@pytest.mark.parametrize("page", ["Dockerfile", "docs/deploy.md", "docs/security.md"])
def test_no_command_that_is_shown_has_a_key_on_its_line(page: str) -> None:
    """Whoever lists processes would see it."""
    assert not re.search(r"-e \S+_KEYS?=", (ROOT / page).read_text())
