"""What a router knows of a worker's load is its report and what this does not show, whatever the order of events."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.known_load import KnownLoad, Report
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import WorkerKey

KEY = WorkerKey("w", "1")
FORMAT = KvFormat(LayoutId("w", "float32", num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), "ucx")
names = st.sampled_from("abcd")


@dataclass
class Sent:
    """A request as a list would have it."""

    number: int
    num_sequences: int
    num_tokens: int
    num_pages: int
    steps: bool
    is_seen: bool = False


class Router(RuleBasedStateMachine):
    """The figures against sums over all that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.known = KnownLoad()
        self.report = Report()
        self.num_sent = 0
        self.held: dict[str, Sent] = {}

    @rule(
        name=names,
        num_tokens=st.integers(0, 50),
        num_pages=st.integers(0, 4),
        computes=st.booleans(),
        num_sequences=st.integers(1, 3),
    )
    def sends(self, name: str, num_tokens: int, num_pages: int, computes: bool, num_sequences: int) -> None:
        self.num_sent += 1
        self.known.hold(name, self.num_sent, num_tokens, num_pages, computes=computes, num_sequences=num_sequences)
        self.held[name] = Sent(self.num_sent, num_sequences, num_tokens if computes else 0, num_pages, computes)

    @rule()
    def sends_something_else(self) -> None:
        self.num_sent += 1

    @rule(
        active=st.integers(0, 5),
        tokens=st.integers(0, 99),
        pages=st.integers(0, 9),
        back=st.none() | st.integers(0, 3),
    )
    def hears(self, active: int, tokens: int, pages: int, back: int | None) -> None:
        """A report that does not show the last `back` commands; `None`: it does not say."""
        num = max(0, self.num_sent - back) if back is not None else None
        self.report = Report(active, tokens, pages, min(active, 2), num)
        self.known.hear(self.report)
        for sent in self.held.values():
            sent.is_seen |= num is not None and sent.number <= num

    @rule(name=names, steps=st.booleans())
    def is_taken_up(self, name: str, steps: bool) -> None:
        assert self.known.note_taken_up(name, steps=steps) == (name in self.held)
        if (sent := self.held.get(name)) is not None:
            sent.is_seen, sent.steps, sent.num_pages = True, steps, 0

    @rule(name=names)
    def ends(self, name: str) -> None:
        assert self.known.let_go(name) == (name in self.held)
        self.held.pop(name, None)

    @rule()
    def is_lost(self) -> None:
        self.known.clear()
        self.held.clear()

    @invariant()
    def figures_are_sums(self) -> None:
        report, held = self.report, self.held.values()
        unseen = [sent for sent in held if not sent.is_seen]
        active, tokens = report.num_active, report.num_queued_tokens
        own_tokens = sum(sent.num_tokens for sent in unseen)
        tells = report.num_commands is not None
        num_active = max(active + len(unseen) if tells else active, len(held))
        assert self.known.load(KEY, FORMAT, 16, 12) == WorkerLoad(
            key=KEY,
            kv_format=FORMAT,
            page_size=16,
            num_active=num_active,
            num_others=max(0, num_active - sum(sent.num_sequences for sent in held)),
            num_queued_tokens=tokens + own_tokens if tells else max(tokens, own_tokens),
            num_available_pages=report.num_available_pages - sum(sent.num_pages for sent in held),
            num_stepping=max(report.num_stepping, sum(sent.steps for sent in held)),
            prompt_steps=report.prompt_steps,
            max_num_seqs=12,
        )


TestKnownLoad = Router.TestCase
