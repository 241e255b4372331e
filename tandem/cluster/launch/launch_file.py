"""A file for Ray's launcher, as far as `tandem up` and `tandem down` need to know it: any provider's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError
from tandem.core.identity import Role

_CASE = re.compile(r"""((?:\*"\s[^"]+\s"\*\|?)+)\)[^;]*?resources='(\{[^']*\})'""")
_ADDRESS = re.compile(r'\*"\s(\S+)\s"\*')
_HEAD = re.compile(r"""--resources='(\{[^']*\})'""")


@dataclass(frozen=True)
class Mount:
    """What the launcher copies to every host."""

    source: Path  # here
    target: str  # there; may begin with `~`

    @property
    def in_shell(self) -> str:
        """The target as a word of a command; a `~` at its beginning stays what it means there."""
        home, slash, rest = self.target.partition("/")
        return f"~/{shlex.quote(rest)}" if home == "~" and slash else shlex.quote(self.target)


@dataclass(frozen=True)
class LaunchFile:
    path: Path
    tree: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> LaunchFile:
        """Raises `ConfigError`: it cannot be read, or is no file for the launcher."""
        import yaml

        try:
            tree = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}; `tandem hosts` makes such a file", key="FILE"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}", key="FILE") from error
        if not isinstance(tree, dict) or not isinstance(tree.get("provider"), dict) or not tree.get("cluster_name"):
            raise ConfigError(
                f"{path} is no file for Ray's launcher (it lacks provider or cluster_name); `tandem hosts` makes one",
                key="FILE",
            )
        return cls(path, tree)

    @property
    def is_local(self) -> bool:
        """Whether the hosts are machines that stay: those of `provider: local`."""
        return bool(self.tree["provider"].get("type") == "local")

    @property
    def worker_addresses(self) -> list[str]:
        """Of machines that stay; none where a provider makes them."""
        return list(self.tree["provider"].get("worker_ips") or []) if self.is_local else []

    @property
    def head(self) -> str:
        """`user@address` of a head that stays."""
        provider = self.tree["provider"]
        return f"{self.user}@{provider.get('external_head_ip') or provider.get('head_ip')}"

    @property
    def user(self) -> str:
        return str(self._auth.get("ssh_user", ""))

    @property
    def has_key(self) -> bool:
        """Whether it names an SSH key, which the launcher then copies to the head."""
        return bool(self._auth.get("ssh_private_key"))

    @property
    def ssh_options(self) -> list[str]:
        """With which `ssh` reaches the head from here."""
        key, proxy = self._auth.get("ssh_private_key"), self._auth.get("ssh_proxy_command")
        of_key = ["-i", str(Path(key).expanduser())] if key else []
        return [*of_key, *(["-o", f"ProxyCommand={proxy}"] if proxy else [])]

    @property
    def _auth(self) -> dict[str, Any]:
        return self.tree.get("auth") or {}

    def mount(self, name: str) -> Mount | None:
        """The one whose target has this name; `None`: there is none."""
        for target, source in (self.tree.get("file_mounts") or {}).items():
            if target.rstrip("/").rpartition("/")[2] == name:
                return Mount(Path(source).expanduser(), target.rstrip("/"))
        return None

    def mounts(self) -> Iterator[Mount]:
        for target, source in (self.tree.get("file_mounts") or {}).items():
            yield Mount(Path(source).expanduser(), target)

    @property
    def places(self) -> dict[Role, int]:
        """How many workers of each role machines that stay have room for, as their start commands say."""
        if not self.is_local:
            return dict.fromkeys(Role, 0)
        heads = [json.loads(text) for text in _HEAD.findall(self._commands("head_start_ray_commands"))]
        places = [*heads, *self._worker_resources.values()]
        return {role: sum(int(each.get(role, 0)) for each in places) for role in Role}

    def workers_with(self, role: Role) -> list[str]:
        """Addresses of the machines beside the head that have places for `role`."""
        return [address for address, resources in self._worker_resources.items() if resources.get(role)]

    @property
    def _worker_resources(self) -> dict[str, dict[str, float]]:
        """Ray's, by address, of machines that stay."""
        cases = _CASE.findall(self._commands("worker_start_ray_commands")) if self.is_local else []
        return {address: json.loads(text) for hosts, text in cases for address in _ADDRESS.findall(hosts)}

    def _commands(self, key: str) -> str:
        return "\n".join(map(str, self.tree.get(key) or []))
