"""What a prefill worker tells of its links: what is noticeable, of a bounded number, and what has ended no more."""

from __future__ import annotations

from kvtransfer.protocol.link_window import LinkLimits
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.links import MOST_TOLD, LinkFigures, Links, remembered

KEY = AttemptKey("request", 1)
MB = 1_000_000


class Told:
    def __init__(self) -> None:
        self.reports: list[tuple[LinkFigures, ...]] = []
        self.links = Links(LinkLimits(), self.reports.append)
        self.now_s = 100.0

    @property
    def newest(self) -> dict[str, LinkFigures]:
        return {link.receiver: link for link in self.reports[-1]}


def send(told: Told, receiver: str, mb_per_s: float) -> None:
    """One write that fills the link for a while."""
    link, num_bytes = told.links.open(receiver), int(3 * mb_per_s * MB)
    link.post(KEY, 0, num_bytes, told.now_s)
    link.window.ask_room()  # somebody waits
    told.now_s += 3.0
    link.complete(KEY, 0, told.now_s)
    told.links.tell_news(receiver, told.now_s)


def test_a_rate_is_told_when_it_has_changed_noticeably() -> None:
    told = Told()
    for mb_per_s in (100, 105, 110, 100, 50, 55):
        send(told, "decode-0#1", mb_per_s)
    assert [round(report[0].bytes_per_s / MB) for report in told.reports] == [100, 50]


def test_what_does_not_change_is_told_again_after_a_while() -> None:
    told = Told()
    for _ in range(8):
        send(told, "decode-0#1", 100)  # three seconds each
    assert [round(report[0].bytes_per_s / MB) for report in told.reports] == [100, 100]
    assert told.reports[1][0].used_s > told.reports[0][0].used_s + 9.0


def test_what_was_not_used_for_long_is_known_no_more() -> None:
    told = Told()
    send(told, "decode-0#1", 100)
    told.now_s += 20.0
    send(told, "decode-1#1", 1)
    told.now_s += 9.0
    (newest,) = told.reports[-1:]
    assert {link.receiver for link in remembered(newest, told.now_s)} == {"decode-1#1"}
    told.now_s += 20.0
    assert not remembered(newest, told.now_s), "however slow it was"


def test_while_pages_are_under_way_rates_are_told_once_a_second_and_the_last_one_in_any_case() -> None:
    told = Told()
    link = told.links.open("decode-0#1")
    for write_id in range(40):
        link.post(KEY, write_id, 4 * MB, told.now_s)
    for write_id in range(40):
        told.now_s += 0.01 * (40 - write_id)
        link.complete(KEY, write_id, told.now_s)
        told.links.tell_news("decode-0#1", told.now_s)
    assert 2 <= len(told.reports) <= 10
    assert told.newest["decode-0#1"].bytes_per_s == link.window.bytes_per_s


def test_only_so_many_links_are_told_of_and_those_used_last() -> None:
    told = Told()
    for number in range(MOST_TOLD + 10):
        send(told, f"decode-{number}#1", 100)
    assert set(told.newest) == {f"decode-{number}#1" for number in range(10, MOST_TOLD + 10)}


def test_a_process_that_has_ended_is_told_of_no_more() -> None:
    told = Told()
    send(told, "decode-0#1", 100)
    send(told, "decode-1#1", 100)
    told.links.forget("decode-0#1")
    assert set(told.newest) == {"decode-1#1"}
    assert told.links.get("decode-0#1") is None
    num = len(told.reports)
    told.links.forget("decode-0#1")
    told.links.tell_news("decode-0#1", told.now_s)
    assert len(told.reports) == num
