"""What `tandem serve` says once its cluster answers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tandem.cluster.checks.preflight import Plan


def program_name() -> str:
    """How to call this program again from the same directory: its name where PATH finds it, else its path."""
    own = Path(sys.executable).parent / "tandem"
    found = shutil.which("tandem")
    if found is not None and Path(found).resolve() == own.resolve():
        return "tandem"
    if not own.exists():  # run from a checkout that is not installed
        return f"{sys.executable} -m tandem.cli"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def ready_banner(url: str, port: int, plan: Plan, logs: str, *, in_background: bool = False) -> list[str]:
    """What a user needs once the cluster answers. `logs`: where they are. `in_background`: without a terminal."""
    body = f'{{"model": "{plan.model_name}", "prompt": "Once upon a time", "max_tokens": 32}}'
    key = " -H 'Authorization: Bearer KEY'" if plan.needs_key else ""
    metrics = f"{url}/metrics" if plan.config.metrics.enabled else "off (metrics.enabled)"
    pools, program = plan.config.pools, program_name()
    scaled = f"--prefill {pools.prefill.at_first + 1} --decode {pools.decode.at_first}"
    simulated = ["", "SIMULATED: steps only take time, and the tokens mean nothing (--engine simulated)."]
    return [
        *(simulated if plan.config.model.engine == "simulated" else []),
        "",
        f"Ready: {url}",
        "",
        f"  try it    curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        f"  metrics   {metrics}",
        f"  logs      {logs}",
        f"  status    {program} status --port {port}",
        f"  scale     {program} scale --port {port} {scaled}",
        f"  stop      {'' if in_background else 'Ctrl-C, or '}{program} stop --port {port}",
        "",
    ]
