"""The command line, `tandem COMMAND`: parsing, and which function each command calls; imports stand inside these."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.advise.arguments import add_advise_to
from tandem.batch.arguments import add_command_to as add_batch_command
from tandem.cluster.arguments import add_commands as add_cluster_commands
from tandem.cluster.arguments import add_target_options, where
from tandem.cluster.launch.arguments import add_commands as add_launch_commands
from tandem.cluster.watch.arguments import add_commands as add_watch_commands
from tandem.core.arguments import Parser, PoolSizes, pool_sizes, port, whole
from tandem.core.config import MAX_POOL, Config, load
from tandem.core.dtypes import KV_DTYPES
from tandem.core.errors import NOT_RUNNING, ConfigError, NotRunningError, TandemError
from tandem.plan.arguments import add_command_to as add_plan_command
from tandem.sim.arguments import add_command_to as add_sim_command

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_QUANTIZE = ("none", "int8", "int4")
_ENGINES = ("torch", "simulated")

_PIPE_CLOSED = 128 + 13  # as shells have it for SIGPIPE

_workers, _prefill_sizes, _sizes = whole(1, MAX_POOL), pool_sizes(0, MAX_POOL), pool_sizes(1, MAX_POOL)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 wrong usage, 3 no cluster runs, 130 interrupted, 141: the
    reader of the output has closed it."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.version:
        return _version(options)
    if options.command is None:
        parser.print_help()
        return 0
    return run("tandem", options)


def run(program: str, options: argparse.Namespace) -> int:
    """Run the command that was parsed; failures are told in one line. Returns the exit code, as `main` does."""
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except TandemError as error:
        if options.debug:
            traceback.print_exc()
        print(f"{program} {options.command}: {error.message}", file=sys.stderr)
        return NOT_RUNNING if isinstance(error, NotRunningError) else 1
    except BrokenPipeError:  # whoever read the output, `head` say, has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere at exit
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print(f"{program} {options.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            raise
        print(
            f"{program} {options.command}: {type(error).__name__}: {error} (a defect; --debug shows where)",
            file=sys.stderr,
        )
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem",
        description="Serve a language model with prefill and decode on separate workers.",
        epilog="example:\n  tandem serve\n\n`tandem COMMAND --help` explains each command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    add_cluster_commands(commands, add_command)
    add_watch_commands(commands, add_command, add_target_options, where)
    add_launch_commands(commands, add_command, _add_serving_options)
    _add_doctor(commands)
    _add_certs(commands)
    _add_bench(commands)
    add_batch_command(commands, add_command)
    add_sim_command(commands, add_command)
    add_plan_command(commands, add_command)
    add_command(commands, "version", "print the version", "tandem version", _version)
    return parser


def add_command(commands: Any, name: str, help: str, example: str, run: Any) -> argparse.ArgumentParser:
    """A command with `--debug`, an example below its help, and `run` as what it does with the options."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="example:\n  " + example.replace("\n", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show a traceback when the command fails")
    command.set_defaults(run=run)
    return command


def _add_serve(commands: Any) -> None:
    command = add_command(
        commands,
        "serve",
        "start a cluster in the foreground; Ctrl-C stops it",
        "tandem serve --model Qwen/Qwen2.5-0.5B-Instruct --prefill 1 --decode 2\n"
        "tandem serve --config tandem.yaml --address auto",
        _serve,
    )
    _add_config_options(command)
    command.add_argument(
        "--detach", action="store_true",
        help="go on without this terminal: return when the cluster is ready; `tandem stop` ends it",
    )
    command.add_argument(
        "--log", type=Path, metavar="FILE",
        help="where the output goes with --detach (default: ~/.local/state/tandem/serve-PORT.log)",
    )


def _add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="read this tandem.yaml; the options below override it"
    )
    _add_serving_options(command)
    command.add_argument(
        "--engine", choices=_ENGINES, help="`simulated`: steps only take time, as --time-model says (default: torch)"
    )
    command.add_argument(
        "--time-model", metavar="FILE", help="how long the steps of a simulated engine take: a scenario of `tandem sim`"
    )
    command.add_argument(
        "--api-keys-file", metavar="FILE", help="file with API keys, one a line (default: http.api_keys_file)"
    )
    command.add_argument(
        "--certificates", metavar="DIR", help="directory with the certificates (default: security.certificates)"
    )
    command.add_argument(
        "--address", metavar="RAY", help="join the Ray cluster at this address; `auto`: that of this host"
    )


