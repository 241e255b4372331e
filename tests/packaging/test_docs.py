"""The pages hang together: every link and path leads somewhere, and what "the same tokens" means is said once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ["tandem", "router", "prefill_worker", "decode_worker", "kvtransfer", "benchmarks"]
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path.parent.name != "v1"]
MEANING = "failure-contract.md#the-same-tokens"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_code_that_a_page_names_exists(page: Path) -> None:
    """In backticks: with its whole path, or by a bare name that several packages have (`wire.py`)."""
    bare = {path.name for path in SOURCES}
    for name in re.findall(r"`([\w./-]+\.(?:py|proto|sh))`", page.read_text()):
        assert (ROOT / name).is_file() if "/" in name else name in bare, name


def test_every_path_that_code_names_exists() -> None:
    path = re.compile(rf"(?<![\w/.])((?:docs|tools|tests|{'|'.join(PACKAGES)})(?:/[\w-]+)+\.(?:py|md|sh))\b")
    for source in SOURCES:
        for name in path.findall(source.read_text()):
            assert (ROOT / name).is_file(), f"{source.relative_to(ROOT)}: {name}"


def test_a_point_of_the_failure_contract_is_reached_in_the_file_that_it_names() -> None:
    contract = (ROOT / "docs/failure-contract.md").read_text()
    table = re.findall(r"^\| `(\w+\.\w+)` \| `([\w/.]+)` \|", contract, re.MULTILINE)
    assert len(table) > 15
    for point, name in table:
        assert f'"{point}"' in (ROOT / name).read_text(), f"{point} is not in {name}"


@pytest.mark.parametrize("name", ["README.md", "docs/design.md", "docs/decisions.md"])
def test_who_promises_the_same_tokens_says_where_it_stands_what_that_means(name: str) -> None:
    assert MEANING in (ROOT / name).read_text()


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
