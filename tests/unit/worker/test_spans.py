"""What a worker remembers of the work on one request."""

from __future__ import annotations

from tandem.worker.spans import MAX_SPANS, Span, Spans, before


def test_what_is_kept_is_bounded_and_nothing_is_lost_of_the_sums() -> None:
    spans = Spans()
    spans.add("first token", 0.0, 0.5, 1)
    for number in range(1000):
        spans.add("chunk", number, number + 1.0, 512)
    assert len(spans.kept) == MAX_SPANS
    assert sum(span.count for span in spans.kept if span.name == "chunk") == 512_000
    assert spans.kept[-1] == Span("chunk", MAX_SPANS - 2, 1000.0, 512 * (1000 - MAX_SPANS + 2))


def test_what_has_no_room_and_none_of_its_name_is_left_out() -> None:
    spans = Spans()
    for number in range(MAX_SPANS):
        spans.add("chunk", number, number + 1.0, 1)
    spans.add("transfer", 0.0, 1.0, 1)
    assert {span.name for span in spans.kept} == {"chunk"}


def test_other_hosts_are_told_how_long_ago() -> None:
    assert before([Span("chunk", 10.0, 12.0, 7)], 15.0) == (Span("chunk", 5.0, 3.0, 7),)
