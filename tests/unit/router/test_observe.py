"""What the router remembers of its requests: pure, with times that the test gives."""

from __future__ import annotations

import itertools
import json

import pytest

from router.observe.feed import Seen, joined, part_of
from router.observe.histogram import Histogram, merged
from router.observe.history import NUM_SECONDS, History
from router.observe.recorder import NUM_ENDED, Recorder
from router.observe.trace import Trace
from tandem.core.identity import WorkerKey
from tandem.core.states import RequestLife, RequestState

P, D = WorkerKey("prefill-0", "a"), WorkerKey("decode-0", "b")


def trace(request_id: str = "r#1", arrived_s: float = 100.0) -> Trace:
    life = RequestLife(request_id, arrived_s)
    made = Trace(request_id, request_id.partition("#")[0], arrived_s, 10, 1, "chat")
    made.stamps = life.stamps
    return made


def with_life(arrived_s: float = 100.0) -> tuple[Trace, RequestLife]:
    made, life = trace(arrived_s=arrived_s), RequestLife("r#1", arrived_s)
    made.stamps = life.stamps
    return made, life


def names(made: Trace, now_s: float = 200.0) -> list[tuple[str, float, int]]:
    return [(s.name, round(s.end_s - s.begin_s, 6), s.attempt) for s in made.spans(now_s)]


def test_the_parts_of_a_request_lie_side_by_side_and_fill_its_time() -> None:
    made, life = with_life()
    made.begun_s, made.read_s, made.ready_s = 100.002, 100.01, 100.03
    made.attempt_began(100.04, 1, P, D, "load")
    life.to(RequestState.PREFILLING, 100.1)
    life.to(RequestState.HANDOFF, 100.5)
    life.to(RequestState.DECODING, 100.6)
    life.to(RequestState.FINISHED, 101.6)
    made.outcome, made.ended_s = "finished", 101.7
    assert names(made) == [
        ("waits for router", 0.002, 0),
        ("read", 0.008, 0),
        ("tokenise", 0.02, 0),
        ("queue", 0.01, 0),
        ("waits for prefill", 0.06, 1),
        ("prefill", 0.4, 1),
        ("handoff", 0.1, 1),
        ("decode", 1.0, 1),
        ("send", 0.1, 0),
    ]
    spans = made.spans(0.0)
    assert all(one.end_s == other.begin_s for one, other in itertools.pairwise(spans))
    assert (spans[0].begin_s, spans[-1].end_s) == (0.0, pytest.approx(1.7))


def test_a_second_attempt_shows_where_it_begins() -> None:
    made, life = with_life()
    made.ready_s = 100.1
    made.attempt_began(100.1, 1, P, D, "load")
    life.to(RequestState.PREFILLING, 100.2)
    life.to(RequestState.QUEUED, 100.5)
    made.attempts[-1].ended = "died: gone"
    made.attempt_began(100.9, 2, P, D, "kept")
    life.to(RequestState.PREFILLING, 101.0)
    assert names(made, now_s=101.5) == [
        ("waits for router", 0.1, 0),
        ("waits for prefill", 0.1, 1),
        ("prefill", 0.3, 1),
        ("queue", 0.4, 1),
        ("waits for prefill", 0.1, 2),
        ("prefill", 0.5, 2),
    ]
    assert [attempt["ended"] for attempt in made.describe(101.5)["attempts"]] == ["died: gone", ""]


def test_of_states_that_are_reached_at_once_the_last_one_lasts() -> None:
    """Decode may say that it has the pages before prefill's stream tells that it began."""
    made, life = with_life()
    made.ready_s = 100.1
    made.attempt_began(100.1, 1, P, D, "kept")
    for state in (RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING):
        life.to(state, 100.2)
    life.to(RequestState.FINISHED, 101.2)
    made.ended_s = 101.3
    assert names(made) == [
        ("waits for router", 0.1, 0),
        ("waits for prefill", 0.1, 1),
        ("decode", 1.0, 1),
        ("send", 0.1, 0),
    ]


