"""`tandem up` and `tandem down`: what is made before anything starts, and what is asked of Ray's launcher.

The launcher is a stand-in that writes down its command lines; hosts are reached for in tests/hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tandem import cli
from tandem.cluster.certs import default_authority_key, make_certificates
from tandem.cluster.launch.hosts import plan_hosts
from tandem.cluster.launch.hosts_file import hosts_file
from tandem.cluster.launch.launch_file import LaunchFile
from tandem.cluster.launch.up import Wishes, end_ray_command, serve_command, share_keys_command
from tandem.core.config import load
from tandem.core.identity import Role

pytestmark = pytest.mark.processes

WHEEL = "tandem_serving-0.1.0-py3-none-any.whl"
RAY = """#!/bin/bash
printf '%s\\n' "$1" "${@: -1}" >> asked
"""
SSH = """#!/bin/bash
command="${@: -1}"
case "$command" in
  *"tandem status"* | *pgrep*)
    [ ! -e unreachable ] || { echo "ssh: connect to host 10.0.0.1 port 22: No route to host" >&2; exit 255; }
    exec bash -c "${command#*; }" ;;
esac
printf '%s\\n' "${@: -2:1}" "${command#*; }" >> asked
case "$command" in
  *"tandem serve"*)
    [ ! -e broken ] || { echo "prefill-0 cannot start"; exit 1; }
    echo "Ready: http://10.0.0.1:8000"
    echo "  try it    curl http://10.0.0.1:8000/v1/completions -H 'Authorization: Bearer KEY' -d '{}'" ;;
esac
"""
TANDEM = """#!/bin/bash
[ ! -e old ] || { echo "tandem status: no Ray runs on this host" >&2; exit 1; }
[ ! -e silent ] || { echo "tandem status: the supervisor does not answer" >&2; exit 1; }
[ -e running ] || { echo "tandem status: no Ray runs on this host" >&2; exit 3; }
"""
PGREP = """#!/bin/bash
[ -e silent ]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a wheel, a home without anything, and a `ray` beside this Python."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    for directory in (home, programs, tmp_path / "dist", tmp_path / "requirements"):
        directory.mkdir()
    (tmp_path / "dist" / WHEEL).touch()
    (tmp_path / "tandem.yaml").write_text("model: {path: embedded}\n")
    for name, text in {"ray": RAY, "ssh": SSH, "rsync": "#!/bin/bash\n", "tandem": TANDEM, "pgrep": PGREP}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("TANDEM_API_KEYS", raising=False)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path)
    lists = {Role.PREFILL: ["10.0.0.2=2"], Role.DECODE: ["10.0.0.3"]}
    hosts = plan_hosts("10.0.0.1", lists, user="me", key="~/.ssh/key", cluster_name="ours")
    (tmp_path / "hosts.yaml").write_text(hosts_file(hosts))
    return tmp_path


def asked(place: Path) -> list[str]:
    return (place / "asked").read_text().splitlines() if (place / "asked").exists() else []


def test_up_makes_what_is_missing_then_starts_ray_and_tandem(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "hosts.yaml", "--host", "0.0.0.0"]) == 0
    home = place / "home"
    assert len((home / ".ray/auth_token").read_text()) == 64
    key = (home / "tandem-api-keys").read_text().strip()
    assert [path.stat().st_mode & 0o777 for path in (home / ".ray/auth_token", home / "tandem-api-keys")] == [0o600] * 2
    assert default_authority_key(home / "tandem-certs").exists()
    assert (place / "dist/wheel.txt").read_text() == f"{WHEEL}\n"
    serve = (
        "tandem serve --detach --address auto --config ~/tandem/tandem.yaml --certificates ~/tandem-certs "
        "--api-keys-file ~/tandem/api-keys --prefill 2 --decode 1 --host 0.0.0.0"
    )
    assert asked(place) == ["up", "hosts.yaml", "rsync-up", "~/tandem/api-keys", "me@10.0.0.1", f"({serve})"]
    said = capsys.readouterr().out
    curl = next(line for line in reversed(said.splitlines()) if "curl" in line).partition("curl ")[2]
    run = subprocess.run(["bash", "-c", f"printf '%s\\n' {curl}"], capture_output=True, text=True, check=True)
    assert f"Authorization: Bearer {key}" in run.stdout.splitlines()


