"""`tandem up FILE` and `tandem down FILE`: from a file for Ray's launcher to a cluster that answers, and back.

    checks ─> what is missing is made ─> `ray up` ─> API keys to the head ─> `tandem serve --detach` there ─> ready
    `tandem stop` ─> Ray ended on every host that stays ─> `ray down`
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.cluster.launch.launch_file import LaunchFile
from tandem.cluster.launch.launcher import SSH_OPTIONS, Answer, Launcher
from tandem.cluster.launch.prepare import prepare_keys, prepare_mounts
from tandem.cluster.serve.report import Reporter
from tandem.core.config import Config, load
from tandem.core.errors import NOT_RUNNING, ConfigError, InternalError, WorkerLostError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.rpc.security import is_loopback

DEFAULT_KEYS = Path("~/tandem-api-keys")
"""Where `tandem up` makes a key, if the cluster needs one and the user names none."""

_KEYS_ON_HEAD = "~/tandem/api-keys"
_STATUS = "tandem status --address auto"
_NO_SUCH_COMMAND = 127
_FIND_RAY = "pgrep -u \"$(id -u)\" -x 'raylet|gcs_server'"
_NONE_FOUND = 1
_STOP = "tandem stop --address auto"
_READY = "Ready: "
_KEY_IN_CURL = "-H 'Authorization: Bearer KEY'"


class AskedHead(Protocol):
    """Answers questions as `Launcher` does."""

    def ask_head(self, question: str) -> Answer: ...


@dataclass(frozen=True)
class Wishes:
    """What the command line says beside the file. `options`: of `tandem serve`, by their names, as far as given."""

    options: dict[str, object]
    api_keys_file: Path | None


def up(path: Path, wishes: Wishes) -> int:
    """Raises `TandemError`: something is wrong here, or a step failed."""
    with Reporter() as reporter:
        file = LaunchFile.read(path)
        launcher = Launcher(file)
        config = _config(file, wishes)
        reporter.line("Preparing", style="bold")
        prepare_mounts(file, reporter.line)
        keys = prepare_keys(
            config.http, wishes.api_keys_file, DEFAULT_KEYS.expanduser(), os.environ, reporter.line
        )
        is_running, why = asked_whether_one_runs(launcher)
        if is_running is None:
            raise WorkerLostError(
                f"a Tandem cluster may run on the hosts of {path}, and `ray up` would end it: {why}; mend that, or end "
                f"what may be left there with `tandem down {path}`. This command goes on when the head "
                "can be reached and no Ray (raylet, gcs_server) runs there any more"
            )
        if is_running:
            raise ConfigError(
                f"a Tandem cluster runs on the hosts of {path}, and `ray up` would end it; end it in order with "
                f"`tandem down {path}`",
                key="FILE",
            )
        reporter.line("Starting Ray on the hosts: `ray up`", style="bold")
        launcher.up()
        if keys is not None:
            launcher.copy_to_head(str(keys), _KEYS_ON_HEAD)
            if file.workers_with(Role.ROUTER) and not launcher.on_head(share_keys_command(file)):
                raise InternalError("the API keys did not reach every host that has routers, as said above")
        reporter.line("Starting Tandem on the head", style="bold")
        said = _serve(launcher, serve_command(file, config, wishes, has_keys=keys is not None))
        for line in _closing(path, said, config, keys):
            reporter.line(line)
    return 0


def down(path: Path) -> int:
    """Raises `TandemError`: something may still run; says what."""
    with Reporter() as reporter:
        file = LaunchFile.read(path)
        launcher = Launcher(file)
        reporter.line("Stopping Tandem", style="bold")
        is_running, why = asked_whether_one_runs(launcher)
        if is_running is not False:
            launcher.on_head(_STOP)
        if not is_running:
            reporter.line(f"  {why}")
        has_left = False
        if file.worker_addresses:
            reporter.line("Ending Ray on the hosts", style="bold")
            has_left = not launcher.on_head(end_ray_command(file))
        launcher.down()
        if has_left:
            raise WorkerLostError(
                "Ray may still run on the hosts named above; run `ray stop` there, or this command again"
            )
        reporter.line("Ended.")
    return 0


def asked_whether_one_runs(head: AskedHead) -> tuple[bool | None, str]:
    """Whether a cluster runs on the head; `None`: nobody can tell. And why it is not known to."""
    answer = head.ask_head(_STATUS)
    if answer.code == 0:
        return True, ""
    if answer.code == NOT_RUNNING:
        return False, "none runs on the head"
    if answer.code == _NO_SUCH_COMMAND:
        return False, "Tandem is not installed on the head"
    if not answer.has_head:
        return False, "there is no head"
    # What is installed there may be broken, or older than its codes: `ray up` installs what is to be.
    if answer.code is not None and head.ask_head(_FIND_RAY).code == _NONE_FOUND:
        return False, "no Ray runs on the head"
    return None, f"the head does not say whether one runs ({answer.last_line})"


def serve_command(file: LaunchFile, config: Config, wishes: Wishes, *, has_keys: bool) -> str:
    """How the head starts Tandem. On machines that stay, with as many workers as they have room for, and a router on
    each of those that are named for routers; where there is room for decode alone, without prefill workers."""
    words = ["tandem serve --detach --address auto"]
    if (mount := file.mount("tandem.yaml")) is not None:
        words.append(f"--config {mount.in_shell}")
    if (mount := file.mount("tandem-certs")) is not None and not config.security.certificates:
        words.append(f"--certificates {mount.in_shell}")
    if has_keys:
        words.append(f"--api-keys-file {_KEYS_ON_HEAD}")
    has_place = {role: file.places[role] > 0 for role in WORKER_ROLES}
    has_place[Role.PREFILL] |= has_place[Role.DECODE]
    # A pool that follows its load has its bounds from the file that the head reads.
    follows = {role: pool.least < pool.most for role in WORKER_ROLES for pool in [getattr(config.pools, role)]}
    places = {str(role): file.places[role] for role in WORKER_ROLES if has_place[role] and not follows[role]}
    routers = {"routers": file.places[Role.ROUTER]} if file.places[Role.ROUTER] > 1 else {}
    for name, value in {**places, **routers, **wishes.options}.items():
        values = value if isinstance(value, list) else [value]
        words.append(f"--{name} {' '.join(shlex.quote(str(each)) for each in values)}")
    return " ".join(words)


def end_ray_command(file: LaunchFile) -> str:
    """Ends Ray on the head, which else would start it again on the others, and then on those, as the head reaches them.

    Fails, after all were tried, where one could not be reached, and names it.
    """
    stop = "~/tandem/venv/bin/ray stop --force"
    others = _on_each(file, file.worker_addresses, stop, "/dev/null", "Ray was not ended on")
    return f"ray stop --force --log-style pretty; {others}"


def share_keys_command(file: LaunchFile) -> str:
    """Copies the API keys from the head to those other hosts that may have routers, which read the file too."""
    put = f"umask 077; mkdir -p ~/tandem; cat > {_KEYS_ON_HEAD}"
    return _on_each(file, file.workers_with(Role.ROUTER), put, _KEYS_ON_HEAD, "API keys did not get to")


def _on_each(file: LaunchFile, addresses: list[str], command: str, source: str, failed: str) -> str:
    """Runs a command on hosts that the head reaches, all at a time, and names those where it failed."""
    key = "-i ~/ray_bootstrap_key.pem " if file.has_key else ""
    ssh = f"ssh {key}{' '.join(SSH_OPTIONS)} {shlex.quote(file.user)}@$host {shlex.quote(command)}"
    hosts = " ".join(map(shlex.quote, addresses))
    return (
        f"left=$(for host in {hosts}; do ({ssh} <{source} >/dev/null 2>&1 || echo $host) & done; wait); "
        f'test -z "$left" || {{ echo {failed} $left; false; }}'
    )


def _config(file: LaunchFile, wishes: Wishes) -> Config:
    """What `tandem serve` will read on the head, as far as it is known here. Raises `ConfigError`: it is wrong."""
    mount = file.mount("tandem.yaml")
    given = {"http.host": wishes.options.get("host"), "http.port": wishes.options.get("port")}
    return load(mount.source if mount else None, {key: value for key, value in given.items() if value is not None})


def _serve(launcher: Launcher, command: str) -> list[str]:
    said: list[str] = []
    if not launcher.on_head(command, said.append):
        raise InternalError(
            "Tandem did not become ready on the head, as said above; Ray runs there, and `tandem down` ends it"
        )
    return said


def _closing(path: Path, said: list[str], config: Config, keys: Path | None) -> list[str]:
    """Where the cluster is reached, with a command to try that holds as it stands."""
    url = next((line.removeprefix(_READY) for line in said if line.startswith(_READY)), "")
    curl = next((f"curl {line.partition('curl ')[2]}" for line in said if f"curl {url}" in line), "")
    if keys is not None:
        curl = curl.replace(_KEY_IN_CURL, f'-H "Authorization: Bearer $(grep -m1 -v \'^#\' {keys})"')
    lines = [f"Ready: {url}", ""]
    if is_loopback(config.http.host):
        lines = [
            f"Ready: {url} on the head, and there only. A tunnel to it, as long as this runs:",
            "",
            f"  ray attach {path} --port-forward {config.http.port}",
            "",
        ]
    return [*lines, f"  try it    {curl}", f"  end it    tandem down {path}"]
