"""Make a small model with random weights, and a tokenizer, as a checkpoint directory that can be served.

    python tools/make_random_model.py /tmp/llama --arch llama --hidden 256 --layers 4

What is drawn, and how, is `tandem/engine/random_model.py`'s.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tandem.engine.random_model import ARCHITECTURES, ModelSpec, save


def main() -> None:
    """Read the command line, write the checkpoint, say what it is."""
    default = ModelSpec()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--arch", choices=ARCHITECTURES, default=default.arch)
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "max_positions", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--head-dim", type=int, default=None)
    parser.add_argument("--sliding-window", type=int, default=None)
    parser.add_argument("--tie", action="store_true", help="tie the output weights to the embeddings")
    parser.add_argument("--std", type=float, default=default.std)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default=default.dtype)
    options = vars(parser.parse_args())
    target = options.pop("target")
    spec = ModelSpec(**options)
    save(spec, target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(json.dumps({"target": str(target), "bytes": size, **options}))


if __name__ == "__main__":
    main()