def test_what_is_there_stays_and_a_loopback_cluster_needs_no_key(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "hosts.yaml"]) == 0
    home = place / "home"
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert not (home / "tandem-api-keys").exists()
    assert "ray attach hosts.yaml --port-forward 8000" in capsys.readouterr().out
    assert cli.main(["up", "hosts.yaml"]) == 0
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def spoil_key_file(place: Path) -> list[str]:
    (place / "keys").write_text("sk-0123456789abcdef\n")
    (place / "keys").chmod(0o644)
    return ["--api-keys-file", "keys"]


def spoil_certificates(place: Path) -> list[str]:
    made = make_certificates(place / "home/tandem-certs", days=1)
    (made.directory / "decode.key").unlink()
    return []


def spoil_wheels(place: Path) -> list[str]:
    (place / "dist" / WHEEL.replace("0.1.0", "0.2.0")).touch()
    return []


def spoil_mount(place: Path) -> list[str]:
    (place / "requirements").rmdir()
    return []


def spoil_settings(place: Path) -> list[str]:
    (place / "tandem.yaml").write_text("http: {prot: 1}\n")
    return []


def start_already(place: Path) -> list[str]:
    (place / "running").touch()
    return []


def silence(place: Path) -> list[str]:
    (place / "silent").touch()
    return []


def cut_off(place: Path) -> list[str]:
    (place / "unreachable").touch()
    return []


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_key_file, "is open to everybody on its host"),
        (spoil_certificates, "decode.key cannot be read"),
        (spoil_wheels, "holds 2 wheels and no wheel.txt"),
        (spoil_mount, "copies requirements to the hosts, and it does not exist"),
        (spoil_settings, "prot"),
        (start_already, "a Tandem cluster runs on the hosts of hosts.yaml"),
        (silence, "the head does not say whether one runs (tandem status: the supervisor does not answer)"),
        (cut_off, "the head does not say whether one runs (ssh: connect to host 10.0.0.1 port 22: No route to host)"),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(
    place: Path, capsys: pytest.CaptureFixture[str], spoil: object, why: str
) -> None:
    assert callable(spoil)
    assert cli.main(["up", "hosts.yaml", *spoil(place)]) == 1
    assert why in capsys.readouterr().err
    assert asked(place) == []


