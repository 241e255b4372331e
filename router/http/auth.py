"""Who may use the HTTP face: API keys, as the clients of OpenAI and Anthropic send them.

Keys come from a file (`http.api_keys_file`: one a line; a `#` at the beginning or after a space starts a comment) and
from `TANDEM_API_KEYS` (with commas between). Only their SHA-256 digests are kept, so a key stands in no log, no
`/v1/cluster` and no traceback. Digests have one length; each request is compared with all of them in constant time.

The file's path travels to the router, never its content: the router's process reads the file. It reads a changed file
again within a second, so keys are exchanged without a restart. Where the file has become unusable, the keys that were
read before still hold, and the log says so. The variable is read by whoever starts the router, which gets the digests:
in a joined Ray the router's own environment is that of Ray, not of `tandem serve`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from tandem.core.clock import Clock
from tandem.core.config import HttpConfig
from tandem.core.errors import AuthenticationError, ConfigError
from tandem.rpc.security import is_loopback

_log = logging.getLogger(__name__)

KEYS_VARIABLE = "TANDEM_API_KEYS"
#: Reached without a key: load balancers and container runtimes ask it, and it tells nothing but up or not.
OPEN_PATHS = frozenset({"/health", "/ping"})

_MIN_KEY_CHARS = 16
_LOOK_AGAIN_S = 1.0
_SCHEME = b"bearer "
#: So that what stands on disk is no digest by which a key could be looked up here.
_OWNER_SALT, _OWNER_CHARS = b"tandem owner of files\0", 32
_COMMENT = re.compile(r"(^|\s)#.*")


def digests_of_variable(environment: Mapping[str, str]) -> frozenset[bytes]:
    """Of the keys in the variable; none where it is not set, or empty.

    Raises:
        ConfigError: it holds no key, or a malformed one.
    """
    text = environment.get(KEYS_VARIABLE, "")
    digests = _digests((key.strip() for key in text.split(",") if key.strip()), KEYS_VARIABLE)
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
        """Read the file, whose keys hold beside those of `digests`.

        Raises:
            ConfigError: the file cannot be read, everybody may read it, it holds no key, or a key is malformed.
        """
        self._file = Path(http.api_keys_file).expanduser() if http.api_keys_file else None
        self._clock = clock
        self._given = digests
        self._from_file: frozenset[bytes] = frozenset()
        # What the file looked like when it was last read: its times and identity.
        self._seen: tuple[int, ...] | None = None
        self._looked_s = clock.now()
        if self._file is not None:
            self._seen, self._from_file = _look(self._file), _read(self._file)

    @property
    def are_required(self) -> bool:
        """Whether there are keys; if so, every request needs one."""
        return bool(self._given or self._file is not None)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises `AuthenticationError` unless the headers carry a key that holds, or none is needed."""
        if not self.are_required:
            return
        self._look_again()
        digest = hashlib.sha256(_given_key(headers)).digest()
        is_known = False
        for known in (*self._given, *self._from_file):
            is_known |= hmac.compare_digest(known, digest)
        if not is_known:
            raise AuthenticationError("this API key is not valid here")

    def owner(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """A name for who sent a request that passed `check`, without its key; one for all where none is needed."""
        if not self.are_required:
            return "anybody"
        digest = hashlib.sha256(_given_key(headers)).digest()
        return hashlib.sha256(_OWNER_SALT + digest).hexdigest()[:_OWNER_CHARS]

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
        raise _unusable(file, f"cannot be read: {error.strerror}; make it readable for the router") from error
    return facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_size, facts.st_mode


def _read(file: Path) -> frozenset[bytes]:
    """The digests of the keys of a file."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(file, f"cannot be read: {error}; make it a text file, readable for the router") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise _unusable(file, f"is open to everybody on its host (mode {stat.S_IMODE(mode):o}); chmod 600 {file}")
    if mode & (stat.S_IRGRP | stat.S_IWGRP):
        _log.warning("the file of API keys %s is open to its group (mode %o)", file, stat.S_IMODE(mode))
    lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
    digests = _digests((line for line in lines if line), str(file))
    if not digests:
        raise _unusable(file, "holds no key; write one a line, as `openssl rand -hex 32` makes them")
    return digests


def _digests(keys: Iterable[str], source: str) -> frozenset[bytes]:
    digests = set()
    for number, key in enumerate(keys, start=1):
        if len(key) < _MIN_KEY_CHARS or not all("!" <= char <= "~" for char in key):
            raise ConfigError(
                f"{source}: key number {number} must have at least {_MIN_KEY_CHARS} characters of printable ASCII "
                "without spaces; make one with `openssl rand -hex 32`",
                key="http.api_keys_file",
            )
        digests.add(hashlib.sha256(key.encode()).digest())
    return frozenset(digests)


def _unusable(file: Path, why: str) -> ConfigError:
    return ConfigError(f"http.api_keys_file: {file} {why}", key="http.api_keys_file")
