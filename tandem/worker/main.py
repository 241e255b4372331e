"""A worker as a plain process: `python -m prefill_worker`, `python -m decode_worker`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

from tandem.core import fault_points, garbage
from tandem.core.config import load
from tandem.core.errors import TandemError
from tandem.core.logging import setup_logging
from tandem.core.model_path import resolve_model
from tandem.core.ready_file import write_ready_file
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import configure
from tandem.worker.parts import WorkerPlace
from tandem.worker.process import Worker, WorkerProcess

_KV_BYTES = 256 << 20


def run(worker_class: type[Worker], program: str) -> None:
    """Parse the command line, run one worker, and exit when it is told to stop or fails."""
    options = _parse(worker_class.role, program)
    try:
        sys.exit(_serve(worker_class, options))
    except (TandemError, OSError) as error:
        sys.exit(f"{program}: {error}")


def _parse(role: str, program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=f"One {role} worker as a plain process. Routers and other workers reach it by gRPC. "
        "SIGTERM drains it: it takes no new work, finishes what it holds and leaves.",
        epilog=f"example: python -m {program} --port 7001 --threads 1",
    )
    parser.add_argument("--config", type=Path, help="read this tandem.yaml (default: the defaults)")
    parser.add_argument("--model-dir", type=Path, help="checkpoint (default: model.path of the configuration)")
    parser.add_argument("--worker-id", default=f"{role}-0", help="name of the worker (default: %(default)s)")
    parser.add_argument("--incarnation", default="", help="name of this incarnation (default: a new one)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on and to publish (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="gRPC port; 0: a free one (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine (default: %(default)s)")
    parser.add_argument(
        "--core-shares",
        type=Path,
        help="file by which the workers of this host share their CPU threads and weights (default: none)",
    )
    parser.add_argument("--kv-bytes", type=int, default=0, help="bytes of KV (default: cache.memory_bytes, or 256 MiB)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--ready-file", type=Path, help="JSON file to write when the worker can be reached")
    return parser.parse_args()


def _serve(worker_class: type[Worker], options: argparse.Namespace) -> int:
    config = load(options.config)
    setup_logging(config.logging, options.worker_id)
    configure(config.security, PeerRole(worker_class.role), options.host)
    fault_points.name_process(options.worker_id)
    place = WorkerPlace(
        worker_id=options.worker_id,
        incarnation=options.incarnation or f"{options.worker_id}-{uuid.uuid4().hex[:12]}",
        model_dir=options.model_dir or resolve_model(config.model.path, with_weights=config.model.engine == "torch"),
        kv_bytes=options.kv_bytes or config.cache.memory_bytes or _KV_BYTES,
        num_threads=options.threads,
        host=options.host,
        port=options.port,
        device=options.device,
        core_shares=options.core_shares,
    )
    worker = WorkerProcess(worker_class, config, place)

    def drain_and_stop() -> None:
        try:
            worker.drain()
        finally:
            worker.stop()

    def on_signal(number: int, _: object) -> None:
        # A handler must not block; a second signal finds the worker stopping already and ends it at once.
        signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=worker.stop if number == signal.SIGINT else drain_and_stop, daemon=True).start()

    info = worker.start()
    garbage.settle()
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if options.ready_file:
        facts = {"id": info.worker_id, "incarnation": info.incarnation, "address": info.address, "pid": os.getpid()}
        write_ready_file(options.ready_file, facts)
    try:
        worker.wait_closed()
    finally:
        worker.stop()
    return 0
