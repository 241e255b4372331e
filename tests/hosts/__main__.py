"""Test hosts on one Linux machine: what Ray's launcher and Tandem reach by the network as they would reach machines.

Each is a network, process, mount, UTS and IPC namespace of its own: own processes, addresses, host name, boot id,
/tmp, /dev/shm, /etc, /home, and an sshd. Shared are the kernel, its cores and its clock, and /usr to read. All hosts
lie in one namespace more, the rack, with the switch between them: whoever ends the rack ends all, and nothing is left.
Two racks know nothing of each other, so their names and addresses are the same: host 1 is node1, 10.77.0.11 and
fd77::11, host 2 is node2, 10.77.0.12, and so on.

As root, and with Debian's packages of `tests.hosts.needs` (it says which are missing). By hand, from the checkout:

    python -m tests.hosts up 3                        hosts 1 to 3, and the desk: where `tandem up` is called
    python -m tests.hosts exec desk 'make wheel'      as the user `tandem`; there the checkout is at its own path, with
                                                      its environment: what is written there stays in the rack
    python -m tests.hosts exec 1 --user root 'ip a'   on host 1: what `ray up` installs is in ~/tandem/venv, where all
                                                      packages of this environment lie already, but not Tandem
    python -m tests.hosts kill 2                      power loss: its processes end at once, without a FIN or RST
    python -m tests.hosts add 2                       on again: a new boot id, what its disk (~) held
    python -m tests.hosts cut 3                       nothing gets to host 3 or from it any more, silently ...
    python -m tests.hosts part 2 3                    ... or nothing between those two; `heal` undoes all of that
    python -m tests.hosts lose 2 1                    1 % of what host 2 sends is lost; `lose 2 0`
    python -m tests.hosts shape 2 100mbit             the rate of what host 2 sends; `shape 2 off`
    python -m tests.hosts delay 2 0.05                what goes to and from host 2 takes 0.05 s; `delay 2 0`
    python -m tests.hosts reset 2 3                   connections between those two end with RST, as by a firewall
    python -m tests.hosts fetch desk PATH TO          copy a file or directory of a host out here
    python -m tests.hosts list
    python -m tests.hosts down

`--name` before the command names a rack where you want several; `up --loopback-name` gives hosts their own name as
127.0.1.1, as Debian and Ubuntu do; `up --second` a second network (10.78.0.x, eth1). The desk is 10.77.0.10.

Processes of the hosts show in this machine's process list: a `ray stop` out here would end their Ray.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from tests.hosts.host import DESK, Host, HostsError
from tests.hosts.hosts import Hosts
from tests.hosts.needs import missing

_PLACE = Path("/tmp/tandem-hosts")


def _up(directory: Path, options: argparse.Namespace) -> None:
    if reason := missing():
        raise HostsError(reason)
    if (directory / "rack.json").exists():
        hosts = Hosts.find(directory)
    else:
        hosts = Hosts.start(directory, loopback_name=options.loopback_name, second=options.second, outlives_us=True)
    for number in range(options.number + 1):
        if not hosts.host(number).is_up():
            _show(hosts.add(number))


def _down(directory: Path, _: argparse.Namespace) -> None:
    Hosts.find(directory).stop()
    shutil.rmtree(directory)


def _exec(directory: Path, options: argparse.Namespace) -> None:
    line = _host(directory, options.host).line(" ".join(options.command), options.user)
    os.execvp(line[0], line)


def _fetch(directory: Path, options: argparse.Namespace) -> None:
    _host(directory, options.host).fetch(options.path, Path(options.target))


def _change(directory: Path, options: argparse.Namespace) -> None:
    """What is done to one host, or to two."""
    hosts = Hosts.find(directory)
    named = [_host(directory, name, hosts) for name in options.hosts]
    match options.what:
        case "add":
            _show(hosts.add(named[0].number))
        case "kill":
            named[0].kill()
        case "cut":
            hosts.cut(*named)
        case "part":
            hosts.part(named[:1], named[1:])
        case "reset":
            hosts.reset(named[0], named[1])
        case "heal":
            hosts.heal()


def _lose(directory: Path, options: argparse.Namespace) -> None:
    hosts = Hosts.find(directory)
    hosts.lose(_host(directory, options.host, hosts), options.percent)


def _delay(directory: Path, options: argparse.Namespace) -> None:
    hosts = Hosts.find(directory)
    hosts.delay(_host(directory, options.host, hosts), options.delay_s)


def _shape(directory: Path, options: argparse.Namespace) -> None:
    _host(directory, options.host).shape(options.rate)


def _list(directory: Path, _: argparse.Namespace) -> None:
    for host in Hosts.find(directory).running():
        _show(host)


def _show(host: Host) -> None:
    print(host.name, host.address, host.address6)


def _host(directory: Path, name: str, hosts: Hosts | None = None) -> Host:
    number = DESK if name == "desk" else int(name.removeprefix("node"))
    return (hosts or Hosts.find(directory)).host(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="by-hand", help="of the rack")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up")
    up.add_argument("number", type=int)
    up.add_argument("--loopback-name", action="store_true")
    up.add_argument("--second", action="store_true")
    up.set_defaults(call=_up)
    commands.add_parser("down").set_defaults(call=_down)
    commands.add_parser("list").set_defaults(call=_list)
    execute = commands.add_parser("exec")
    execute.add_argument("host")
    execute.add_argument("--user", default="tandem")
    execute.add_argument("command", nargs="+")
    execute.set_defaults(call=_exec)
    fetch = commands.add_parser("fetch")
    for name in ("host", "path", "target"):
        fetch.add_argument(name)
    fetch.set_defaults(call=_fetch)
    for name, count in {"add": 1, "kill": 1, "cut": "+", "part": 2, "reset": 2, "heal": 0}.items():
        change = commands.add_parser(name)
        change.add_argument("hosts", nargs=count) if count else change.set_defaults(hosts=[])
        change.set_defaults(call=_change, what=name)
    lose = commands.add_parser("lose")
    lose.add_argument("host")
    lose.add_argument("percent", type=float)
    lose.set_defaults(call=_lose)
    delay = commands.add_parser("delay")
    delay.add_argument("host")
    delay.add_argument("delay_s", type=float)
    delay.set_defaults(call=_delay)
    shape = commands.add_parser("shape")
    shape.add_argument("host")
    shape.add_argument("rate")
    shape.set_defaults(call=_shape)
    return parser


def main() -> int:
    options = _parser().parse_args()
    try:
        options.call(_PLACE / options.name, options)
    except HostsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
