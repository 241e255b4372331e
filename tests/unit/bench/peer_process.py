"""A process that serves as the servers of a comparison do, for tests that start and end real ones.

python peer_process.py PORT [--has-metrics] [--is-stubborn PID_FILE] [--fails]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from bench_peers import request_with_body, well_behaved, whole

MODELS = whole("200 OK", {"data": [{"id": "toy", "max_model_len": 4096}]})
NOT_FOUND = whole("404 Not Found", {})


class Server:
    """With metrics it is a Tandem whose prefill workers compute three of four prompt tokens."""

    def __init__(self, *, has_metrics: bool) -> None:
        self.has_metrics = has_metrics
        self.num_prompt_tokens = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, body = await request_with_body(reader)
                path = head.split()[1]
                if path == b"/v1/completions":
                    asked = json.loads(body)
                    self.num_prompt_tokens += len(asked["prompt"])
                    await well_behaved(asked, writer)
                else:
                    writer.write(self.page(path))
        writer.close()

    def page(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            return MODELS
        if path == b"/health":
            return whole("200 OK", {})
        return self.metrics() if path == b"/metrics" and self.has_metrics else NOT_FOUND

    def metrics(self) -> bytes:
        parts = {"prefill": self.num_prompt_tokens * 3 / 4, "decode": self.num_prompt_tokens / 4}
        lines = [f'tandem_prompt_tokens_computed_total{{role="{role}"}} {number}\n' for role, number in parts.items()]
        body = "# TYPE tandem_prompt_tokens_computed_total counter\n" + "".join(lines)
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body.encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--has-metrics", action="store_true")
    parser.add_argument("--is-stubborn", type=Path)
    parser.add_argument("--fails", action="store_true")
    options = parser.parse_args()
    if options.fails:
        sys.exit("no such checkpoint")
    if options.is_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        options.is_stubborn.write_text(str(child.pid))
    asyncio.run(serve(options.port, Server(has_metrics=options.has_metrics)))


async def serve(port: int, server: Server) -> None:
    listener = await asyncio.start_server(server, "127.0.0.1", port)
    await listener.serve_forever()


if __name__ == "__main__":
    main()
