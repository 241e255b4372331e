"""What a file of API keys says: one key a line, or tenants in YAML.

    tenants:
      - name: search            # in metrics and logs
        keys: [sk-…, sk-…]      # any number; all are this tenant's
        group: web              # tenants of one group share cached prefixes (default: nobody)
        most_urgent_priority: -2
        weight: 2               # gets twice as many tokens as one of weight 1 where both wait (default: 1)
        ttft_ms: 500            # as in `slo`
        requests_per_minute: 600
        tokens_per_minute: 200000

A file is YAML where its first line, comments left out, is `tenants:`; that is too short for a key. Errors name the
tenant or the number of the key, and never show what may be one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.request.tenant import ANYBODY, OTHER, Tenant
from tandem.core.config_tree import build
from tandem.core.errors import ConfigError

#: Keys by their SHA-256 digests.
Keys = dict[bytes, Tenant]

KEY = "http.api_keys_file"
_MIN_KEY_CHARS = 16
_COMMENT = re.compile(r"(^|\s)#.*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OPTION = re.compile(r"[a-z_]{1,40}")
#: So that what stands on disk, in metrics and in logs is no digest by which a key could be looked up here.
_OWNER_SALT, _OWNER_CHARS = b"tandem owner of files\0", 32
#: Names that tenants without one get in metrics begin so, or are these.
_RESERVED_START, _RESERVED = "key-", (ANYBODY.name, OTHER)


def _option(default: Any, help: str, minimum: float | None = None, maximum: float | None = None) -> Any:
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": ()}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class _Options:
    """What a tenant may say beside its keys."""

    name: str = _option("", "Told in metrics and logs.")
    group: str = _option("", "Tenants of a group share cached prefixes.")
    most_urgent_priority: int = _option(0, "Lower is more urgent.", -(1 << 31) + 1, 0)
    weight: float = _option(1.0, "Tokens beside other tenants.", 0.01, 1000)
    ttft_ms: float = _option(0.0, "As in `slo`.", 0)
    tpot_ms: float = _option(0.0, "As in `slo`.", 0)
    requests_per_minute: int = _option(0, "0: any number.", 0)
    tokens_per_minute: int = _option(0, "Of prompts and of answers; 0: any number.", 0)


def read_keys(text: str, file: Path) -> Keys:
    """The keys of a file with their tenants.

    Raises:
        ConfigError: it holds no key, or something in it is wrong.
    """
    lines = [line for line in (_COMMENT.sub("", line).strip() for line in text.splitlines()) if line]
    if lines and lines[0].startswith("tenants:"):
        return _of_tenants(text, file)
    digests = digests_of(lines, str(file))
    if not digests:
        raise unusable(file, "holds no key; write one a line, as `openssl rand -hex 32` makes them")
    return {digest: nameless(digest) for digest in digests}


def nameless(digest: bytes) -> Tenant:
    """The tenant that a key without a name is, by the key's digest."""
    owner = _owner(digest)
    return Tenant(name=f"{_RESERVED_START}{owner[:8]}", owner=owner, circle=f"key {owner}")


def digests_of(keys: Iterable[str], source: str) -> frozenset[bytes]:
    """Raises `ConfigError` for a malformed key."""
    return frozenset(_digest(key, f"{source}: key number {number}") for number, key in enumerate(keys, start=1))


def unusable(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{KEY}: {file} {why}", key=KEY)


def _owner(what: bytes) -> str:
    return hashlib.sha256(_OWNER_SALT + what).hexdigest()[:_OWNER_CHARS]


def _digest(key: object, where: str) -> bytes:
    if not isinstance(key, str) or len(key) < _MIN_KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise ConfigError(
            f"{where} must have at least {_MIN_KEY_CHARS} characters of printable ASCII without spaces, and in YAML "
            "quotes where it looks like a number; make one with `openssl rand -hex 32`",
            key=KEY,
        )
    return hashlib.sha256(key.encode()).digest()


# -- tenants


def _of_tenants(text: str, file: Path) -> Keys:
    tree = _tree(text, file)
    if others := [name for name in tree if name != "tenants"]:
        raise unusable(file, f"has {len(others)} entries beside `tenants` at its top; only `tenants` is known there")
    entries = tree["tenants"]
    if not isinstance(entries, list) or not entries:
        raise unusable(file, "names no tenant; write a list under `tenants`, each with `name` and `keys`")
    keys: Keys = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, start=1):
        tenant, digests = _tenant(entry, f"tenant number {number}", file)
        if tenant.name in names:
            raise unusable(file, f"names the tenant {tenant.name} twice; give one of them another name")
        names.add(tenant.name)
        for place, digest in enumerate(digests, start=1):
            if digest in keys:
                also = keys[digest].name
                raise unusable(file, f": key number {place} of tenant {tenant.name} is a key of {also} already")
            keys[digest] = tenant
    return keys


def _tree(text: str, file: Path) -> dict[Any, Any]:
    """YAML's own words are not shown: they may repeat a key."""
    import yaml  # a plain file needs none

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "a character that YAML does not allow"
        raise unusable(file, f"is not YAML: look at {place}; put keys in quotes") from None
    if not isinstance(tree, dict):
        raise unusable(file, "is not YAML with `tenants:` at its top")
    return tree


def _tenant(entry: Any, where: str, file: Path) -> tuple[Tenant, list[bytes]]:
    if not isinstance(entry, dict):
        raise unusable(file, f": {where} must have `name` and `keys`, with its options one a line")
    given = dict(entry)
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise unusable(file, f": {where} needs a `name` of at most 64 letters, digits and any of . _ -")
    where = f"tenant {name}"
    if name.startswith(_RESERVED_START) or name in _RESERVED:
        raise unusable(file, f": {where} has a name that tenants without one get; choose another")
    listed = given.pop("keys", None)
    if not isinstance(listed, list) or not listed:
        raise unusable(file, f": {where} needs `keys`, a list of at least one")
    digests = [
        _digest(key, f"{KEY}: {file}: key number {place} of {where}") for place, key in enumerate(listed, start=1)
    ]
    if hidden := next(_not_shown(given), None):
        raise unusable(file, f": {where} has an option that is none ({hidden}); its keys belong under `keys`")
    try:
        options = build(_Options, given)
    except ConfigError as error:
        raise unusable(file, f": {where}: {error.message}") from error
    if options.group and not _NAME.fullmatch(options.group):
        raise unusable(file, f": {where}: group must have at most 64 letters, digits and any of . _ -")
    tenant = Tenant(
        name=name,
        owner=_owner(f"tenant {name}".encode()),
        circle=f"group {options.group}" if options.group else f"tenant {name}",
        is_named=True,
        most_urgent_priority=options.most_urgent_priority if "most_urgent_priority" in given else None,
        weight=options.weight,
        ttft_ms=options.ttft_ms,
        tpot_ms=options.tpot_ms,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
    )
    return tenant, digests


def _not_shown(given: dict[Any, Any]) -> Iterator[str]:
    """Of names and values that an error would repeat, what could be a key, without showing it."""
    for number, (name, value) in enumerate(given.items(), start=1):
        if not isinstance(name, str) or not _OPTION.fullmatch(name):
            yield f"entry number {number}"
        elif isinstance(value, str | list | dict) and name not in ("name", "group"):
            yield f"the value of {name} must be a number"
