"""The files for `ray up` are what Ray's own launcher accepts, bring the wheel to every node and give it its purpose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from ray.autoscaler._private import util

from tandem import cli
from tandem.cluster.ray.home import RECONNECT_S

ROOT = Path(__file__).resolve().parents[2]
FILES = ["cluster.yaml", "deploy/on-premises.yaml"]
SAYS_HOW = (
    'printf "%s\\n" "$@" "autoscaler_v2=$RAY_enable_autoscaler_v2" "waits=$RAY_gcs_rpc_server_reconnect_timeout_s" '
    '"checks=$RAY_health_check_failure_threshold * $RAY_health_check_timeout_ms" "mode=$RAY_AUTH_MODE"'
)
ALL_ROLES = {"supervisor", "router", "client", "prefill", "decode"}


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
    installs = [command for command in read(name)["setup_commands"] if "pip install -c" in command]
    makefile = (ROOT / "Makefile").read_text()
    torch = next(line.split("?=")[1].strip() for line in makefile.splitlines() if line.startswith("TORCH"))
    assert [torch in command for command in installs] == [True, False]
    assert 'dist/wheel.txt)$extra"' in installs[1]  # the shell takes its brackets for no glob
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


def a_home(folder: Path) -> Path:
    """Of a user on a host, with the files that the launcher has copied there."""
    home = folder / "home"
    for directory in ("tandem/dist", "tandem-certs"):
        (home / directory).mkdir(parents=True, exist_ok=True)
    for name in ("ca.pem", *(f"{role}.{kind}" for role in ALL_ROLES for kind in ("pem", "key"))):
        (home / "tandem-certs" / name).touch()
    return home


def started_with(
    commands: list[str], address: str, folder: Path, *, ray: str = SAYS_HOW, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `commands` as Ray's launcher would on the machine at `address`, with a stand-in for `ray`."""
    for name, script in {"hostname": f"echo '{address} '", "ray": ray}.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    own = {"HOME": str(a_home(folder)), "RAY_AUTH_MODE": "unset", "PATH": f"{folder}:{os.environ['PATH']}"}
    by_launcher = {"RAY_HEAD_IP": "192.168.1.10", "RAY_enable_autoscaler_v2": "1"}
    command = " && ".join(f"({c})" for c in util.with_envs(commands, by_launcher))
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **own, **environment}, check=False
    )


SLOW = '[ "$1" != start ] || { echo try >> "$HOME/tries"; [ $(wc -l < "$HOME/tries") -gt "$FAILS" ]; }'


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_host_that_is_too_slow_for_rays_own_patience_is_tried_three_times(
    name: str, commands: str, num_failures: int, tmp_path: Path
) -> None:
    started = started_with(read(name)[commands], "192.168.1.11", tmp_path, ray=SLOW, FAILS=str(num_failures))
    assert (started.returncode == 0) == (num_failures < 3)
    assert (tmp_path / "home/tries").read_text().count("try") == 3
    said = [line for line in started.stderr.splitlines() if line.startswith("Ray has not started on ")]
    assert [line.rpartition(" (try ")[2] for line in said] == [f"{n} of 3)" for n in range(1, num_failures + 1)]


def certificates_left(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "home/tandem-certs").glob("*.key")}


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


@pytest.mark.parametrize("name", FILES)
def test_a_host_that_is_cut_off_stays_in_the_cluster_as_long_as_the_documentation_says(
    name: str, tmp_path: Path
) -> None:
    """Twice a minute, as TCP may need as long again to notice that the cut is over."""
    started = started_with(read(name)["head_start_ray_commands"], "192.168.1.10", tmp_path)
    checks = [line for line in started.stdout.splitlines() if line.startswith("checks=")][-1]  # `ray stop` goes before
    times, timeout_ms = (int(number) for number in checks.removeprefix("checks=").split(" * "))
    assert times * timeout_ms >= 2 * 60 * 1000
    text = " ".join((ROOT / "docs" / "deploy.md").read_text().split())
    assert f"its health checks to {times} times {timeout_ms // 1000} s" in text


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


def test_every_machine_on_premises_is_in_ray_by_the_address_that_others_reach(tmp_path: Path) -> None:
    """Not by the one of its name, which may be 127.0.1.1 there."""
    config = read("deploy/on-premises.yaml")
    head = config["provider"]["head_ip"]
    for commands, addresses in (("head", [head]), ("worker", config["provider"]["worker_ips"])):
        for address in addresses:
            started = started_with(config[f"{commands}_start_ray_commands"], address, tmp_path)
            assert f"--node-ip-address={address}" in started.stdout.splitlines()


