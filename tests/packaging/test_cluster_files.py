"""The files for `ray up` are what Ray's own launcher accepts, and give every node its purpose."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from ray.autoscaler._private import util

from tandem.cluster.ray.home import RECONNECT_S

ROOT = Path(__file__).resolve().parents[2]
FILES = ["cluster.yaml", "deploy/on-premises.yaml"]
SAYS_HOW = 'printf "%s\\n" "$@" "waits=$RAY_gcs_rpc_server_reconnect_timeout_s" "mode=$RAY_AUTH_MODE"'


def read(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((ROOT / name).read_text()))


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    util.validate_config(util.prepare_config(read(name)))


@pytest.mark.parametrize("name", FILES)
def test_ray_would_refuse_a_misspelt_key(name: str) -> None:
    broken = {**read(name), "max_wrokers": 3}
    with pytest.raises(Exception, match="max_wrokers"):
        util.validate_config(util.prepare_config(broken))


@pytest.mark.parametrize("name", FILES)
def test_mounted_files_are_in_the_checkout_or_made_as_told(name: str) -> None:
    made_by_the_user = {"dist", "~/.ray/auth_token", "~/tandem-certs"}
    for source in read(name)["file_mounts"].values():
        assert source in made_by_the_user or (ROOT / source).exists(), source


@pytest.mark.parametrize("name", FILES)
def test_torch_goes_before_the_wheel_and_both_are_pinned(name: str) -> None:
    installs = [command for command in read(name)["setup_commands"] if "pip install" in command]
    makefile = (ROOT / "Makefile").read_text()
    torch = next(line.split("?=")[1].strip() for line in makefile.splitlines() if line.startswith("TORCH"))
    assert [torch in command for command in installs] == [True, False]
    assert "tandem_serving-*.whl" in installs[1]
    assert all("-c ~/tandem/requirements/lock.txt" in command for command in installs)


def test_pools_are_node_types_with_limits_and_resources_of_their_own() -> None:
    config = read("cluster.yaml")
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"] == {"router": 1}
    for pool in ("prefill", "decode"):
        assert set(types[pool]["resources"]) == {pool}
        assert 1 <= types[pool]["min_workers"] <= types[pool]["max_workers"]
    assert types["prefill"]["node_config"]["InstanceType"] != types["decode"]["node_config"]["InstanceType"]
    assert types["prefill"]["max_workers"] + types["decode"]["max_workers"] <= config["max_workers"]


def started_with(commands: list[str], address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `commands` as Ray's launcher would on the machine at `address`, with a `ray` that only says how."""
    for name, script in {"hostname": f"echo '{address} '", "ray": SAYS_HOW}.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "RAY_AUTH_MODE": "unset", "PATH": f"{folder}:{os.environ['PATH']}"}
    command = " && ".join(f"({c})" for c in util.with_head_node_ip(commands, "192.168.1.10"))
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)


def resources_of(output: str) -> dict[str, int]:
    given = [line.removeprefix("--resources=") for line in output.splitlines() if line.startswith("--resources=")]
    return cast(dict[str, int], json.loads(given[0]))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_asks_for_the_token(name: str, commands: str, tmp_path: Path) -> None:
    config = read(name)
    assert any(target.endswith("/.ray/auth_token") for target in config["file_mounts"])
    started = started_with(config[commands], "192.168.1.11", tmp_path)
    assert started.stdout.splitlines()[-1] == "mode=token"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_outlives_its_control_store_as_long_as_the_documentation_says(
    name: str, commands: str, tmp_path: Path
) -> None:
    started = started_with(read(name)[commands], "192.168.1.11", tmp_path)
    assert f"waits={RECONNECT_S}" in started.stdout.splitlines()
    assert f"{RECONNECT_S} s" in (ROOT / "docs" / "deploy.md").read_text()


def test_every_machine_on_premises_gets_one_role(tmp_path: Path) -> None:
    config = read("deploy/on-premises.yaml")
    roles = []
    for address in config["provider"]["worker_ips"]:
        started = started_with(config["worker_start_ray_commands"], address, tmp_path)
        assert started.returncode == 0, started.stderr
        assert "--address=192.168.1.10:6379" in started.stdout.splitlines()
        roles += resources_of(started.stdout)
    assert len(roles) == len(config["provider"]["worker_ips"])
    assert set(roles) == {"prefill", "decode"}


def test_head_on_premises_has_the_router(tmp_path: Path) -> None:
    config = read("deploy/on-premises.yaml")
    started = started_with(config["head_start_ray_commands"], config["provider"]["head_ip"], tmp_path)
    assert resources_of(started.stdout) == {"router": 1}


def test_unlisted_machine_on_premises_does_not_join(tmp_path: Path) -> None:
    commands = read("deploy/on-premises.yaml")["worker_start_ray_commands"]
    started = started_with(commands, "192.168.1.99", tmp_path)
    assert started.returncode != 0
    assert "no role for 192.168.1.99" in started.stderr
    assert "start" not in started.stdout
