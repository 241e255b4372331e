"""The file of API keys: tenants in YAML, keys one a line, and what is wrong with either."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from router.http.keys_file import read_keys
from router.request.tenant import ANYBODY, Tenant
from tandem.core.config import LimitsConfig
from tandem.core.errors import ConfigError

FILE = Path("/etc/keys")
KEYS = [f"sk-{name}-0123456789" for name in ("one", "two", "three", "four")]

TENANTS = f"""
# of the whole company
tenants:
  - name: search
    keys: [{KEYS[0]}, {KEYS[1]}]
    group: web
    most_urgent_priority: -2
    requests_per_minute: 600
    tokens_per_minute: 200000
  - name: ads
    keys: ['{KEYS[2]}']
    group: web
  - {{name: lab, keys: [{KEYS[3]}]}}
"""


def by_key(text: str) -> dict[str, Tenant]:
    keys = read_keys(text, FILE)
    return {key: keys[digest] for key in KEYS if (digest := hashlib.sha256(key.encode()).digest()) in keys}


def test_tenants_have_names_keys_and_limits() -> None:
    first, second, ads, lab = by_key(TENANTS).values()
    assert first is second
    assert (first.name, first.requests_per_minute, first.tokens_per_minute) == ("search", 600, 200000)
    assert first.limits(LimitsConfig()).most_urgent_priority == -2
    assert lab.limits(LimitsConfig(most_urgent_priority=-7)).most_urgent_priority == -7
    assert (ads.requests_per_minute, ads.tokens_per_minute) == (0, 0)
    assert len({first.owner, ads.owner, lab.owner}) == 3


def test_salts_are_apart_but_for_groups() -> None:
    search, _, ads, lab = by_key(TENANTS).values()
    one, two = by_key(f"{KEYS[0]}\n{KEYS[1]}").values()
    salts = [tenant.cache_salt(b"secret", "") for tenant in (search, ads, lab, one, two)]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all(len(salt) == 64 for salt in salts)
    assert search.cache_salt(b"secret", "mine") not in salts
    assert search.cache_salt(b"another", "") not in salts
    assert (ANYBODY.cache_salt(b"secret", ""), ANYBODY.cache_salt(b"secret", "mine")) == ("", "mine")


def test_no_salt_that_is_asked_for_makes_another_tenants() -> None:
    def tenant(circle: str) -> Tenant:
        return Tenant(circle, circle, circle)

    assert tenant("tenant a").cache_salt(b"s", "bc") != tenant("tenant ab").cache_salt(b"s", "c")
    assert tenant("tenant a").cache_salt(b"s", "b") != tenant("tenant ab").cache_salt(b"s", "")


def test_a_key_of_a_plain_file_is_a_tenant_of_its_own_whose_name_tells_nothing_of_it() -> None:
    one, two = by_key(f"# staff\n{KEYS[0]}\n{KEYS[1]}  # of a colleague").values()
    assert one.name != two.name
    digest = hashlib.sha256(KEYS[0].encode()).hexdigest()
    assert one.name.removeprefix("key-") not in digest
    assert not one.is_named
    again, _ = by_key(f"{KEYS[0]}\n{KEYS[2]}").values()
    assert again == one, "it stays the same whatever other keys there are"


def entry(**options: object) -> str:
    given = {"name": "lab", "keys": [KEYS[0]], **options}
    return "tenants:\n  - " + "\n    ".join(f"{name}: {value}" for name, value in given.items() if value is not None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tenants:", "names no tenant"),
        ("tenants: []", "names no tenant"),
        ("tenants: {a: b}", "names no tenant"),
        (f"tenants: [{KEYS[0]}]", "tenant number 1 must have `name` and `keys`"),
        (f"tenants:\n- {KEYS[0]}: [", "is not YAML: look at line"),
        (entry() + "\nothers: 1", "1 entries beside `tenants`"),
        (entry(name=None), "tenant number 1 needs a `name`"),
        (entry(name="a b"), "tenant number 1 needs a `name`"),
        (entry(name="key-1"), "choose another"),
        (entry(name="other"), "choose another"),
        (entry(keys=None), "tenant lab needs `keys`"),
        (entry(keys="[]"), "tenant lab needs `keys`"),
        (entry(keys=KEYS[0]), "tenant lab needs `keys`"),
        (entry(keys="[short]"), "key number 1 of tenant lab must have at least 16"),
        (entry(keys="[12345678901234567890]"), "in YAML quotes"),
        (entry(weigth=2), "tenant lab: unknown key weigth"),
        (entry(most_urgent_priority=1), "tenant lab: most_urgent_priority is 1, must be at most 0"),
        (entry(requests_per_minute=-1), "tenant lab: requests_per_minute is -1"),
        (entry(requests_per_minute=KEYS[1]), "the value of requests_per_minute must be a number"),
        (f"{entry()}\n    {KEYS[1]}: 1", "entry number 2"),
        (entry(group="a b"), "tenant lab: group"),
        (entry() + "\n" + entry().removeprefix("tenants:\n"), "names the tenant lab twice"),
        (entry() + "\n" + entry(name="ads").removeprefix("tenants:\n"), "key number 1 of tenant ads is a key of lab"),
    ],
)
def test_what_is_wrong_is_told_by_tenant_and_shows_no_key(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(text, FILE)
    assert why in caught.value.message
    assert str(FILE) in caught.value.message
    assert caught.value.key == "http.api_keys_file"
    assert not any(key in caught.value.message for key in [*KEYS, "short", "1234567890"])