def test_a_request_under_way_lasts_until_now() -> None:
    made, _ = with_life()
    assert names(made, 103.0) == [("waits for router", 3.0, 0)]
    assert made.summary(103.0)["age_s"] == 3.0


def test_what_is_remembered_is_bounded_and_found_by_either_id() -> None:
    recorder = Recorder()
    for number in range(NUM_ENDED + 5):
        recorder.begin(trace(f"client{number // 2}#{number}", 100.0 + number))
        recorder.end([f"client{number // 2}#{number}"], 101.0 + number)
    assert recorder.num_ended == NUM_ENDED + 5
    assert not recorder.find("client0"), "forgotten"
    assert not recorder.find("client0#0")
    (left,) = recorder.find("client2")
    assert left.request_id == "client2#5", "of its two one is forgotten"
    assert [t.request_id for t in recorder.find("client3")] == ["client3#6", "client3#7"]
    assert [t.request_id for t in recorder.last_ended(2)] == [
        f"client{(NUM_ENDED + 3) // 2}#{NUM_ENDED + 3}",
        f"client{(NUM_ENDED + 4) // 2}#{NUM_ENDED + 4}",
    ]
    assert len(recorder._by_client) <= NUM_ENDED


def test_of_an_id_that_many_requests_have_the_newest_are_found() -> None:
    recorder = Recorder()
    for number in range(100):
        recorder.begin(trace(f"gateway#{number}", 100.0 + number))
    assert [t.request_id for t in recorder.find("gateway")] == [f"gateway#{number}" for number in range(68, 100)]
    assert recorder.find("gateway#3"), "each by its own"


def test_an_exporter_that_fails_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()

    def fail(_: Trace) -> None:
        raise RuntimeError("of this test")

    recorder.on_end = fail
    for number in range(NUM_ENDED + 2):
        recorder.begin(trace(f"client#{number}", 100.0))
    recorder.end([f"client#{number}" for number in range(NUM_ENDED + 2)], 101.0)
    assert (recorder.num_running, recorder.num_ended) == (0, NUM_ENDED + 2)
    assert not recorder.find("client#0"), "forgotten all the same"
    assert "could not be told" in caplog.text


def test_an_end_counts_once() -> None:
    recorder = Recorder()
    recorder.begin(trace())
    recorder.end(["r#1"], 101.0)
    recorder.end(["r#1", "never"], 102.0)
    assert (recorder.num_running, recorder.num_ended) == (0, 1)
    assert recorder.history.at(101.0).outcomes == {"failed": 1}


def test_a_second_knows_its_tokens_and_what_was_before_them() -> None:
    recorder, made = Recorder(), trace()
    recorder.begin(made)
    recorder.first_token(100.5, 0.5)
    recorder.tokens(100.5, 4, [0.1])
    for now_s, count in ((100.5, 1), (100.5, 1), (100.6, 2)):
        made.token(now_s, count)
    second = recorder.history.at(100.7)
    assert (second.num_tokens, second.ttft.counts.total(), second.itl.counts.total()) == (4, 1, 1)
    assert second.ttft.quantile(0.5) == pytest.approx(0.5, rel=0.1)
    assert (made.num_output_tokens, [round(t, 3) for t in made.ticks]) == (4, [0.5, 0.5, 0.6])


def test_what_workers_did_lies_within_the_request_and_is_bounded() -> None:
    made = trace(arrived_s=100.0)
    made.worked("prefill-0", "chunk", 99.9999, 100.5, 512)  # the clocks of two hosts agree by messages alone
    made.worked("prefill-0", "transfer", 100.25, 100.75, 1 << 20)
    assert made.describe(101.0)["work"] == [
        {"worker": "prefill-0", "name": "chunk", "begin_s": 0.0, "end_s": 0.5, "count": 512},
        {"worker": "prefill-0", "name": "transfer", "begin_s": 0.25, "end_s": 0.75, "count": 1 << 20},
    ]
    for _ in range(1000):
        made.worked("prefill-0", "chunk", 100.0, 100.5, 1)
    assert len(made.work) == 256


