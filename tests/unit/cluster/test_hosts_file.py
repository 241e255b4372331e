"""`tandem hosts`: which machine is for what, and the file for Ray's launcher that says so."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from ray.autoscaler._private import util

from tandem import cli
from tandem.cluster.launch.hosts import Hosts, plan_hosts
from tandem.cluster.launch.hosts_file import hosts_file
from tandem.cluster.launch.launch_file import LaunchFile
from tandem.core.errors import ConfigError
from tandem.core.identity import Role

NAMES = {
    "node1": ["10.0.0.1"],
    "node2": ["fd00::2", "10.0.0.2"],
    "debian": ["127.0.1.1"],
    "six": ["fd00::6"],
}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine knows no other hosts; whoever runs the command does."""

    def look_up(name: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if name not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in NAMES[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def plan(head: str, prefill: Sequence[str] = (), decode: Sequence[str] = (), routers: Sequence[str] = ()) -> Hosts:
    lists = {Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: routers}
    return plan_hosts(head, lists, user="me", key="~/.ssh/key", cluster_name="ours")


def places(hosts: Hosts) -> dict[str, dict[str, int]]:
    everyone = (hosts.head, *hosts.workers)
    return {host.address: {str(role): num for role, num in host.places.items()} for host in everyone}


def test_hosts_are_names_or_addresses_with_room_for_one_worker_or_more() -> None:
    assert places(plan("node1", ["node2", "10.0.0.3=8"], ["10.0.0.4"])) == {
        "10.0.0.1": {"router": 1},
        "10.0.0.2": {"prefill": 1},
        "10.0.0.3": {"prefill": 8},
        "10.0.0.4": {"decode": 1},
    }


def test_a_host_may_have_several_roles_by_whatever_name_and_the_head_too() -> None:
    hosts = plan("node1", ["10.0.0.1=2", "node2"], ["10.0.0.2"], ["10.0.0.5", "node2"])
    assert places(hosts) == {
        "10.0.0.1": {"prefill": 2},
        "10.0.0.2": {"router": 1, "prefill": 1, "decode": 1},
        "10.0.0.5": {"router": 1},
    }


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("nowhere", "the host nowhere has no address here"),
        ("debian", "the host debian has the address 127.0.1.1 here, which leads nowhere from other hosts"),
        ("fd00::7", "fd00::7: Ray's launcher knows hosts by IPv4 addresses only; start Ray on such hosts by hand"),
        ("[fd00::7]=2", "fd00::7: Ray's launcher knows hosts by IPv4"),
        ("six", "the host six has IPv6 addresses only"),
        ("node2=many", "'node2=many' is no HOST=NUMBER"),
        ("node2=0", "'node2=0' is no HOST=NUMBER"),
    ],
)
def test_a_host_that_the_launcher_cannot_reach_is_refused(host: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("node1", [host])
    assert why in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "0.0.0.0"])
def test_an_address_that_means_each_host_itself_is_for_one_host_alone(address: str) -> None:
    for hosts in ((address, ["10.0.0.2"]), ("node1", [f"{address}=2"])):
        with pytest.raises(ConfigError, match=f"the address {address} leads nowhere from other hosts; give that"):
            plan(*hosts)
    assert places(plan(address, [address], [address])) == {address: {"router": 1, "prefill": 1, "decode": 1}}


def test_a_host_that_stands_twice_in_a_list_is_asked_about() -> None:
    with pytest.raises(ConfigError, match="say node2=2 for two workers there"):
        plan("node1", ["10.0.0.2", "node2"])


def written(hosts: Hosts) -> dict[str, Any]:
    tree = yaml.safe_load(hosts_file(hosts))
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize(
    "hosts",
    [
        ("node1", ["node2"], ["10.0.0.3=2"]),
        ("node1", ["node1"], ["node1=2"]),
        ("node1", ["node2"], ["node2"], ["node2"]),
    ],
    ids=["apart", "one machine", "all on one, routers too"],
)
def test_ray_accepts_what_is_written_and_its_places_are_read_again(hosts: Any) -> None:
    planned = plan(*hosts)
    tree = written(planned)
    util.validate_config(util.prepare_config(tree))
    file = LaunchFile(None, tree)  # type: ignore[arg-type]  # it is not on a disk
    assert file.places == planned.places
    assert file.worker_addresses == [host.address for host in planned.workers]


def test_what_is_typed_is_text_in_the_file_whatever_it_looks_like() -> None:
    hosts = plan_hosts("node1", {}, user="1000", key="~/my key: old", cluster_name="yes no")
    tree = written(hosts)
    assert (tree["auth"]["ssh_user"], tree["auth"]["ssh_private_key"]) == ("1000", "~/my key: old")
    assert tree["cluster_name"] == "yes no"


WORDS = ["no", "null", "Yes", "on", "OFF", "1e3", "0x10", "1_000", "12:30", "~", ".inf", "-", "=", "a #b", "é", "😀"]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_yaml_would_take_for_something_else_is_text(word: str) -> None:
    tree = written(plan_hosts("node1", {}, user=word, key=word, cluster_name=word))
    assert (tree["auth"]["ssh_user"], tree["auth"]["ssh_private_key"], tree["cluster_name"]) == (word, word, word)


@pytest.mark.parametrize("word", ["y", "N"])
def test_a_word_that_only_other_readers_take_for_a_boolean_is_in_quotes(word: str) -> None:
    assert f'ssh_user: "{word}"' in hosts_file(plan_hosts("node1", {}, user=word, key="k", cluster_name="c"))


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["hosts", "--head", "node1", "--prefill", "node2, 10.0.0.3=2", "--decode", "10.0.0.4", "--user", "me"]
    assert cli.main(line) == 0
    said = capsys.readouterr().out
    made_by = "tandem hosts --head node1 --prefill node2,10.0.0.3=2 --decode 10.0.0.4 --user me --key ~/.ssh/id_ed25519"
    assert f"#   {made_by}\n" in said
    assert "    - 10.0.0.2  # node2\n" in said
    assert yaml.safe_load(said)["provider"]["head_ip"] == "10.0.0.1"
