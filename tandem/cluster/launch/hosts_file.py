"""The file for Ray's launcher that `tandem hosts` writes. The text is here and nowhere else."""

from __future__ import annotations

import json
import re
from string import Template
from typing import Final

import yaml

from tandem.cluster.launch.hosts import DEFAULT_NAME, Host, Hosts
from tandem.core.identity import Role

# What begins with a letter is no number in any YAML; "~" is null, and these words are no text in some.
_PLAIN: Final = re.compile(r"(?:~?/|[A-Za-z])[A-Za-z0-9_.~/-]*")
_WORDS: Final = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])
_ONE_LINE: Final = 1 << 30
_OPTIONS: Final = {Role.PREFILL: "--prefill", Role.DECODE: "--decode", Role.ROUTER: "--routers"}

_PIP: Final = "~/tandem/venv/bin/pip"

_TEMPLATE: Final = Template("""\
# A Tandem cluster on machines that are reached by SSH, in the format of Ray's cluster launcher. Made by
#
#   $command
#
# Edit it, or make it again. `tandem up FILE` starts what it describes, `tandem down FILE` ends it: docs/deploy.md.
#
# With `provider: local` Ray knows a single type of node, so what a machine is for cannot be said by type. It is said
# where its Ray starts: the case statement at the end of this file gives each address its resources.

cluster_name: $cluster_name

provider:
  type: local
  head_ip: $head
  worker_ips:$worker_ips

auth:
  ssh_user: $user  # the same user on all machines
  ssh_private_key: $key

# Fixed machines: all of them join, none is given back.
min_workers: $num_workers
max_workers: $num_workers

# Paths on the right are relative to where the launcher runs. All machines get the same ones.
file_mounts:
  ~/tandem/dist: dist
  ~/tandem/requirements: requirements
  ~/tandem/tandem.yaml: tandem.yaml
  # The secret that Ray's processes share, so that nobody else in the network runs code here (`ray get-auth-token
  # --generate`). RAY_AUTH_MODE below makes every node ask for it.
  ~/.ray/auth_token: ~/.ray/auth_token
  # The certificates by which Tandem's own processes know each other (`tandem certs ~/tandem-certs`). The head keeps
  # all; where another machine starts, the end of this file removes those that are not for its own roles.
  ~/tandem-certs: ~/tandem-certs

# Every machine needs an SSH server, rsync, and Python 3.11 or newer, the same on all, with its venv module.
setup_commands:
  - test -x ~/tandem/venv/bin/python || python3 -m venv ~/tandem/venv
  - grep -q tandem/venv ~/.bashrc || echo 'export PATH="$$HOME/tandem/venv/bin:$$PATH"' >> ~/.bashrc
  - grep -q RAY_AUTH_MODE ~/.bashrc || echo 'export RAY_AUTH_MODE=token' >> ~/.bashrc
  # torch first, so that all that depends on it finds this build; the wheel leaves the choice open.
  - $pip install -c ~/tandem/requirements/lock.txt torch==2.13.0
  # What the wheel needs, with NIXL's build for CUDA 13 where torch is for that; then the wheel itself, for pip takes
  # one of the same version for installed. rsync leaves older wheels where they are: dist/wheel.txt names the one.
  - >-
    extra=$$(~/tandem/venv/bin/python -c
    'import torch; print("[cuda13]" * str(torch.version.cuda).startswith("13."))') &&
    $pip install -c ~/tandem/requirements/lock.txt ~/tandem/dist/"$$(cat ~/tandem/dist/wheel.txt)$$extra"
  - $pip install --no-deps --force-reinstall ~/tandem/dist/"$$(cat ~/tandem/dist/wheel.txt)"

# Each machine says by which address the others reach it: by its name it may find 127.0.1.1.
#
# If the head's control store (gcs_server) dies, requests go on, and every Ray process waits for it so many seconds
# before it ends itself. A host that is cut off stays in the cluster for about two minutes (the health checks), and
# nothing is started there meanwhile: see docs/deploy.md for both. Autoscaler v2, which Ray's launcher turns on,
# counts the head among the workers where there is one type of node, and would leave one of them out.
#
# Ray gives its own start 30 s, which a slow or busy machine may exceed: it is tried three times.
head_start_ray_commands:
  - ray stop
  - echo $head > ~/tandem/head
  - >-
    ulimit -n 65536; export RAY_AUTH_MODE=token; export RAY_gcs_rpc_server_reconnect_timeout_s=600;
    export RAY_enable_autoscaler_v2=0;
    export RAY_health_check_timeout_ms=20000 RAY_health_check_failure_threshold=6;
    for try in 1 2 3; do ray start --head --port=6379 --node-ip-address=$head --resources='$head_resources'
    --autoscaling-config=~/ray_bootstrap_config.yaml && exit;
    echo "Ray has not started on $head (try $$try of 3)" >&2; ray stop; done; exit 1

worker_start_ray_commands:
  - ray stop
  # The numbers: how many workers a machine has room for, one for each GPU. A machine that is not listed does not join,
  # rather than joining without a purpose.
  - >-
    case " $$(hostname -I) " in
$cases
    *) echo "no role for $$(hostname -I)in worker_start_ray_commands" >&2; exit 1 ;;
    esac;
    test "$$(cat ~/tandem/head 2>/dev/null)" = "$head" ||
    for role in supervisor router client prefill decode; do
    case " $$roles " in *" $$role "*) ;; *) rm -f ~/tandem-certs/$$role.pem ~/tandem-certs/$$role.key ;; esac; done;
    ulimit -n 65536; export RAY_AUTH_MODE=token; export RAY_gcs_rpc_server_reconnect_timeout_s=600;
    for try in 1 2 3; do
    ray start --address=$$RAY_HEAD_IP:6379 --node-ip-address=$$address --resources="$$resources" && exit;
    echo "Ray has not started on $$address (try $$try of 3)" >&2; ray stop; done; exit 1
""")


