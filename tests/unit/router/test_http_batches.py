"""Files and batches, as OpenAI's own client uses them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from router.batches.journal import ResultsJournal, read_progress
from router.openai.responses import Answer
from router.request.request import Usage
from tests.support.router_site import EOS, Site
from tests.support.scripted_worker import WAIT_S
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
FORM, HEAD = "multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; "
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


@pytest.mark.long
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


def test_an_unforeseen_error_is_that_of_its_line_alone(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = Answer.body

    def sometimes(self: Answer, usages: Sequence[Usage]) -> bytes:
        if usages[0].num_prompt_tokens == len("a bad one"):
            raise RecursionError("too deep")
        return body(self, usages)

    monkeypatch.setattr(Answer, "body", sometimes)
    client = make_site({"batches.directory": str(tmp_path)}).openai()
    prompts = ["a bad one", *["ab"] * 5]
    with caplog.at_level(logging.ERROR):
        batch = ended(client, begun(client, lines(*({"prompt": prompt, "max_tokens": 3} for prompt in prompts))))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 5, 1)
    (bad,) = read(client, batch.error_file_id)
    error = bad["response"]["body"]["error"]
    assert (bad["custom_id"], bad["response"]["status_code"], error["code"]) == ("r0", 500, "internal")
    assert not error["retryable"]
    assert error["request_id"] == bad["response"]["request_id"]
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [RecursionError]


def test_a_file_may_begin_with_the_mark_of_editors_on_windows(make_site: MakeSite, tmp_path: Path) -> None:
    client = make_site({"batches.directory": str(tmp_path)}).openai()
    batch = ended(client, begun(client, b"\xef\xbb\xbf" + lines({"prompt": "ab", "max_tokens": 3})))
    assert [line["response"]["status_code"] for line in read(client, batch.output_file_id)] == [200]


def test_fields_that_nobody_knows_are_named_in_the_result(make_site: MakeSite, tmp_path: Path) -> None:
    client = make_site({"batches.directory": str(tmp_path)}).openai()
    batch = ended(client, begun(client, lines({"prompt": "ab", "max_token": 3, "slo": {"x": 1}}, {"prompt": "ab"})))
    first, second = (line["response"] for line in read(client, batch.output_file_id))
    assert first["tandem-ignored-fields"] == "max_token, slo.x"
    assert "tandem-ignored-fields" not in second


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


@pytest.mark.long
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


def test_each_key_has_its_own_files_and_batches(make_site: MakeSite, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key-of-this-test\nother-key-of-this-test\n")
    keys.chmod(0o600)
    site = make_site({"batches.directory": str(tmp_path / "batches"), "http.api_keys_file": str(keys)})
    mine, other = (
        site.openai().with_options(api_key=f"{name}-key-of-this-test", max_retries=0) for name in ("first", "other")
    )
    file = mine.files.create(file=("in.jsonl", lines({"prompt": "ab", "max_tokens": 2})), purpose="batch")
    batch_id = mine.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id
    for ask in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.retrieve(batch_id),
        lambda: other.batches.cancel(batch_id),
        lambda: other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert other.files.list().data == []
    assert other.batches.list().data == []
    assert ended(mine, batch_id).status == "completed"
    assert mine.files.delete(file.id).deleted
    names = [path.name for path in (tmp_path / "batches" / "owners").iterdir()]
    assert not any("first" in name or "other" in name for name in names)


@pytest.mark.long
def test_a_batch_that_is_cancelled_keeps_what_was_answered(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site({"batches.directory": str(tmp_path)})
    client = site.openai()
    batch_id = begun(client, lines(*({"prompt": "ab", "max_tokens": 3} for _ in range(300))))
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed, "a first result", WAIT_S)
    assert client.batches.cancel(batch_id).status in ("cancelling", "completed")
    batch = ended(client, batch_id)
    done = read(client, batch.output_file_id)
    assert len(done) == batch.request_counts.completed > 0
    if batch.status == "cancelled":
        left = read(client, batch.error_file_id)
        assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
        assert len(done) + len(left) == 300
    with pytest.raises(openai.BadRequestError, match="only one that is not over"):
        client.batches.cancel(batch_id)


def test_listings_go_page_by_page(make_site: MakeSite, tmp_path: Path) -> None:
    client = make_site({"batches.directory": str(tmp_path)}).openai()
    made = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == made[::-1], "the client asks for the next page"
    assert client.files.list(limit=2).has_more
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.files.list(limit=0)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-" + "0" * 32)


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        (FORM, b"--x\r\nnonsense", ""),
        (FORM, HEAD + b'name="file"; filename="a"\r\n\r\n{}', "last boundary"),
        (FORM, HEAD + b'name="purpose"\r\n\r\nbatch\r\n--x--\r\n', "file"),
    ],
    ids=["json", "nonsense", "cut off", "no file"],
)  # fmt: skip
def test_an_upload_that_is_none_is_refused_and_leaves_nothing(
    make_site: MakeSite, tmp_path: Path, content_type: str, body: bytes, words: str
) -> None:
    site = make_site({"batches.directory": str(tmp_path)})
    with site.http() as client:
        answer = client.post("/v1/files", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lease"] == []


def test_a_file_that_is_too_large_is_refused(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site({"batches.directory": str(tmp_path), "batches.max_file_bytes": 1024})
    with pytest.raises(openai.APIStatusError) as caught:
        site.openai().files.create(file=("in.jsonl", bytes(5000)), purpose="batch")
    assert caught.value.status_code == 413


def test_an_upload_ends_where_its_form_does(make_site: MakeSite, tmp_path: Path) -> None:
    """Else a client that goes on sending for ever would keep a place for ever."""
    site = make_site({"batches.directory": str(tmp_path)})
    form = b"".join(
        (HEAD, b'name="purpose"\r\n\r\nbatch\r\n', HEAD, b'name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n')
    )
    for behind, status in (b"\r\n", 200), (bytes(100_000), 413):
        with site.http() as client:
            answer = client.post("/v1/files", content=form + behind, headers={"content-type": FORM})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "left",
    [
        b'1 + {"c"',
        bytes(40),
        bytes(40) + b'": 1}\n1 + {"c": 1}\n',  # the host ended: a block of the disk was written, the one before not
        b'1 + {"c": \n',
        b'7 + {"c": 1}\n',
    ],
    ids=["a part", "zeros", "zeros before a line", "no JSON", "no line of the input"],
)
def test_a_line_that_was_half_written_is_run_again(tmp_path: Path, left: bytes) -> None:
    results, progress = tmp_path / "results", tmp_path / "progress"
    journal = ResultsJournal(results, progress, 3)
    journal.append(2, b'{"a": 1}', is_good=True)
    journal.append(0, b'{"b": 1}', is_good=False)
    journal.close()
    with results.open("ab") as file:
        file.write(left)
    again = ResultsJournal(results, progress, 3)
    assert [again.has(number) for number in range(3)] == [True, False, True]
    assert read_progress(progress) == (1, 1)
    again.append(1, b'{"c": 2}', is_good=True)
    again.append(1, b'{"c": 3}', is_good=True)
    assert [result and json.loads(result) for _, _, result in again.in_order()] == [{"b": 1}, {"c": 2}, {"a": 1}]
    again.close()


def test_the_document_describes_what_is_answered(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site({"batches.directory": str(tmp_path)})
    client = site.openai()
    batch_id = begun(client, lines({"prompt": "ab", "max_tokens": 2}))
    ended(client, batch_id)
    with site.http() as http:
        document = http.get("/openapi.json").json()
        components = {"components": document["components"]}
        for path, name in (
            ("/v1/files", "Files"), ("/v1/batches", "Batches"), (f"/v1/batches/{batch_id}", "Batch"),
        ):  # fmt: skip
            jsonschema.validate(http.get(path).json(), {"$ref": f"#/components/schemas/{name}", **components})
        served = http.get("/", headers={"accept": "application/json"}).json()["endpoints"]
        assert {"/v1/files", "/v1/batches"} <= set(served)
    assert "/v1/batches/{id}/cancel" in document["paths"]
