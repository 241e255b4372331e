"""Who may use the HTTP face: API keys, as the clients of OpenAI and Anthropic send them.

Keys come from a file (`http.api_keys_file`: one a line, where a `#` at the beginning or after a space starts a comment,
or tenants in YAML: `router/http/keys_file.py`) and from `TANDEM_API_KEYS` (with commas between). Only their SHA-256
digests are kept, so a key stands in no log, no `/v1/cluster` and no traceback. A request's digest is looked up among
them by a hash that each process draws anew, so the time that this takes says nothing of a key, and does not grow with
their number.

The file's path travels to the router, never its content: the router's process reads the file. It reads a changed file
again within a second, so keys are exchanged without a restart. Where the file has become unusable, the keys that were
read before still hold, and the log says so. The variable is read by whoever starts the router, which gets the digests:
in a joined Ray the router's own environment is that of Ray, not of `tandem serve`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from router.http.keys_file import Keys, digests_of, nameless, read_keys, unusable
from router.request.tenant import ANYBODY, OTHER, Tenant
from tandem.core.clock import Clock
from tandem.core.config import HttpConfig
from tandem.core.errors import AuthenticationError, ConfigError
from tandem.rpc.security import is_loopback

_log = logging.getLogger(__name__)

KEYS_VARIABLE = "TANDEM_API_KEYS"
#: Reached without a key: load balancers and container runtimes ask it, and it tells nothing but up or not.
OPEN_PATHS = frozenset({"/health", "/ping"})

_LOOK_AGAIN_S = 1.0
_SCHEME = b"bearer "


def digests_of_variable(environment: Mapping[str, str]) -> frozenset[bytes]:
    """Of the keys in the variable; none where it is not set, or empty.

    Raises:
        ConfigError: it holds no key, or a malformed one.
    """
    text = environment.get(KEYS_VARIABLE, "")
    digests = digests_of((key.strip() for key in text.split(",") if key.strip()), KEYS_VARIABLE)
    if text and not digests:
        raise ConfigError(
            f"{KEYS_VARIABLE} is set but holds no key; name some, with commas between, or unset it",
            key="http.api_keys_file",
        )
    return digests


def check_exposure(http: HttpConfig, host: str, digests: Set[bytes]) -> None:
    """Beyond loopback a router listens only with keys (`digests`, or a file), or where `http.allow_anonymous` is set.

    Raises:
        ConfigError: it would serve anybody; names the remedies.
    """
    if http.allow_anonymous or http.api_keys_file or digests or is_loopback(host):
        return
    raise ConfigError(
        f"http.host is {host}, beyond loopback, and there are no API keys: whoever reaches the port could use the "
        f"cluster; name a file with keys in http.api_keys_file, set {KEYS_VARIABLE}, or allow it with "
        "http.allow_anonymous: true",
        key="http.api_keys_file",
    )


def check_not_lost(http: HttpConfig, digests: Set[bytes], environment: Mapping[str, str]) -> None:
    """Whoever set the variable, if only for Ray, wants keys: a router that was given none must not serve.

    Args:
        environment: the router's own, which is Ray's.

    Raises:
        ConfigError: the variable is set for Ray alone.
    """
    if not digests and not http.api_keys_file and digests_of_variable(environment):
        raise ConfigError(
            f"{KEYS_VARIABLE} is set where Ray was started, but not for `tandem serve`, whose keys count; set it for "
            "`tandem serve`, name a file in http.api_keys_file, or start Ray without it",
            key="http.api_keys_file",
        )


class ApiKeys:
    """The keys that hold now. Not thread-safe."""

    def __init__(self, http: HttpConfig, digests: frozenset[bytes], clock: Clock) -> None:
        """Read the file, whose keys hold beside those of `digests`. Where it has one of those too, its word counts.

        Raises:
            ConfigError: the file cannot be read, everybody may read it, it holds no key, or a key is malformed.
        """
        self._file = Path(http.api_keys_file).expanduser() if http.api_keys_file else None
        self._clock = clock
        self._given: Keys = {digest: nameless(digest) for digest in digests}
        self._from_file: Keys = {}
        self._owners: dict[str, Tenant] = {}  # of all keys
        # What the file looked like when it was last read: its times and identity.
        self._seen: tuple[int, ...] | None = None
        self._looked_s = clock.now()
        if self._file is not None:
            self._seen, self._from_file = _look(self._file), _read(self._file)
        self._note_owners()

    @property
    def are_required(self) -> bool:
        """Whether there are keys; if so, every request needs one."""
        return bool(self._given or self._file is not None)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Whose key the headers carry. Raises `AuthenticationError` unless it holds, or none is needed."""
        if not self.are_required:
            return ANYBODY
        self._look_again()
        digest = hashlib.sha256(_given_key(headers)).digest()
        tenant = self._from_file.get(digest) or self._given.get(digest)
        if tenant is None:
            raise AuthenticationError("this API key is not valid here")
        return tenant

    def tenant_of(self, owner: str) -> Tenant:
        """The tenant by its `owner`, for work that goes on without its requests; without rights where it is gone."""
        if not self.are_required:
            return ANYBODY
        gone = Tenant(name=OTHER, owner=owner, circle=f"owner {owner}")
        return self._owners.get(owner, gone)

    def _note_owners(self) -> None:
        self._owners = {tenant.owner: tenant for tenant in (*self._given.values(), *self._from_file.values())}

    def _look_again(self) -> None:
        """Read the file anew where it has changed, once a second at most."""
        now_s = self._clock.now()
        if self._file is None or now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        try:
            seen = _look(self._file)
            if seen == self._seen:
                return
            self._from_file = _read(self._file)
        except ConfigError as error:
            _log.error("the API keys read before still hold: %s", error.message)
            return
        self._seen = seen
        self._note_owners()
        _log.info("%d API keys read anew from %s", len(self._from_file), self._file)


def _given_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The one key that a request carries: as OpenAI's clients send it, or as Anthropic's do."""
    given = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    bearers = [value for name, value in given if name == b"authorization"]
    if all(value[: len(_SCHEME)].lower() == _SCHEME for value in bearers):
        keys = {value[len(_SCHEME) :].strip() for value in bearers}
        keys |= {value.strip() for name, value in given if name == b"x-api-key"}
        if len(keys) == 1 and len(given) == len({name for name, _ in given}):
            return keys.pop()
    raise AuthenticationError("an API key is needed: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`")


def _look(file: Path) -> tuple[int, ...]:
    try:
        facts = file.stat()
    except OSError as error:
        raise unusable(file, f"cannot be read: {error.strerror}; make it readable for the router") from error
    return facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_size, facts.st_mode


def _read(file: Path) -> Keys:
    """The keys of a file."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(file, f"cannot be read: {error}; make it a text file, readable for the router") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise unusable(file, f"is open to everybody on its host (mode {stat.S_IMODE(mode):o}); chmod 600 {file}")
    if mode & (stat.S_IRGRP | stat.S_IWGRP):
        _log.warning("the file of API keys %s is open to its group (mode %o)", file, stat.S_IMODE(mode))
    return read_keys(text, file)
