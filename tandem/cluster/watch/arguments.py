"""The command lines of `tandem top` and `tandem trace`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.cluster.client import Where
    from tandem.cluster.watch.face import Face

AddCommand = Callable[..., argparse.ArgumentParser]
WhereOf = Callable[[argparse.Namespace], "Where"]


def add_commands(
    commands: Any,
    add_command: AddCommand,
    add_target_options: Callable[[argparse.ArgumentParser], None],
    where_of: WhereOf,
) -> None:
    """Add them. `add_target_options` adds the options from which `where_of` makes which cluster is meant."""

    def face(options: argparse.Namespace) -> Face:
        from tandem.cluster.watch.face import find

        return find(where_of(options), options.url)

    def run_top(options: argparse.Namespace) -> int:
        from tandem.cluster.watch.top import top

        return top(face(options), once=options.once)

    def run_trace(options: argparse.Namespace) -> int:
        from tandem.cluster.watch.trace import trace

        return trace(face(options), options.request, as_json=options.json)

    live = add_command(
        commands,
        "top",
        "show workers and requests as they move, until Ctrl-C; the page at / shows more",
        "tandem top\ntandem top --url http://head:8000",
        run_top,
    )
    live.add_argument("--once", action="store_true", help="print what is now, and return")
    one = add_command(
        commands,
        "trace",
        "show where the time of a request went: one under way, or one of the last thousand of each router",
        "tandem trace 3f0c9a7be21d4c55a8f0a1b2c3d4e5f6",
        run_trace,
    )
    one.add_argument("request", metavar="ID", help="its x-request-id, which every answer carries")
    one.add_argument("--json", action="store_true", help="print everything as JSON")
    for command in (live, one):
        add_target_options(command)
        command.add_argument(
            "--url", help="where the cluster serves, if no cluster of this host is meant; an API key is read from "
            "TANDEM_API_KEY or OPENAI_API_KEY",
        )
