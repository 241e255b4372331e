"""Kernels in tiles, on CPUs that multiply bfloat16 and have no tiles: these are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import REPOSITORY

from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles

_HERE = Path(__file__).parent
_OF_ATTENTION, _OF_LINEAR = _HERE / "test_engine_attention.py", _HERE / "test_packed_linear.py"
CHOSEN = [
    f"{_OF_ATTENTION}::test_rows_do_not_depend_on_company_or_threads[(24, 12, 32, 16)-bfloat16 in tiles]",
    f"{_OF_ATTENTION}::test_rows_do_not_depend_on_company_or_threads[(5, 5, 32, 128)-bfloat16 in tiles]",
    f"{_OF_ATTENTION}::test_cpu_attention_matches_reference[(3, 1, 32, 16)-bfloat16 in tiles-1]",
    f"{_OF_ATTENTION}::test_a_row_meets_nothing_of_what_only_others_of_its_chunk_see"
    "[(5, 5, 32, 128)-bfloat16 in tiles-value-64]",
    f"{_OF_LINEAR}::test_gated_products_in_tiles_are_the_same_for_each_row_alone[64-37]",
    f"{_OF_LINEAR}::test_gated_whole_numbers_in_tiles_are_the_same_for_each_row_alone[4]",
    f"{_OF_LINEAR}::test_whole_numbers_of_broken_tiles_are_multiplied_by_two",
]


@pytest.mark.processes
@pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU multiplies no bfloat16")
@pytest.mark.skipif(has_bfloat16_tiles(), reason="this CPU has tiles: all tests are of them")
def test_kernels_in_tiles_agree_where_python_emulates_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.emulated_tiles", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        # What is compiled calls this process's Python, so no other may find it.
        [*command, *CHOSEN], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, cwd=REPOSITORY,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(CHOSEN)} passed" in ended.stdout