def test_keys_in_the_environment_are_not_lost_on_the_way(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", "sk-0123456789abcdef")
    assert cli.main(["up", "hosts.yaml"]) == 1
    assert "does not reach the hosts" in capsys.readouterr().err
    assert asked(place) == []


def test_a_cluster_that_does_not_get_ready_is_a_failure(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "broken").touch()
    assert cli.main(["up", "hosts.yaml"]) == 1
    said = capsys.readouterr()
    assert "prefill-0 cannot start" in said.out
    assert "Tandem did not become ready" in said.err


def test_down_ends_tandem_then_ray_on_all_hosts(place: Path) -> None:
    (place / "running").touch()
    assert cli.main(["down", "hosts.yaml"]) == 0
    end_ray = end_ray_command(LaunchFile.read(place / "hosts.yaml"))
    head = "me@10.0.0.1"
    assert asked(place) == [head, "(tandem stop --address auto)", head, f"({end_ray})", "down", "hosts.yaml"]


@pytest.mark.parametrize("spoil", [silence, cut_off])
def test_down_ends_what_may_run_and_says_that_nobody_knows(
    place: Path, capsys: pytest.CaptureFixture[str], spoil: object
) -> None:
    assert callable(spoil)
    spoil(place)
    assert cli.main(["down", "hosts.yaml"]) == 0
    assert "the head does not say whether one runs" in capsys.readouterr().out
    assert asked(place)[1] == "(tandem stop --address auto)"
    assert asked(place)[-2:] == ["down", "hosts.yaml"]


def test_a_head_without_tandem_has_no_cluster(place: Path) -> None:
    (place / "bin/tandem").unlink()
    assert cli.main(["up", "hosts.yaml"]) == 0


def test_an_older_tandem_on_a_head_without_ray_is_no_cluster(place: Path) -> None:
    (place / "old").touch()
    assert cli.main(["up", "hosts.yaml"]) == 0
    assert asked(place)[0] == "up"


def test_a_host_on_which_ray_was_not_ended_is_named(place: Path) -> None:
    """As the head runs it: `ssh` is a stand-in that reaches all hosts but one."""
    (place / "bin/ssh").write_text('#!/bin/bash\necho "$*" >> asked\n[[ "$*" != *10.0.0.3* ]]\n')
    command = end_ray_command(LaunchFile.read(place / "hosts.yaml"))
    run = subprocess.run(["bash", "-c", f"({command})"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == "Ray was not ended on 10.0.0.3\n"
    tried = [line.partition("me@")[2] for line in asked(place) if "me@" in line]
    assert sorted(tried) == [f"10.0.0.{n} ~/tandem/venv/bin/ray stop --force" for n in (2, 3)]
    assert asked(place)[:2] == ["stop", "pretty"]


def test_keys_reach_other_hosts_that_have_routers_and_no_others(place: Path) -> None:
    """As the head runs it: `ssh` is a stand-in that runs the command with a home for each host."""
    lists = {Role.PREFILL: ["10.0.0.2"], Role.ROUTER: ["10.0.0.1", "10.0.0.4", "10.0.0.5"]}
    hosts = plan_hosts("10.0.0.1", lists, user="me", key="~/.ssh/key", cluster_name="ours")
    (place / "hosts.yaml").write_text(hosts_file(hosts))
    (place / "bin/ssh").write_text('#!/bin/bash\nmkdir "${@: -2:1}"; HOME=$PWD/"${@: -2:1}" bash -c "${@: -1}"\n')
    (place / "home/tandem").mkdir()
    (place / "home/tandem/api-keys").write_text("a key\n")
    command = share_keys_command(LaunchFile.read(place / "hosts.yaml"))
    subprocess.run(["bash", "-c", f"({command})"], check=True)
    files = sorted(place.glob("me@*/tandem/api-keys"))
    assert [file.parts[-3] for file in files] == ["me@10.0.0.4", "me@10.0.0.5"]
    assert {(file.read_text(), file.stat().st_mode & 0o777) for file in files} == {("a key\n", 0o600)}


def test_what_a_provider_makes_is_reached_by_its_launcher(place: Path) -> None:
    """Which alone knows the address of its head."""
    tree = yaml.safe_load((place / "hosts.yaml").read_text())
    (place / "hosts.yaml").write_text(yaml.safe_dump({**tree, "provider": {"type": "aws"}}))
    no_head = 'echo "RuntimeError: Head node of cluster (ours) not found!" >&2; exit 1'
    serve = 'echo "Ready: http://10.0.0.1:8000"'
    answers = f'case "$*" in *"tandem status"*) {no_head} ;; *"tandem serve"*) {serve} ;; esac'
    (place / "bin/ray").write_text(f"{RAY}{answers}\n")
    assert cli.main(["up", "hosts.yaml"]) == 0
    serve = "tandem serve --detach --address auto --config ~/tandem/tandem.yaml --certificates ~/tandem-certs"
    assert asked(place)[-2:] == ["exec", serve]
    assert cli.main(["down", "hosts.yaml"]) == 0
    assert asked(place)[-4::2] == ["exec", "down"]
    assert asked(place)[-3].startswith("tandem status --address auto; ")


def test_a_providers_head_that_cannot_be_asked_may_have_a_cluster(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load((place / "hosts.yaml").read_text())
    (place / "hosts.yaml").write_text(yaml.safe_dump({**tree, "provider": {"type": "aws"}}))
    (place / "bin/ray").write_text(f"{RAY}echo 'Command failed:'; exit 1\n")
    assert cli.main(["up", "hosts.yaml"]) == 1
    assert "the head does not say whether one runs (Command failed:)" in capsys.readouterr().err
    assert "up" not in asked(place)


def test_settings_of_the_user_come_before_those_of_the_file(place: Path) -> None:
    (place / "tandem.yaml").write_text("security: {certificates: /etc/tandem}\n")
    file = LaunchFile.read(place / "hosts.yaml")
    wishes = Wishes({"prefill": 1, "model": "my models/a", "served-model-name": ["a", "*"]}, None)
    command = serve_command(file, load(place / "tandem.yaml"), wishes, has_keys=False)
    assert "--certificates" not in command
    assert "--prefill 1 --decode 1 --model 'my models/a' --served-model-name a '*'" in command


def test_each_host_that_is_named_for_routers_gets_one(place: Path) -> None:
    lists = {Role.PREFILL: ["10.0.0.2"], Role.ROUTER: ["10.0.0.4", "10.0.0.5"]}
    hosts = plan_hosts("10.0.0.1", lists, user="me", key="~/.ssh/key", cluster_name="ours")
    (place / "hosts.yaml").write_text(hosts_file(hosts))
    file, config = LaunchFile.read(place / "hosts.yaml"), load(place / "tandem.yaml")
    assert serve_command(file, config, Wishes({}, None), has_keys=False).endswith("--prefill 1 --routers 2")
    assert serve_command(file, config, Wishes({"routers": 1}, None), has_keys=False).endswith("--prefill 1 --routers 1")


def test_without_hosts_for_prefill_the_cluster_is_colocated(place: Path) -> None:
    lists = {Role.DECODE: ["10.0.0.2=2"]}
    hosts = plan_hosts("10.0.0.1", lists, user="me", key="~/.ssh/key", cluster_name="ours")
    (place / "hosts.yaml").write_text(hosts_file(hosts))
    file, config = LaunchFile.read(place / "hosts.yaml"), load(place / "tandem.yaml")
    assert serve_command(file, config, Wishes({}, None), has_keys=False).endswith("--prefill 0 --decode 2")
    assert serve_command(file, config, Wishes({"prefill": 1}, None), has_keys=False).endswith("--prefill 1 --decode 2")


def test_every_option_of_serve_is_passed_on(place: Path) -> None:
    given = (
        "--model m --served-model-name a --dtype float32 --quantize int8 --cache-dtype bfloat16 --host ::1 --port 9 "
        "--prefill 3 --decode 4 --routers 5"
    )
    assert cli.main(["up", "hosts.yaml", *given.split()]) == 0
    assert set(given.split()) <= set(asked(place)[-1].strip("()").split())
    options = set(vars(cli.make_parser().parse_args(["up", "hosts.yaml"]))) - {"command", "run", "debug", "version"}
    assert options - {"file", "api_keys_file"} == {
        word.removeprefix("--").replace("-", "_") for word in given.split() if word.startswith("--")
    }


@pytest.mark.parametrize("given", ["--engine simulated", "--time-model scenario.yaml"])
def test_a_cluster_of_hosts_is_not_simulated(place: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["up", "hosts.yaml", *given.split()])
    assert given in capsys.readouterr().err
    assert asked(place) == []


def test_an_expired_certificate_stops_it_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=3)

    make_certificates(place / "home/tandem-certs", days=1)
    monkeypatch.setattr("tandem.rpc.identity.datetime", Later)
    assert cli.main(["up", "hosts.yaml"]) == 1
    assert asked(place) == []


def test_certificates_with_their_authoritys_key_among_them_go_to_no_host(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_certificates(place / "home/tandem-certs", days=1)
    made.authority_key.rename(place / "home/tandem-certs/ca.key")
    assert cli.main(["up", "hosts.yaml"]) == 1
    assert "ca.key signs certificates and must reach no host" in capsys.readouterr().err
    assert asked(place) == []


@pytest.mark.parametrize(("text", "why"), [("", "is no file for Ray's launcher"), ("a: [", "is not YAML")])
def test_another_file_is_refused(place: Path, capsys: pytest.CaptureFixture[str], text: str, why: str) -> None:
    (place / "hosts.yaml").write_text(text)
    assert cli.main(["up", "hosts.yaml"]) == 1
    assert why in capsys.readouterr().err


def test_a_pool_that_follows_its_load_has_its_bounds_from_the_file(place: Path) -> None:
    lists = {Role.PREFILL: ["10.0.0.2"], Role.DECODE: ["10.0.0.3", "10.0.0.4"]}
    hosts = plan_hosts("10.0.0.1", lists, user="me", key="~/.ssh/key", cluster_name="ours")
    (place / "hosts.yaml").write_text(hosts_file(hosts))
    (place / "tandem.yaml").write_text("pools: {decode: {min: 1, max: 2}}\n")
    file, config = LaunchFile.read(place / "hosts.yaml"), load(place / "tandem.yaml")
    command = serve_command(file, config, Wishes({}, None), has_keys=False)
    assert "--prefill 1" in command
    assert "--decode" not in command
