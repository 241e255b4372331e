#!/usr/bin/env bash
# All that a machine with a GPU can tell of Tandem in one run of under nine minutes, without a network: tests/gpu, what
# prefill and decode of a 1 B and an 8 B model take, and handoffs between two processes on one card.
#
#   PYTHON   an interpreter with torch, triton, transformers, numpy, pytest, safetensors, tokenizers, grpcio, protobuf,
#            pyyaml, xxhash, jinja2, prometheus-client and uvloop; nothing else is needed   (python3)
#   OUT      where gpu_check.json and gpu_check.log go                                      (./gpu-check)
#
#   tools/gpu_check.sh --small    on a CPU, with a tiny model: shows that it runs
#
# Exit code: 0, all parts passed; 1, some did not: the JSON says which.
set -euo pipefail
export OUT="${OUT:-$PWD/gpu-check}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.check "$@"
