"""What one tenant has had computed is not found by another, with real processes: 1P1D of the embedded model."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.scenarios.processes import running

ONE, SAME, FRIEND, OTHER = (f"sk-{name}-0123456789" for name in ("one", "same", "friend", "other"))
STORY = 6 * "Once upon a time there was a little girl named Lily. She had a dog, and the dog had a red ball. "
FILE = f"""tenants:
  - {{name: one, keys: [{ONE}, {SAME}], group: friends}}
  - {{name: friend, keys: [{FRIEND}], group: friends}}
  - {{name: elsewhere, keys: [{OTHER}]}}
"""


def test_cached_prefixes_are_found_by_the_tenant_and_its_group_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(FILE)
    with running(tmp_path, config={"http": {"api_keys_file": str(keys)}}) as cluster:

        def cached(key: str) -> int:
            body = {"model": "tandem-tiny", "prompt": STORY, "max_tokens": 4, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
            return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(ONE) == 0
        assert cached(OTHER) == 0
        assert cached(SAME) > 64
        assert cached(FRIEND) > 64
        assert cached(OTHER) > 64
