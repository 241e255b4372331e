"""The command lines of what looks at a running cluster, or changes it; imports stand inside what they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.core.arguments import pool_sizes, port, whole
from tandem.core.config import MAX_POOL

if TYPE_CHECKING:
    from tandem.cluster.client import Where

_AddCommand: TypeAlias = Callable[..., argparse.ArgumentParser]

_MANY_LINES = 100_000  # of a log, in which a request is looked for

_workers, _prefill_sizes, _sizes = whole(1, MAX_POOL), pool_sizes(0, MAX_POOL), pool_sizes(1, MAX_POOL)


def add_commands(commands: Any, add_command: _AddCommand) -> None:
    _add_status(commands, add_command)
    _add_scale(commands, add_command)
    _add_drain(commands, add_command)
    _add_upgrade(commands, add_command)
    _add_stop(commands, add_command)
    _add_logs(commands, add_command)


def add_target_options(command: argparse.ArgumentParser) -> None:
    """Those by which a command finds its cluster; `where` reads them."""
    command.add_argument("--port", type=port, metavar="N", help="HTTP port of the cluster; needed if several run here")
    command.add_argument(
        "--address", metavar="RAY", help="look in the Ray cluster at this address; `auto`: that of this host"
    )
    command.add_argument(
        "--certificates", type=Path, metavar="DIR",
        help="directory with the client's certificate, if it lies elsewhere here than on the cluster's hosts",
    )


def _add_status(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(commands, "status", "show the workers of a running cluster", "tandem status --json", _status)
    add_target_options(command)
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.add_argument(
        "--why", action="store_true", help="say too why pools that follow their load have the sizes that they have"
    )


def _add_scale(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        commands,
        "scale",
        "change how many workers each pool has, and how many routers there are, while requests run",
        "tandem scale --prefill 2 --decode 1\ntandem scale --prefill 1:4\ntandem scale --routers 2",
        _scale,
    )
    add_target_options(command)
    command.add_argument(
        "--prefill", type=_prefill_sizes, metavar="N|MIN:MAX",
        help="new number of prefill workers, fixed also where the pool followed its load; or the fewest and the most, "
        "between which it follows its load from now on (default: unchanged); with 0 the decode workers compute prompts "
        "too",
    )
    command.add_argument("--decode", type=_sizes, metavar="N|MIN:MAX", help="the same of decode workers")
    command.add_argument(
        "--routers", type=_workers, metavar="R", help="new number of routers (default: unchanged)"
    )
    command.add_argument("--no-wait", action="store_true", help="return at once; do not wait for the new size")


def _add_drain(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        commands,
        "drain",
        "replace one worker or router: it takes no new work, finishes or hands over its requests, and leaves",
        "tandem drain decode-0\ntandem drain router-0\ntandem drain decode-0 --no-replace-first --timeout 60",
        _drain,
    )
    add_target_options(command)
    command.add_argument("worker", metavar="WORKER", help="name of the worker or router, as `tandem status` shows it")
    command.add_argument(
        "--no-replace-first", action="store_true", help="start its successor after it has left, not before it drains"
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="kill it after this time; its requests are then tried elsewhere (default: 300)",
    )
    command.add_argument("--no-wait", action="store_true", help="return at once; do not wait until it is replaced")


def _add_upgrade(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        commands,
        "upgrade",
        "bring a new version to all nodes, and replace workers and routers one by one while requests run",
        "tandem upgrade dist/tandem_serving-0.2.0-py3-none-any.whl",
        _upgrade,
    )
    add_target_options(command)
    command.add_argument("wheel", type=Path, metavar="WHEEL", help="as `make wheel` makes it")
    command.add_argument("--no-wait", action="store_true", help="return at once; do not wait until all are replaced")


def _add_stop(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(commands, "stop", "stop a running cluster", "tandem stop --port 8000", _stop)
    add_target_options(command)
    command.add_argument("--now", action="store_true", help="end at once; do not wait for running requests")
    command.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="how long to wait for running requests (default: 30)",
    )


def _add_logs(commands: Any, add_command: _AddCommand) -> None:
    command = add_command(
        commands,
        "logs",
        "show what the processes of a cluster have written, on whatever host they run",
        "tandem logs\ntandem logs decode-0 --follow\ntandem logs --request 3f0c9a7be21d4c55a8f0a1b2c3d4e5f6",
        _logs,
    )
    add_target_options(command)
    command.add_argument(
        "worker", nargs="?", default="", metavar="WORKER",
        help="a worker's name, router or supervisor (default: all of them)",
    )
    command.add_argument("--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    command.add_argument(
        "--tail", type=whole(0), metavar="N",
        help="last lines of each (default: 100 of one, 10 of all, 100,000 for a request)",
    )
    command.add_argument("--request", default="", metavar="ID", help="only lines that name this request")


# --- what they run ----------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.status(where(options), as_json=options.json, why=options.why)


def _scale(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.scale(
        where(options),
        prefill=options.prefill,
        decode=options.decode,
        routers=options.routers,
        wait=not options.no_wait,
    )


def _drain(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.drain(
        where(options),
        options.worker,
        replace_first=not options.no_replace_first,
        timeout_s=options.timeout,
        wait=not options.no_wait,
    )


def _upgrade(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.upgrade(where(options), options.wheel, wait=not options.no_wait)


def _stop(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.stop(where(options), now=options.now, grace_s=options.grace)


def _logs(options: argparse.Namespace) -> int:
    from tandem.cluster.logs import logs

    default = _MANY_LINES if options.request else 100 if options.worker else 10
    num_lines = default if options.tail is None else options.tail
    cluster = where(options)
    return logs(cluster, options.worker, num_lines=num_lines, follow=options.follow, request_id=options.request)


def where(options: argparse.Namespace) -> Where:
    from tandem.cluster.client import Where

    return Where(options.port, options.address, options.certificates)
