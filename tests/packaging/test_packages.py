"""The list of packages in pyproject.toml is what stands on disk, so that the wheel forgets nothing."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ["tandem", "router", "prefill_worker", "decode_worker", "kvtransfer"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_list_of_packages_is_complete_and_has_nothing_else() -> None:
    on_disk = {
        str(init.parent.relative_to(ROOT)).replace("/", ".")
        for top in TOP_LEVEL
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == on_disk


@pytest.mark.parametrize("top", [*TOP_LEVEL, "benchmarks"])
def test_every_folder_with_code_is_a_package_that_says_what_it_is_about_and_nothing_else(top: str) -> None:
    for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{init} is missing"
        module = ast.parse(init.read_text())
        assert ast.get_docstring(module), f"{init} does not say in one or two sentences what the folder is about"
        assert len(module.body) == 1, f"{init} holds code: import from the modules themselves"


def test_the_design_lists_every_room_with_its_own_words() -> None:
    rooms = {
        str(init.parent.relative_to(ROOT)): " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
        for top in [*TOP_LEVEL, "benchmarks"]
        for init in (ROOT / top).rglob("__init__.py")
    }
    listed = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE))
    assert listed == rooms


def test_everything_is_pinned_but_torch() -> None:
    project = PYPROJECT["project"]
    loose = [
        requirement
        for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]
        if not re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", requirement)
    ]
    assert loose == ["torch>=2.11,<2.14"]


def test_lock_agrees_with_the_pins_and_leaves_torch_to_the_user() -> None:
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/lock.txt").read_text(), re.MULTILINE))
    locked = {_canonical(name): version for name, version in lock.items()}
    project = PYPROJECT["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name, _, version = requirement.partition("==")
        name = _canonical(name.partition("[")[0])
        if version and name != "setuptools":
            assert locked.get(name) == version, f"run `make lock`: {requirement}"
    assert not {"torch", "triton", "setuptools"} & set(locked)


def test_build_backend_is_the_pinned_one_among_the_tools() -> None:
    (backend,) = PYPROJECT["build-system"]["requires"]
    assert backend in PYPROJECT["project"]["optional-dependencies"]["dev"]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in ["pyproject.toml", "README.md", "LICENSE", *TOP_LEVEL]:
        assert re.search(rf"^COPY .*\b{re.escape(source)}\b", dockerfile, re.MULTILINE), source
        assert f"!{source}" in ignored


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """pytest takes two of one name for one, and then collects neither."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, num in names.items() if num > 1]
