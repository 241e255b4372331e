"""The servers of a comparison, and how each is started."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.bench.server_process import Command
from tandem.core.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """What all servers are started with."""

    model: Path  # a checkpoint directory
    port: int  # the one that is asked; those above it are for what stands behind
    cores: Sequence[int]  # by their numbers in the system
    directory: Path  # for configuration and logs; it exists
    peer_venv: Path | None = None
    split_router: Path | None = None  # the program that joins the peer's two engines
    dtype: str = "float32"  # of the checkpoint; the peer is told, Tandem looks
    told: tuple[float, float] | None = None  # TTFT and TPOT, s, that are wanted; the peer has no setting for it


@dataclass(frozen=True)
class Contestant:
    """One of the servers that can be compared."""

    name: str
    title: str
    commands: Callable[[Place], list[Command]]
    is_peer: bool = False
    num_workers: int = 1  # or engines, of which each has a batch of its own


# --- how each is started ----------------------------------------------------------------------------------------------


def _tandem(place: Place, *options: str, config: str = "") -> list[Command]:
    program = str(Path(sys.executable).with_name("tandem"))
    argv = [program, "serve", "--model", str(place.model), "--port", str(place.port), *options]
    if place.told is not None:
        ttft_s, tpot_s = place.told
        config += f"slo:\n  ttft_ms: {ttft_s * 1e3:.0f}\n  tpot_ms: {tpot_s * 1e3:.0f}\n"
    if config:
        path = place.directory / "tandem.yaml"
        path.write_text(config)
        argv += ["--config", str(path)]
    return [Command("tandem", tuple(argv), place.port)]


def _strict(place: Place) -> list[Command]:
    return _tandem(place, config="scheduling:\n  mixed_pool: false\n")


def _int8(place: Place) -> list[Command]:
    return _tandem(place, config="model:\n  quantize: int8\n")


def _int4(place: Place) -> list[Command]:
    return _tandem(place, config="model:\n  quantize: int4\n")


def _tandem_colocated(place: Place) -> list[Command]:
    """As many workers as the split has, of which each computes its prompts itself."""
    return _tandem(place, "--prefill", "0", "--decode", "2")


def _colocated(place: Place) -> list[Command]:
    return [_engine(place, "engine", place.port, place.cores)]


def _split(place: Place) -> list[Command]:
    """One engine on each half of the cores, decode on the greater one; pages go from one to the other over NIXL."""
    half = max(1, len(place.cores) // 2)
    decode_cores = place.cores[half:] or place.cores  # of one core both have it
    engines = []
    for number, (name, cores) in enumerate((("prefill", place.cores[:half]), ("decode", decode_cores)), 1):
        connector = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.port + 10 + number)}
        options = ("--kv-transfer-config", connector)
        engines.append(_engine(place, name, place.port + number, cores, options, side_channel))
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    argv = (str(_venv(place) / "bin/python"), str(place.split_router), str(place.port), *urls)
    return [*engines, Command("router", argv, place.port)]


def _engine(
    place: Place,
    name: str,
    port: int,
    cores: Sequence[int],
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Command:
    argv = (
        str(_venv(place) / "bin/vllm"), "serve", str(place.model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", place.dtype, *options,
    )  # fmt: skip
    common = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(name, argv, port, {**common, **(env or {})})


def _venv(place: Place) -> Path:
    if place.peer_venv is None:
        raise ConfigError("the peer's virtual environment is not known: give --peer-venv", key="--peer-venv")
    return place.peer_venv


CONTESTANTS = (
    Contestant("tandem", "Tandem", _tandem, num_workers=2),
    Contestant("tandem-strict", "Tandem, strict split", _strict, num_workers=2),
    Contestant("peer-colocated", "vLLM, one engine", _colocated, is_peer=True),
    Contestant("peer-split", "vLLM, split over NIXL", _split, is_peer=True, num_workers=2),
)
#: Beside them, for whoever asks whether splitting is worth it.
TANDEM_COLOCATED = Contestant("tandem-colocated", "Tandem, colocated", _tandem_colocated, num_workers=2)
#: Against Tandem itself, for whoever asks what fewer bits a weight give; nobody's tokens are the same.
QUANTIZED = (
    Contestant("tandem-int8", "Tandem, int8", _int8, num_workers=2),
    Contestant("tandem-int4", "Tandem, int4", _int4, num_workers=2),
)


def chosen_contestants(
    names: Sequence[str], peer_venv: Path | None, among: Sequence[Contestant] = CONTESTANTS
) -> tuple[list[Contestant], list[str]]:
    """Those that can be started here, and a message for each that cannot.

    Raises:
        ConfigError: there is no contestant of such a name, or none that is left.
    """
    known = {contestant.name: contestant for contestant in among}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no server is called {', '.join(unknown)}; there are {', '.join(known)}", key="--servers")
    wanted = [contestant for contestant in among if contestant.name in names]
    why = _why_no_peer(peer_venv)
    left = [contestant for contestant in wanted if not (contestant.is_peer and why)]
    messages = [f"{contestant.name} is left out: {why}" for contestant in wanted if contestant not in left]
    if not left:
        raise ConfigError("; ".join(messages) or "no server is named", key="--servers")
    return left, messages


def _why_no_peer(peer_venv: Path | None) -> str:
    if peer_venv is None:
        return "name the virtual environment of vLLM with --peer-venv or PEER_VENV (tools/setup_peer.sh makes one)"
    if not (peer_venv / "bin/vllm").is_file():
        return f"{peer_venv} holds no vLLM (tools/setup_peer.sh installs it)"
    return ""

def command_line(command: Command, place: Place) -> str:
    """As one would type it, with names for the directories of this machine."""
    text = shlex.join([*(f"{name}={value}" for name, value in command.env.items()), *command.argv])
    for path, name in (
        (place.model, "MODEL"),
        (place.directory, "LOGS"),
        (place.peer_venv, "PEER_VENV"),
        (place.split_router and place.split_router.parent, "TOOLS"),
        (Path(sys.executable).parent, "BIN"),
    ):
        text = text if path is None else text.replace(str(path), name)
    return text
