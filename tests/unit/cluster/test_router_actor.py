"""The router's actor does not serve without the keys that its cluster was to have. No Ray, but a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

START = """
import dataclasses, sys
from tandem.cluster.ray.router_actor import RouterActor
from tandem.cluster.spec import ClusterSpec
from tandem.core.config import from_dict
from tandem.core.errors import ConfigError
config = from_dict({"http": {"host": sys.argv[1], "port": 18766}, "model": {"served_names": ["*"]}})
spec = ClusterSpec(config, "m", "", {}, {}, True, 1, "", "", log_directory=sys.argv[2])
try:
    RouterActor(spec, "router-0", frozenset()).start(0)
except ConfigError as error:
    print(error.message, file=sys.stderr)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("host", "variable", "says"),
    [
        ("0.0.0.0", {}, "beyond loopback, and there are no API keys"),
        ("127.0.0.1", {"TANDEM_API_KEYS": "sk-of-ray-alone-0123456789"}, "set where Ray was started"),
        ("0.0.0.0", {"TANDEM_API_KEYS": "sk-of-ray-alone-0123456789"}, "set where Ray was started"),
    ],
)
def test_a_router_that_no_key_has_reached_refuses_to_start(
    host: str, variable: dict[str, Any], says: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TANDEM_API_KEYS"}
    line = [sys.executable, "-c", START, host, str(tmp_path)]
    run = subprocess.run(line, env={**environment, **variable}, capture_output=True, text=True, timeout=60)
    said = (tmp_path / "router-0.log").read_text()  # an actor's output goes to its log
    assert run.returncode == 0, run.stderr + said
    assert says in said
