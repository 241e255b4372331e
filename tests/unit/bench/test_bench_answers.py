"""Reading of answers and event streams, however they are cut up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from bench_peers import DONE, END, LAST, STREAM, chunk, event, usage
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.load.http_answer import AnswerReader, MalformedAnswerError
from tandem.bench.load.sse import EventParser
from tandem.bench.load.stream_log import StreamLog, error_message

CONTENT = b'data: {"n": 1}\n\n: keep-alive\n\ndata:{"n": 2}\r\n\r\nevent: x\ndata: a\ndata: b\n\ndata: [DONE]\n\n'
EVENTS = [b'{"n": 1}', b'{"n": 2}', b"a\nb", b"[DONE]"]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` cut at these places, modulo its length."""
    bounds = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[start:end] for start, end in pairwise(bounds)]


@pytest.mark.long
@given(places=st.lists(st.integers(0, 1000), max_size=30))
def test_events_are_the_same_however_they_are_cut(places: list[int]) -> None:
    parser = EventParser()
    assert [data for piece in cut(CONTENT, places) for data in parser.feed(piece)] == EVENTS


def test_an_event_without_its_blank_line_is_not_given() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [b"x"]


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6), places=st.lists(st.integers(0, 1000), max_size=20)
)
def test_chunks_are_put_together_however_they_are_cut(chunks: list[bytes], places: list[int]) -> None:
    reader = AnswerReader()
    data = STREAM + b"".join(chunk(content) for content in chunks) + LAST
    pieces = cut(data, places)
    content = b"".join(reader.feed(piece) for piece in pieces[:-1])
    assert not reader.is_complete
    content += reader.feed(pieces[-1])
    assert content == b"".join(chunks)
    assert reader.is_complete
    assert reader.is_event_stream
    assert not reader.closes


def test_a_body_of_known_length_ends_there() -> None:
    reader = AnswerReader()
    head = b"HTTP/1.1 503 No\r\nServer: nginx\r\nRetry-After: 3\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
    assert reader.feed(head + b"ab") == b"ab"
    assert not reader.is_complete
    assert reader.feed(b"cdXX") == b"cd"
    assert reader.is_complete
    assert (reader.status, reader.retry_after_s, reader.server, reader.closes) == (503, 3, "nginx", True)


def test_a_body_without_bounds_ends_with_the_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not reader.is_complete
    reader.end()
    assert reader.is_complete


@pytest.mark.parametrize("data", [STREAM + b"3\r\nab", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", b"HTTP/1.1"])
def test_an_answer_cut_off_is_not_complete(data: bytes) -> None:
    reader = AnswerReader()
    reader.feed(data)
    reader.end()
    assert not reader.is_complete


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", STREAM + b"zz\r\n", STREAM + b"1\r\nabc\r\n", b"x" * 70_000])
def test_what_is_no_http_is_said_so(data: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        AnswerReader().feed(data)


def log_of(*contents: bytes) -> StreamLog:
    log, parser = StreamLog(), EventParser()
    for now_s, content in enumerate(contents):
        for data in parser.feed(content):
            log.take(data, float(now_s))
    return log


def test_a_log_counts_events_that_hold_a_choice() -> None:
    log = log_of(b": ping\n\n", event("a"), event("b", "length"), usage(7, 5), DONE)
    assert log.event_s == [1.0, 2.0]
    assert (log.num_prompt_tokens, log.num_output_tokens, log.finish_reason) == (5, 7, "length")
    assert log.is_whole
    assert log.digest == log_of(event("ab")).digest != log_of(event("ba")).digest


def test_usage_that_comes_with_each_event_counts_on() -> None:
    counts = [{"prompt_tokens": 5, "completion_tokens": n} for n in (1, 2)]
    assert log_of(event(usage=counts[0]), event(usage=counts[1])).num_output_tokens == 2


@pytest.mark.parametrize(
    ("contents", "is_whole"),
    [
        ((event(), DONE), True),
        ((event(finish_reason="stop"),), True),
        ((event(),), False),
        ((event(), b'data: {"error": {"message": "lost"}}\n\n', DONE), False),
        ((event(), b"data: {\n\n", DONE), False),
        ((event(), b"data: [1]\n\n", DONE), False),
        ((b'data: {"choices": [3]}\n\n', DONE), False),
    ],
)
def test_a_stream_is_whole_when_its_end_was_told_and_no_error(contents: tuple[bytes, ...], is_whole: bool) -> None:
    assert log_of(*contents).is_whole == is_whole


@pytest.mark.parametrize(
    ("answer", "message"),
    [({"error": {"message": "m"}}, "m"), ({"error": "e"}, "e"), ({"message": "v"}, "v"), ([1], "[1]")],
)
def test_the_usual_shapes_of_errors_are_read(answer: object, message: str) -> None:
    assert error_message(answer) == message


def test_end_is_the_end() -> None:
    reader = AnswerReader()
    assert reader.feed(STREAM + END) == DONE
    assert reader.is_complete
