"""The rate of numpy's matrix product, in a process of its own: its BLAS takes its threads from the environment, once.

    python -m benchmarks.kernels.numpy_probe 2048 1.0

prints the name of the BLAS, and operations a second of the best run within that many seconds, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.kernels.roofline import Probe
from benchmarks.timing import timed
from tandem.core.errors import InternalError

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_START_S = 60.0


def probe_numpy(num_threads: int, size: int, budget_s: float) -> Probe:
    """Multiply matrices of `size` squared in a child process."""
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
    command = [sys.executable, "-m", __name__, str(size), str(budget_s)]
    try:
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=budget_s + _START_S
        )
    except subprocess.CalledProcessError as error:
        raise InternalError(f"the probe of numpy failed: {error.stderr.strip()}") from error
    found = json.loads(child.stdout)
    return Probe(f"numpy ({found['blas']})", found["rate"])


def main(size: int, budget_s: float) -> None:
    """Measure and print."""
    import numpy as np

    generator = np.random.default_rng(0)
    first, second = (generator.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    output = np.empty_like(first)
    timing = timed(lambda: np.matmul(first, second, out=output), budget_s)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    print(json.dumps({"blas": blas, "rate": 2 * size**3 / timing.best_s}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
