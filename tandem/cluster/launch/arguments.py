"""The command lines of `tandem hosts`, `tandem up` and `tandem down`."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cluster.launch.hosts import DEFAULT_KEY, DEFAULT_NAME

_SERVING = (
    "model", "served-model-name", "dtype", "quantize", "cache-dtype", "host", "port", "prefill", "decode", "routers",
)  # fmt: skip


def add_commands(
    commands: Any,
    add_command: Callable[..., argparse.ArgumentParser],
    add_serving_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add them. `add_serving_options` adds those of `tandem serve` that `tandem up` passes on."""
    _add_hosts(commands, add_command)
    up = add_command(
        commands,
        "up",
        "start the hosts of a file for Ray's launcher, and Tandem on them; return when it is ready",
        "tandem up cluster.yaml --host 0.0.0.0",
        _up,
    )
    _add_file(up)
    add_serving_options(up)
    up.add_argument(
        "--api-keys-file", type=Path, metavar="FILE",
        help="file with API keys that goes to the head (default: ~/tandem-api-keys, made if keys are needed)",
    )
    down = add_command(
        commands,
        "down",
        "stop Tandem, and end Ray on all hosts of a file for its launcher",
        "tandem down cluster.yaml",
        _down,
    )
    _add_file(down)


def _add_hosts(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        commands,
        "hosts",
        "write the file with which Ray's launcher and `tandem up` make a cluster of machines reached by SSH",
        "tandem hosts --head node1 --prefill node2,node3 --decode node4,node5 > cluster.yaml\n"
        "tandem hosts --head 10.0.0.1 --prefill 10.0.0.2=8 --decode 10.0.0.3=8 --user ubuntu --key ~/.ssh/cluster.pem",
        _hosts,
    )
    command.add_argument("--head", required=True, metavar="HOST", help="name or address of the head")
    for role, what in (("prefill", "prefill workers"), ("decode", "decode workers"), ("routers", "routers")):
        command.add_argument(
            f"--{role}", type=_list, default=[], metavar="HOSTS",
            help=f"hosts of {what}, with commas between; "
            + ("HOST=8 has room for eight" if role != "routers" else "one each (default: the head)"),
        )
    command.add_argument("--user", metavar="USER", help="who logs in on all of them (default: you)")
    command.add_argument(
        "--key", default=DEFAULT_KEY, metavar="FILE",
        help=f"private SSH key; the launcher copies it to the head (default: {DEFAULT_KEY})",
    )
    command.add_argument(
        "--name", default=DEFAULT_NAME, metavar="NAME", help=f"name of the cluster (default: {DEFAULT_NAME})"
    )


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="as `tandem hosts` writes it, or cluster.yaml")


def _list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _hosts(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.hosts import plan_hosts
    from tandem.cluster.launch.hosts_file import hosts_file
    from tandem.core.identity import Role

    lists = {Role.PREFILL: options.prefill, Role.DECODE: options.decode, Role.ROUTER: options.routers}
    user = options.user or getpass.getuser()
    hosts = plan_hosts(options.head, lists, user=user, key=options.key, cluster_name=options.name)
    print(hosts_file(hosts), end="")
    return 0


def _up(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.up import Wishes, up

    given = {name: getattr(options, name.replace("-", "_")) for name in _SERVING}
    wishes = Wishes({name: value for name, value in given.items() if value is not None}, options.api_keys_file)
    return up(options.file, wishes)


def _down(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.up import down

    return down(options.file)
