"""Files and batches, as OpenAI's own client uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from tests.support.router_site import EOS, Site
from tests.support.scripted_worker import WAIT_S
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
FINAL = ("completed", "failed", "expired", "cancelled")


def lines(*bodies: dict[str, Any]) -> bytes:
    """One request a line, with the ids r0, r1, …"""
    made = (
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"model": "toy", **body}}
        for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def begun(client: openai.OpenAI, content: bytes) -> str:
    """The id of a new batch of this input."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )
    return made.id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    return wait_until(
        lambda: client.batches.retrieve(batch_id), "the end of the batch", WAIT_S, wanted=lambda b: b.status in FINAL
    )


def read(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered_in_the_order_of_its_input(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site({"batches.directory": str(tmp_path)})
    site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, 98, 99, EOS][min(index, 3)]
    client = site.openai()
    batch = ended(client, begun(client, lines(*({"prompt": "ab"} for _ in range(20)), {"prompt": "ab", "n": 0})))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (21, 20, 1)
    assert batch.metadata == {"who": "me"}
    good = read(client, batch.output_file_id)
    assert [line["custom_id"] for line in good] == [f"r{number}" for number in range(20)]
    assert all(line["response"]["body"]["choices"][0]["text"] == "abc" for line in good)
    (bad,) = read(client, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r20", 400)


def test_an_input_that_is_wrong_names_its_lines(make_site: MakeSite, tmp_path: Path) -> None:
    client = make_site({"batches.directory": str(tmp_path)}).openai()
    twice = lines({"prompt": "a"}) * 2
    other = twice.splitlines()[0].replace(b"r0", b"r9").replace(b"/v1/completions", b"/v1/embeddings")
    unknown = twice.splitlines()[0].replace(b"r0", b"r8").replace(b'"toy"', b'"nobody"')
    batch = ended(client, begun(client, twice + b"{no\n" + other + b"\n" + unknown))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "duplicate_custom_id"), (3, "invalid_json_line"), (4, "invalid_url"), (5, "model_not_found"),
    ]  # fmt: skip


def test_ids_that_are_paths_find_nothing(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site({"batches.directory": str(tmp_path)})
    with site.http() as client:
        for name in ("..%2f..%2flease", "file-%00", "..", "file-" + "0" * 32):
            assert client.get(f"/v1/files/{name}/content").status_code == 404


def test_without_a_directory_the_answer_says_how_to_have_one(site: Site) -> None:
    with site.http() as client:
        answer = client.get("/v1/batches")
    assert (answer.status_code, "batches.directory" in answer.text) == (404, True)


def test_when_the_leading_router_ends_another_goes_on_with_what_is_left(make_site: MakeSite, tmp_path: Path) -> None:
    first, second = (make_site({"batches.directory": str(tmp_path)}) for _ in range(2))
    for site in (first, second):
        site.prefill.script = site.decode.script = lambda prompt, choice, index: [97, 98, 99, EOS][min(index, 3)]
    client, other = first.openai(), second.openai()
    batch_id = begun(client, lines(*({"prompt": "ab"} for _ in range(300))))
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed, "a first result", WAIT_S)
    first.server.stop(drain_s=0)
    batch = ended(other, batch_id)
    assert batch.status == "completed"
    assert [line["custom_id"] for line in read(other, batch.output_file_id)] == [f"r{n}" for n in range(300)]
    num_run = (first.prefill.count("start"), second.prefill.count("start"))
    assert min(num_run) > 0, num_run
