"""Kernels in tiles and by two, on CPUs with AVX-512 that have no tiles, or multiply no bfloat16: that is emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import REPOSITORY

from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles, has_wide_vectors

_HERE = Path(__file__).parent
_OF_ATTENTION, _OF_LINEAR = _HERE / "test_engine_attention.py", _HERE / "test_packed_linear.py"
by_two = pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU multiplies no bfloat16")
not_by_two = pytest.mark.skipif(has_bfloat16_products(), reason="this CPU multiplies bfloat16: all tests are of that")
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
CHOSEN_BY_TWO = [
    f"{_OF_LINEAR}::test_products_by_two_are_of_rounded_rows_and_each_row_is_its_own[200-300-1]",
    f"{_OF_LINEAR}::test_rows_of_several_blocks_get_what_they_get_in_one_pass[dtype5-None-True-2]",
    f"{_OF_LINEAR}::test_gated_rows_of_several_blocks_get_what_they_get_in_one_pass[dtype6-8-True]",
    f"{_OF_LINEAR}::test_gated_rows_of_several_blocks_get_what_they_get_in_one_pass[dtype7-4-True]",
    f"{_OF_ATTENTION}::test_rows_do_not_depend_on_company_or_threads[(24, 12, 32, 16)-bfloat16 by two]",
]


@pytest.mark.processes
@pytest.mark.skipif(not has_wide_vectors(), reason="this CPU has no AVX-512")
@pytest.mark.skipif(has_bfloat16_tiles(), reason="this CPU has tiles: all tests are of them")
@pytest.mark.parametrize(
    ("chosen", "emulated"),
    [
        pytest.param(CHOSEN, ["tiles"], marks=by_two),
        pytest.param(CHOSEN + CHOSEN_BY_TWO, ["pairs", "tiles"], marks=not_by_two),
    ],
)
def test_kernels_agree_where_what_the_cpu_has_not_is_emulated(
    chosen: list[str], emulated: list[str], tmp_path: Path
) -> None:
    plugins = [word for each in emulated for word in ("-p", f"tests.support.emulated_{each}")]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-p", "no:cacheprovider"]
    ended = subprocess.run(
        # What is compiled calls this process's Python, so no other may find it.
        [*command, *chosen], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, cwd=REPOSITORY,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(chosen)} passed" in ended.stdout
