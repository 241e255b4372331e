"""What the test hosts ask of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "pgrep": "procps",
    "tmux": "tmux",
}
"""Programs, and Debian's package of each."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--pid", "--fork", "--mount", "--net", "--uts", "--ipc")


def missing() -> str:
    """Why no test hosts can be had here, in words; empty where they can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    lacking = sorted({package for name, package in PACKAGES.items() if not shutil.which(name, path=SYSTEM_PATH)})
    if lacking:
        return f"test hosts need programs that are not here: apt-get install {' '.join(lacking)}"
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"test hosts need namespaces, which this machine does not give: {tried.stderr.strip()}"
    with open("/proc/filesystems") as file:
        if "overlay" not in file.read().split():
            return "test hosts need the kernel's overlay file system"
    return ""