def test_head_on_premises_counts_its_workers_by_the_autoscaler_that_does_not_count_itself(tmp_path: Path) -> None:
    started = started_with(read("deploy/on-premises.yaml")["head_start_ray_commands"], "192.168.1.10", tmp_path)
    assert "autoscaler_v2=0" in started.stdout.splitlines()


def test_a_worker_host_keeps_its_own_roles_certificate_only(tmp_path: Path) -> None:
    commands = read("deploy/on-premises.yaml")["worker_start_ray_commands"]
    assert started_with(commands, "192.168.1.11", tmp_path).returncode == 0
    assert certificates_left(tmp_path) == {"prefill"}
    assert (tmp_path / "home/tandem-certs/ca.pem").exists()
    commands = read("cluster.yaml")["worker_start_ray_commands"]
    assert started_with(commands, "10.0.0.1", tmp_path, RAY_OVERRIDE_RESOURCES='{"decode":8}').returncode == 0
    assert certificates_left(tmp_path) == {"decode"}


def test_the_head_keeps_all_certificates_also_where_hosts_share_a_home(tmp_path: Path) -> None:
    config = read("deploy/on-premises.yaml")
    assert started_with(config["head_start_ray_commands"], "192.168.1.10", tmp_path).returncode == 0
    assert started_with(config["worker_start_ray_commands"], "192.168.1.11", tmp_path).returncode == 0
    assert certificates_left(tmp_path) == ALL_ROLES


def a_wheel(directory: Path, version: str, says: str) -> Path:
    """A wheel of Tandem's name with one module."""
    path = directory / f"tandem_serving-{version}-py3-none-any.whl"
    about = f"tandem_serving-{version}.dist-info"
    files = {
        "what_wheel.py": f"print({says!r})",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tandem-serving\n"
        f"Version: {version}\nProvides-Extra: cuda13\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{about}/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    return path


def installs(name: str) -> list[str]:
    return [command for command in read(name)["setup_commands"] if "pip install" in command]


def test_all_files_install_alike() -> None:
    assert installs(FILES[0]) == installs(FILES[1])


@pytest.mark.long
@pytest.mark.faults
def test_the_named_wheel_reaches_a_host_that_has_others(tmp_path: Path) -> None:
    """One of the same version, and one of an older, which rsync has left there. pip and wheels are real."""
    home = a_home(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "tandem/venv")], check=True)
    python, pip = home / "tandem/venv/bin/python", home / "tandem/venv/bin/pip"
    pip.write_text(
        f"""#!/bin/bash
        echo "$*" >> {home}/asked
        [[ " $* " == *" torch"* ]] && exit
        exec {sys.executable} -m pip --python {python} --disable-pip-version-check "$@" --no-index --quiet\n"""
    )
    pip.chmod(0o755)
    shutil.copytree(ROOT / "requirements", home / "tandem/requirements")
    dist = home / "tandem/dist"
    (packages,) = (home / "tandem/venv").glob("lib/python3.*/site-packages")
    torch = packages / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("from torch import version\n")
    for version, says, cuda in (("0.1.0", "first", "13.0"), ("0.1.0", "second", "12.9"), ("0.2.0", "third", None)):
        (torch / "version.py").write_text(f"cuda = {cuda!r}\n")
        (dist / "wheel.txt").write_text(f"{a_wheel(dist, version, says).name}\n")
        for command in installs(FILES[0]):
            subprocess.run(["bash", "-c", f"({command})"], check=True, env={**os.environ, "HOME": str(home)})
        said = subprocess.run([python, "-c", "import what_wheel"], capture_output=True, text=True, check=True)
        assert said.stdout == f"{says}\n"
        asked = [line for line in (home / "asked").read_text().splitlines() if "lock.txt" in line]
        assert asked[-1].endswith("none-any.whl[cuda13]" if cuda == "13.0" else "none-any.whl")


def test_make_wheel_names_the_wheel_that_hosts_install() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].partition("\n\n")[0]
    assert "> wheel.txt" in recipe


def test_the_file_for_machines_is_what_the_command_in_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "deploy/on-premises.yaml").read_text()
    command = next(line.removeprefix("#   ") for line in text.splitlines() if "tandem hosts --head" in line)
    assert cli.main(command.split()[1:]) == 0
    assert capsys.readouterr().out == text


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