def _add_serving_options(command: argparse.ArgumentParser) -> None:
    """Those that `tandem up` passes on."""
    command.add_argument(
        "--model", metavar="DIR_OR_HUB_ID", help="checkpoint directory or hub id (default: the embedded model)"
    )
    command.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests; `*` accepts any name"
    )
    command.add_argument("--dtype", choices=_DTYPES, help="type of weights and arithmetic (default: auto)")
    command.add_argument(
        "--quantize", choices=_QUANTIZE, help="round weights to so many bits when they are loaded (default: none)"
    )
    command.add_argument("--cache-dtype", choices=KV_DTYPES, help="type of KV in the pages (default: auto)")
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=port, metavar="N", help="HTTP port (default: 8000)")
    command.add_argument(
        "--prefill", type=_prefill_sizes, metavar="N|MIN:MAX",
        help="number of prefill workers, or the fewest and the most of a pool that follows its load (default: 1); with "
        "0 the decode workers compute prompts too",
    )
    command.add_argument(
        "--decode", type=_sizes, metavar="N|MIN:MAX", help="the same of decode workers (default: 1)"
    )
    command.add_argument("--routers", type=_workers, metavar="N", help="number of routers (default: 1)")


def _add_doctor(commands: Any) -> None:
    command = add_command(
        commands,
        "doctor",
        "check packages, ports, Ray, transport, memory and model; name a remedy for each finding",
        "tandem doctor --config tandem.yaml",
        _doctor,
    )
    _add_config_options(command)


def _add_certs(commands: Any) -> None:
    command = add_command(
        commands,
        "certs",
        "make the certificates that a cluster's processes use for mutual TLS",
        "tandem certs ~/tandem-certs\ntandem certs ~/tandem-certs --days 90 --force",
        _certs,
    )
    command.add_argument(
        "directory", type=Path, metavar="DIR", help="directory for the certificates; created if missing"
    )
    command.add_argument(
        "--days", type=int, default=365, metavar="N", help="days for which they are valid (default: 365)"
    )
    command.add_argument(
        "--ca-key", type=Path, metavar="FILE",
        help="file of the authority's key, which signs members and goes to no host (default: DIR-ca/ca.key)",
    )
    command.add_argument(
        "--force", action="store_true",
        help="replace existing ones; sign with the existing authority if its key is there",
    )


def _add_bench(commands: Any) -> None:
    from tandem.bench.arguments import add_subcommands

    # Its subcommands have the handlers, and `--debug`.
    command = commands.add_parser(
        "bench",
        help="measure any OpenAI-compatible server: latency, throughput, goodput",
        description="Measure any OpenAI-compatible server: latency, throughput, goodput.",
        epilog="example:\n  tandem bench run --concurrency 8 --input-len 128 --output-len 128",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_advise_to(add_subcommands(command, add_command), add_command)


# --- what they run ----------------------------------------------------------------------------------------------------
# Imports stand inside: `tandem version` and `--help` need neither gRPC nor Ray.


def _serve(options: argparse.Namespace) -> int:
    if options.log is not None and not options.detach:
        raise ConfigError("--log says where the output goes with --detach: give both, or redirect it", key="--log")
    config = _config(options)
    if not options.detach:
        from tandem.cluster.serve.serve import serve

        return serve(config, options.address)
    from tandem.cluster.serve.detach import default_log, serve_detached

    def run_there(on_ready: Callable[[], None]) -> int:
        from tandem.cluster.serve.serve import serve

        return serve(config, options.address, on_ready)

    return serve_detached(run_there, options.log or default_log(config.http.port))


def _doctor(options: argparse.Namespace) -> int:
    from tandem.cluster import commands

    return commands.doctor(_config(options), address=options.address)


def _certs(options: argparse.Namespace) -> int:
    from tandem.cluster import certs

    return certs.run(options.directory, days=options.days, force=options.force, authority_key=options.ca_key)


def _version(_options: argparse.Namespace) -> int:
    from tandem.core.version import version

    print(f"tandem {version()}")
    return 0


def _config(options: argparse.Namespace) -> Config:
    """The configuration file with the options laid over it. Raises `ConfigError`."""
    given = {
        "model.path": options.model,
        "model.served_names": options.served_model_name,
        "model.dtype": options.dtype,
        "model.quantize": options.quantize,
        "model.engine": options.engine,
        "model.time_model": options.time_model,
        "cache.dtype": options.cache_dtype,
        "http.host": options.host,
        "http.port": options.port,
        "http.api_keys_file": options.api_keys_file,
        "security.certificates": options.certificates,
        **_pool("prefill", options.prefill),
        **_pool("decode", options.decode),
        "pools.routers": options.routers,
    }
    return load(options.config, {key: value for key, value in given.items() if value is not None})


def _pool(role: str, sizes: PoolSizes | None) -> dict[str, int]:
    """Keys of a pool; all three, so that none of the file's is left beside them."""
    if sizes is None:
        return {}
    least, most = (0, 0) if sizes.least == sizes.most else sizes
    path = f"pools.{role}"
    return {f"{path}.workers": sizes.least, f"{path}.min": least, f"{path}.max": most}


if __name__ == "__main__":
    sys.exit(main())
