"""The router as a plain process: `python -m router --config tandem.yaml --model-dir DIR …`.

SIGTERM and SIGINT drain: requests under way may end, then the process exits. A second signal ends it at once. It exits
too when it is stopped by its control service.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from router.http.auth import digests_of_variable
from router.server import RouterServer
from tandem.core import config as configuration
from tandem.core import fault_points, garbage
from tandem.core.errors import TandemError
from tandem.core.logging import setup_logging
from tandem.core.ready_file import write_ready_file
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import configure


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal; returns the exit status."""
    options = _parser().parse_args(arguments)
    fault_points.name_process(options.name or "router")
    try:
        config = configuration.load(options.config)
        setup_logging(config.logging, options.name or "router")
        configure(config.security, PeerRole.ROUTER, options.control_host)
        server = RouterServer(
            config,
            model_dir=options.model_dir,
            host=options.host or config.http.host,
            http_port=config.http.port if options.http_port is None else options.http_port,
            control_port=options.control_port,
            control_host=options.control_host,
            key_digests=digests_of_variable(os.environ),
            name=options.name,
            siblings=options.siblings,
        )
        stop_asked = _on_signals()
        info = server.start()
        garbage.settle()
    except TandemError as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 2
    if options.ready_file is not None:
        facts = {"http": info.http_url, "control": info.control_address, "pid": os.getpid()}
        write_ready_file(options.ready_file, facts)

    def stop_when_asked() -> None:
        stop_asked.wait()
        server.stop(options.drain_s)

    threading.Thread(target=stop_when_asked, daemon=True).start()
    server.wait_closed()
    return 1 if server.has_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router", description="Tandem's router as a plain process")
    parser.add_argument("--config", type=Path, help="read this tandem.yaml (default: the defaults)")
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="checkpoint with the tokenizer and the model's configuration"
    )
    parser.add_argument("--host", help="address to listen on (default: http.host)")
    parser.add_argument("--http-port", type=int, help="HTTP port; 0: a free one (default: http.port)")
    parser.add_argument("--control-host", default="127.0.0.1", help="address of the control service")
    parser.add_argument(
        "--control-port", type=int, default=0, help="port of the control service; 0: a free one (default: 0)"
    )
    parser.add_argument(
        "--ready-file", type=Path, help="JSON file to write when both ports listen, with their addresses"
    )
    parser.add_argument(
        "--name", default="", help="name of this router among several, such as router-0; its metrics have it as a label"
    )
    parser.add_argument(
        "--siblings",
        type=Path,
        metavar="DIR",
        help="share the HTTP port with the routers that were given this directory, of this user alone; needs --name",
    )
    parser.add_argument(
        "--drain-s", type=float, default=60.0, help="seconds to wait for running requests (default: 60)"
    )
    return parser


def _on_signals() -> threading.Event:
    """An event that the first signal sets."""
    asked = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return asked


if __name__ == "__main__":
    sys.exit(main())
