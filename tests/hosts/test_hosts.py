"""Test hosts are what they are taken for: machines of their own, and nothing of them stays.

`make test` has what its cluster of hosts needs; other faults of networks, and other ends, are for `make test-hosts`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.environment import ROOT
from tests.hosts.host import Host
from tests.hosts.hosts import Hosts
from tests.hosts.leftovers import left_of
from tests.hosts.needs import missing
from tests.support.waiting import nothing, wait_until


@pytest.fixture(scope="module")
def hosts(start_hosts: Callable[..., Hosts]) -> Hosts:
    """Two hosts with two networks."""
    hosts = start_hosts(second=True)
    hosts.add(1)
    hosts.add(2)
    return hosts


def hears(host: Host, address: str) -> bool:
    """Whether a connection from the host to the address comes about."""
    return host.run(f"timeout 2 bash -c 'exec 3<>/dev/tcp/{address}/22'", check=False).returncode == 0


def test_a_host_has_its_own_name_boot_id_processes_and_files(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    seen = "hostname; cat /proc/sys/kernel/random/boot_id; ls /home"
    assert one.run(seen).stdout.split()[::2] == ["node1", "tandem"]
    assert one.run(seen).stdout != two.run(seen).stdout
    assert str(os.getpid()) not in one.run("ls /proc").stdout.split()
    one.write("note", "of one")
    assert not two.run("ls ~").stdout.strip().startswith("note")


def test_hosts_reach_each_other_by_name_both_families_and_ssh(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    for address in (two.name, two.address, two.address6, two.address_two):
        assert hears(one, address), address


def test_the_environment_has_all_packages_but_tandem_and_can_be_written(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    code = "import importlib.util as u; print(u.find_spec('yaml').origin, u.find_spec('tandem'))"
    assert one.run(f'python -I -c "{code}"').stdout.split() == [
        f"/home/tandem/tandem/venv/lib/python3.{sys.version_info.minor}/site-packages/yaml/__init__.py",
        "None",
    ]
    site = "$(python -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])')"
    one.run(f"touch {site}/mine")
    assert one.run(f"ls {site}/mine").returncode == 0
    assert two.run(f"ls {site}/mine", check=False).returncode != 0


def test_a_killed_host_is_gone_and_comes_back_with_another_boot_id_and_its_files(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = two.run(f"echo kept > note; {boot}").stdout
    two.kill()
    assert not two.is_up()
    assert not hears(one, two.address)
    hosts.add(2)
    assert hears(one, two.address)
    assert two.run("cat note").stdout == "kept\n"
    assert two.run(boot).stdout != before


def test_who_is_cut_off_hears_nobody_until_it_is_healed(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    hosts.cut(two)
    assert not hears(one, two.address)
    assert not hears(two, one.address_two)
    hosts.heal()
    assert hears(one, two.address)


@pytest.mark.hosts
def test_a_partition_stands_between_two_and_no_others(hosts: Hosts) -> None:
    one, two, three = hosts.host(1), hosts.host(2), hosts.add(3)
    hosts.part([one], [two])
    assert [hears(one, two.address), hears(two, one.address)] == [False, False]
    assert [hears(one, three.address), hears(three, two.address)] == [True, True]
    hosts.heal()
    assert hears(one, two.address)


COUNT = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 7000)); s.settimeout({patience_s})
print("listens", flush=True)
num = 0
try:
    while s.recv(2000): num += 1
except TimeoutError:
    print(num, flush=True)
"""
SEND = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range({num}):
    s.sendto(b"x" * 100, ("{address}", 7000)); time.sleep(0.0002)
