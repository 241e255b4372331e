"""What a worker remembers of the work on one request."""

from __future__ import annotations

from tandem.worker.spans import MAX_SPANS, Span, Spans, before


def test_what_is_kept_is_bounded_and_nothing_is_lost_of_the_sums() -> None:
    spans = Spans()
    for number in range(1000):
        spans.add("chunk", number, number + 1.0, 512)
    assert len(spans.kept) == MAX_SPANS
    assert sum(span.count for span in spans.kept) == 512_000
    assert spans.kept[-1] == Span("chunk", MAX_SPANS - 1, 1000.0, 512 * (1000 - MAX_SPANS + 1))


def test_what_comes_last_and_once_is_kept_however_much_came_before() -> None:
    spans = Spans()
    for number in range(1000):
        spans.add("chunk", number, number + 1.0, 512)
        spans.add("transfer", number, number + 2.0, 1 << 20)
    spans.add("first token", 1000.0, 1001.0, 1)
    spans.add("commit", 1001.0, 1002.0, 0)
    names = [span.name for span in spans.kept]
    assert names[-2:] == ["first token", "commit"]
    assert sum(span.count for span in spans.kept if span.name == "transfer") == 1000 << 20


def test_other_hosts_are_told_how_long_ago() -> None:
    assert before([Span("chunk", 10.0, 12.0, 7)], 15.0) == (Span("chunk", 5.0, 3.0, 7),)
