"""Handoffs between a prefill and a decode process: over one card, or over a CPU, with the tokens of the model itself.

python -m benchmarks.gpu.handoff --device cuda --json handoff.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.parts.pair import Handoff, PairSession
from benchmarks.parts.processes import Processes, WorkerOptions, start_workers
from tandem.bench.machine import machine, now, versions
from tandem.bench.report import json_file
from tandem.core.errors import TandemError

FORMAT = "tandem-gpu-handoff/1"

_KV_BYTES = 64 << 20
_TIMEOUT_S = 60.0
#: Shorter than a page, some pages, and more than a chunk of prefill.
_PROMPTS = (9, 70, 200, 900)
_NUM_TOKENS = 24
_NUM_REPEATS = 3


def run(device: str, transport: str, kernels: str) -> dict[str, Any]:
    """Hand prompts of several lengths over, and compare all tokens.

    Raises `TandemError` where a worker does not start, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-handoff-") as directory:
        model_dir = _save_model(Path(directory) / "model")
        prompts = [_prompt(length) for length in _PROMPTS]
        expected = _tokens_of_the_model(model_dir, prompts)
        options = WorkerOptions(model_dir, transport, 1, _KV_BYTES, device, {"dtype": "float32", "kernels": kernels})
        handoffs = asyncio.run(_hand_over(Path(directory), options, prompts))
    figures = []
    for prompt, want, tries in zip(prompts, expected, handoffs, strict=True):
        found = [[one.token_ids.get(index, -1) for index in range(_NUM_TOKENS)] for _, one in tries]
        figures.append(
            {
                "prompt_tokens": len(prompt),
                "tokens": _NUM_TOKENS,
                "are_the_models": all(tokens == want for tokens in found),
                "seconds": statistics.median(seconds for seconds, _ in tries),
            }
        )
    return {
        "format": FORMAT, "date": now(), "machine": machine(), "versions": versions(), "device": device,
        "transport": transport, "kernels": kernels, "handoffs": figures,
    }  # fmt: skip


async def _hand_over(
    directory: Path, options: WorkerOptions, prompts: list[list[int]]
) -> list[list[tuple[float, Handoff]]]:
    """Of each prompt what came of each try, and the seconds from its start to its last token."""
    async with Processes(directory) as processes:
        prefill, decode = await start_workers(processes, options)
        async with PairSession(prefill.facts["address"], decode.facts["address"]) as session:
            found = []
            for prompt in prompts:
                tries = []
                for _ in range(_NUM_REPEATS):
                    begin_s = time.monotonic()
                    async with asyncio.timeout(_TIMEOUT_S):
                        handoff = await session.begin(prompt, _NUM_TOKENS)
                        await session.finish(handoff)
                    tries.append((time.monotonic() - begin_s, handoff))
                found.append(tries)
            return found


def _save_model(target: Path) -> Path:
    """A Llama whose heads every flash kernel takes, and whose attention matters."""
    from tandem.engine.random_model import ModelSpec, save

    return save(ModelSpec(hidden=256, heads=4, kv_heads=2, head_dim=64, std=0.06, max_positions=1024, seed=1), target)


def _prompt(length: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(2, 320, (length,), generator=generator).tolist()
    return tokens


def _tokens_of_the_model(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What `transformers` itself goes on with: greedily, in float32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    continued = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NUM_TOKENS, do_sample=False, pad_token_id=0
            )
        continued.append(output[0, len(prompt) :].tolist())
    return continued


def main(arguments: list[str] | None = None) -> int:
    """1 where a handoff failed or tokens differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.handoff", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="of both processes: cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--transport", default="nccl", choices=("nccl", "ucx"), help="(default: nccl)")
    parser.add_argument(
        "--kernels", default="auto", choices=("auto", "vectors", "torch"), help="as model.kernels (default: auto)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    try:
        result = run(options.device, options.transport, options.kernels)
    except (TandemError, TimeoutError) as error:
        print(f"python -m benchmarks.gpu.handoff: {error}", file=sys.stderr)
        return 1
    for figure in result["handoffs"]:
        verdict = "the model's own tokens" if figure["are_the_models"] else "OTHER TOKENS than the model's"
        print(f"prompt of {figure['prompt_tokens']:,}: {verdict}, {figure['seconds'] * 1e3:,.1f} ms")
    if options.json is not None:
        json_file.write(options.json, result)
    return 0 if all(figure["are_the_models"] for figure in result["handoffs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
