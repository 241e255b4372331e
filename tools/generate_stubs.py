"""Generate `tandem/rpc/v1` from `protos/tandem/v1`.

python tools/generate_stubs.py            write the stubs
python tools/generate_stubs.py --check    fail when the committed stubs are stale
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "tandem" / "rpc" / "v1"


def generate() -> dict[str, str]:
    """The generated files by name, with imports that point to where they are kept."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("tandem/v1/*.proto"))
    with tempfile.TemporaryDirectory() as out:
        includes = Path(grpc_tools.__file__).parent / "_proto"
        plugins = Path(sys.executable).parent
        arguments = [
            "protoc",
            f"-I{PROTOS}",
            f"-I{includes}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed; see its message above")
        made = {p.name: _relocated(p.read_text()) for p in sorted(Path(out, "tandem", "v1").iterdir())}
    return {"__init__.py": '"""Generated from `protos/tandem/v1` by `make stubs`."""\n', **made}


def _relocated(text: str) -> str:
    """Stubs live in `tandem.rpc.v1`, while the wire package stays `tandem.v1`."""
    text = re.sub(r"^from tandem\.v1 import", "from tandem.rpc.v1 import", text, flags=re.M)
    text = re.sub(r"\btandem\.v1\.(\w+_pb2)", r"tandem.rpc.v1.\1", text)
    return text.replace("import tandem.v1", "import tandem.rpc.v1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only, exit 1 when stale")
    check = parser.parse_args().check
    fresh = generate()
    if check:
        kept = {p.name: p.read_text() for p in TARGET.iterdir() if p.is_file()}
        stale = sorted(n for n in fresh.keys() | kept.keys() if fresh.get(n) != kept.get(n))
        if stale:
            sys.exit(f"stale stubs: {', '.join(stale)}; run: python tools/generate_stubs.py")
        print(f"{len(fresh)} stubs are fresh")
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    for old in TARGET.iterdir():
        if old.is_file():
            old.unlink()
    for name, text in fresh.items():
        (TARGET / name).write_text(text)
    print(f"wrote {len(fresh)} files to {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