def test_ticks_are_bounded() -> None:
    made = trace()
    for number in range(5000):
        made.token(100.0 + number, 1)
    assert (len(made.ticks), made.num_output_tokens) == (2048, 5000)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_quantiles_are_right_within_a_bucket(share: float) -> None:
    values = [0.001 * 1.01**n for n in range(500)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.quantile(share) == pytest.approx(sorted(values)[int(share * 500) - 1], rel=0.1)
    assert Histogram().quantile(share) is None
    assert merged([histogram, histogram]).quantile(share) == histogram.quantile(share)


def test_the_history_has_every_second_and_is_bounded() -> None:
    history = History()
    for second in range(0, 1000, 2):
        history.at(second + 0.5).num_tokens += 1
    told = history.since(0, 1000)
    assert len(told) == NUM_SECONDS
    assert [s.second for s in told] == list(range(700, 1000))
    assert sum(s.num_tokens for s in told) == NUM_SECONDS // 2
    assert [s.second for s in history.since(998, 1000)] == [998, 999], "the one under way is not told yet"


def test_a_clock_that_steps_back_counts_on() -> None:
    history = History()
    history.at(10.0).num_tokens += 1
    history.at(9.0).num_tokens += 1
    assert history.at(10.5).num_tokens == 2


def test_a_watcher_is_told_each_second_and_each_end_once() -> None:
    recorder = Recorder()
    for number in range(3):
        recorder.begin(trace(f"r#{number}", 100.0))
    recorder.end(["r#0"], 100.9)
    first = part_of(recorder, "router-0", Seen(), 101.5)
    assert [row["id"] for row in first["ended"]] == ["r#0"]
    assert [row["id"] for row in first["running"]] == ["r#1", "r#2"]
    recorder.end(["r#1"], 101.8)
    second = part_of(recorder, "router-0", Seen.of(first), 102.5)
    assert [row["id"] for row in second["ended"]] == ["r#1"]
    assert list(second["seconds"]) == [101], "100 was told before"


def test_a_watcher_is_told_of_the_ends_of_a_router_that_has_begun_anew() -> None:
    recorder = Recorder()
    recorder.begin(trace("r#1"))
    recorder.end(["r#1"], 100.9)
    told = part_of(recorder, "router-0", Seen(second=100, num_ended=7), 101.5)
    assert [row["id"] for row in told["ended"]] == ["r#1"]


def test_routers_of_hosts_that_began_at_other_times_count_the_same_seconds() -> None:
    hosts = {"r0": 1_700_000_000.0, "r1": 1_699_000_000.5}  # when each began
    parts = []
    for name, began_s in hosts.items():
        recorder, now_s = Recorder(began_s), 1_700_000_100.75 - began_s
        recorder.tokens(now_s, 2, [0.01])
        # The second one is asked a moment later, when the next second has begun there.
        late_s, until = (0.0, None) if name == "r0" else (0.5, parts[0]["now"])
        parts.append(part_of(recorder, name, Seen(), now_s + 1 + late_s, until))
    told = joined(parts)["seconds"]
    assert (told[-1]["second"], told[-1]["tokens"]) == (1_700_000_100, 4)
    assert len(told) == NUM_SECONDS


def test_several_routers_are_added_up() -> None:
    one, other = Recorder(), Recorder()
    for recorder, name in ((one, "a"), (other, "b")):
        made = trace(f"{name}#1", 100.0 if name == "a" else 99.0)
        recorder.begin(made)
        recorder.tokens(100.5, 2, [0.01])
    parts = [part_of(recorder, name, Seen(), 101.0) for name, recorder in (("r0", one), ("r1", other))]
    parts[1] = json.loads(json.dumps(parts[1]))  # as it comes from another process
    told = joined(parts)
    (newest,) = [second for second in told["seconds"] if second["second"] == 100]
    assert (newest["tokens"], newest["arrived"], sum(newest["itl"].values())) == (4, 1, 2)
    assert [(row["id"], row["router"]) for row in told["running"]] == [("b#1", "r1"), ("a#1", "r0")], "the oldest first"
    assert [router["router"] for router in told["routers"]] == ["r0", "r1"]