"""


@pytest.mark.hosts
def test_so_much_as_was_asked_for_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    one, two = hosts.host(1), hosts.host(2)
    hosts.lose(one, 30)
    two.write("count.py", COUNT.format(patience_s=3))
    log = tmp_path / "log"
    counting = two.start("python -u count.py", log)
    wait_until(log.read_text, "a listener", 30)
    one.write("send.py", SEND.format(num=3000, address=two.address))
    one.run("python send.py")
    counting.wait(60)
    hosts.lose(one, 0)
    assert 1800 < int(log.read_text().split()[1]) < 2400


@pytest.mark.hosts
def test_a_shaped_host_sends_no_faster_than_that(hosts: Hosts) -> None:
    one, two = hosts.host(1), hosts.host(2)
    two.write("take.py", "import socket, time\n"
              "l = socket.create_server(('', 7001)); print('listens', flush=True); c, _ = l.accept()\n"
              "start = time.monotonic(); num = 0\n"
              "while piece := c.recv(1 << 16): num += len(piece)\n"
              "print(num / (time.monotonic() - start), flush=True)\n")  # fmt: skip
    log = hosts.directory / "take.log"
    taking = two.start("python -u take.py", log)
    wait_until(log.read_text, "a listener", 30)
    one.shape("80mbit")
    one.run(f"head -c 20000000 /dev/zero > /dev/tcp/{two.address}/7001")
    taking.wait(60)
    one.shape("off")
    assert float(log.read_text().split()[1]) < 12e6  # bytes a second; 10 MB/s, and what the bucket holds at first


@pytest.mark.hosts
def test_a_reset_ends_connections_between_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    one, two = hosts.host(1), hosts.host(2)
    log = tmp_path / "log"
    holding = one.start(f"exec 3<>/dev/tcp/{two.address}/22; cat <&3; echo ended", log)
    wait_until(log.read_text, "sshd's greeting", 30)
    hosts.reset(one, two)
    holding.wait(30)
    assert "ended" in log.read_text()


CONNECT = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 9000), 20) as sink:
    print(time.monotonic() - began)
    sink.sendall(bytes(range(256)) * 20_000)
"""

LISTEN = """
import socket
listening = socket.create_server(("", 9000))
print("listens", flush=True)
while True:
    source, _ = listening.accept()
    got = b"".join(iter(lambda: source.recv(1 << 16), b""))
    print("whole" if got == bytes(range(256)) * 20_000 else f"{len(got)} bytes", flush=True)
"""


@pytest.mark.hosts
def test_what_goes_to_and_from_a_host_can_be_delayed(hosts: Hosts, tmp_path: Path) -> None:
    """Segments that the kernel leaves whole for a network card arrive as well."""
    one, two, log = hosts.host(1), hosts.host(2), tmp_path / "log"
    one.write("connect.py", CONNECT)
    two.write("listen.py", LISTEN)
    listening = two.start("python listen.py", log)
    try:
        wait_until(lambda: "listens" in log.read_text(), "host 2 listening", 20)
        took_s = []
        for number, delay_s in enumerate((0, 0.2, 0), start=1):
            hosts.delay(two, delay_s)
            took_s.append(float(one.run(f"python connect.py {two.address}").stdout))
            wait_until(lambda wanted=number: log.read_text().count("whole") == wanted, "all bytes", 30)
        assert took_s[1] >= 0.4
        assert max(took_s[0], took_s[2]) < 0.4
    finally:
        listening.terminate()


@pytest.mark.hosts
def test_debians_habit_gives_a_host_its_own_name_as_a_loopback_address(start_hosts: Callable[..., Hosts]) -> None:
    hosts = start_hosts(loopback_name=True)
    one = hosts.add(1)
    assert one.run("getent hosts node1").stdout.split()[0] == "127.0.1.1"
    assert one.run("getent hosts node2").stdout.split()[0] == hosts.host(2).address


OWNER = """
import signal, sys, time
from pathlib import Path
from tests.hosts.hosts import Hosts
from tests.hosts.leftovers import left_of
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
hosts = Hosts.start(Path(sys.argv[1]))
hosts.add(1).start("sleep 1000", Path(sys.argv[1]) / "log")
print("up", flush=True)
while True:
    time.sleep(0.1)  # `signal.pause` would miss a signal that comes right before it
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.hosts), signal.SIGKILL], ids=lambda number: number.name
)
def test_hosts_end_with_whoever_started_them(number: signal.Signals, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    directory = tmp_path / "rack"
    line = [sys.executable, "-c", OWNER, str(directory)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "up\n"
        owner.send_signal(number)
    wait_until(lambda: left_of(directory), "the end of all hosts", 20, wanted=nothing)