def hosts_file(hosts: Hosts) -> str:
    """The whole file."""
    return _TEMPLATE.substitute(
        command=_command(hosts),
        pip=_PIP,
        cluster_name=_text(hosts.cluster_name),
        head=hosts.head.address,
        worker_ips="".join(f"\n    - {_with_name(host)}" for host in hosts.workers) or " []",
        user=_text(hosts.user),
        key=_text(hosts.key),
        num_workers=len(hosts.workers),
        head_resources=_resources(hosts.head),
        cases="\n".join(map(_case, hosts.workers)),
    )


def _command(hosts: Hosts) -> str:
    """What makes this file."""
    everyone = (hosts.head, *hosts.workers)
    words = [f"tandem hosts --head {_label(hosts.head)}"]
    for role, option in _OPTIONS.items():
        having = [host for host in everyone if role in host.places]
        if having and not (role is Role.ROUTER and having == [hosts.head]):
            words.append(f"{option} {','.join(_with_number(host, role) for host in having)}")
    words.append(f"--user {hosts.user} --key {hosts.key}")
    if hosts.cluster_name != DEFAULT_NAME:
        words.append(f"--name {hosts.cluster_name}")
    return " ".join(words)


def _label(host: Host) -> str:
    return host.name or host.address


def _with_number(host: Host, role: Role) -> str:
    num = host.places[role]
    return _label(host) if num == 1 else f"{_label(host)}={num}"


def _case(host: Host) -> str:
    roles = " ".join(host.places)
    return f"""    *" {host.address} "*) address={host.address} roles='{roles}' resources='{_resources(host)}' ;;"""


def _with_name(host: Host) -> str:
    return f"{host.address}  # {host.name}" if host.name else host.address


def _text(value: str) -> str:
    """As YAML has it: in quotes unless all of its readers take it for text, and for this text, without them."""
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if is_plain else yaml.safe_dump(value, default_style='"', width=_ONE_LINE).strip()


def _resources(host: Host) -> str:
    return json.dumps({str(role): num for role, num in host.places.items()})
