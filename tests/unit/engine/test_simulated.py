"""The engine that computes nothing: times by its model, tokens by their keys, and what a request asks of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.model_path import resolve_model
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, SequenceState
from tandem.engine.batch import SequenceInput
from tandem.engine.simulated import SimulatedEngine
from tests.support.pooling_models import save_embedder

TIMES = "times: fitted\nfitted: {base_ms: 20, row_us: 1000, token_us: 10}\n"


def engine_of(directory: Path, text: str = TIMES, role: Role = Role.DECODE, **options: int) -> SimulatedEngine:
    file = directory / "times.yaml"
    file.write_text(text)
    settings = {"page_size": 16, "max_context": None, **options}
    return SimulatedEngine(resolve_model("embedded"), file, role, **settings)  # type: ignore[arg-type]


def row(position: int = 0, choice: int = 0, **params: object) -> SampleRow:
    given = SamplingParams(**{"seed": 5, "max_tokens": 500, **params})  # type: ignore[arg-type]
    return SampleRow(SequenceState([1]), given, choice, position)


def tokens(engine: SimulatedEngine, rows: list[SampleRow]) -> list[int]:
    found = engine.sampler()(torch.zeros(len(rows), engine.vocab_size), [[one] for one in rows])
    ids = []
    for (token,) in found:
        assert isinstance(token, SampledToken)
        ids.append(token.token_id)
    return ids


def test_a_step_takes_what_its_terms_say_and_not_less(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    layers: list[int] = []
    decoding = [SequenceInput([3], 40, range(3)) for _ in range(4)]
    began = time.monotonic()
    logits = engine.forward([*decoding, SequenceInput([1] * 100, 0, range(7), num_logits=1)], layers.append)
    # 20 ms, a millisecond for each of the four that generate, 10 us for each of 104 tokens.
    assert time.monotonic() - began >= 0.02504
    assert logits.shape == (5, engine.vocab_size)
    assert layers == [0]


def test_the_room_is_that_of_the_role(tmp_path: Path) -> None:
    text = "prefill: {tokens: 160}\ndecode: {tokens: 1000}\n"
    assert engine_of(tmp_path, text, Role.PREFILL).num_pages == 10
    assert engine_of(tmp_path, text).num_pages == 62


def test_a_file_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode\.tokens is 15, which is not a page of 16"):
        engine_of(tmp_path, "decode: {tokens: 15}")


def test_a_model_that_pools_is_refused(tmp_path: Path) -> None:
    (tmp_path / "times.yaml").write_text(TIMES)
    model = save_embedder(tmp_path / "model")
    with pytest.raises(ConfigError, match="embeds or scores"):
        SimulatedEngine(model, tmp_path / "times.yaml", Role.PREFILL, page_size=16, max_context=None)


def test_workers_of_one_file_share_pages_and_others_do_not(tmp_path: Path) -> None:
    def digest(text: str, role: Role) -> str:
        return engine_of(tmp_path, text, role).weights_sha256

    text = "prefill: {tokens: 160}\ndecode: {tokens: 1000}\n"
    assert digest(text, Role.PREFILL) == digest(text, Role.DECODE)
    assert digest(text, Role.DECODE) != digest(f"{text}card: {{tflops: 7}}", Role.DECODE)


def test_a_token_follows_from_its_key_alone(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    rows = [row(position) for position in range(200)]
    found = tokens(engine, rows)
    assert found == [tokens(engine, [one])[0] for one in rows]
    assert len(set(found)) > 100
    for other in ([row(p, choice=1) for p in range(200)], [row(p, seed=6) for p in range(200)]):
        assert tokens(engine, other) != found
    greedy = [row(p, temperature=0.0) for p in range(200)]
    assert tokens(engine, greedy) == tokens(engine, [row(p, temperature=0.0, seed=9) for p in range(200)])


@pytest.mark.long
def test_texts_end_by_themselves_after_so_many_tokens_unless_asked_not_to(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "model: {output_tokens: 50}")
    ends = set(engine.eos_token_ids)
    positions = [row(p % 500, seed=p // 500) for p in range(20_000)]
    num_ends = sum(token in ends for token in tokens(engine, positions))
    assert 300 < num_ends < 500  # 400 on average, and 20 of standard deviation
    assert not ends & set(tokens(engine, [row(p, ignore_eos=True) for p in range(500)]))
    assert not ends & set(tokens(engine, [row(p, min_tokens=500) for p in range(500)]))
    endless = engine_of(tmp_path, "model: {output_tokens: 0}")
    assert not ends & set(tokens(endless, [row(p) for p in range(500)]))


def test_what_a_request_asks_of_its_tokens_holds(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "model: {output_tokens: 0}")
    plain = tokens(engine, [row(p) for p in range(40)])
    assert set(tokens(engine, [row(p, allowed_token_ids=(300, 301)) for p in range(40)])) == {300, 301}
    assert not set(plain) & set(tokens(engine, [row(p, bad_words=tuple((t,) for t in plain)) for p in range(40)]))
    # Who asks for log-probabilities gets the tokens of who does not.
    (found,) = engine.sampler()(torch.zeros(1, engine.vocab_size), [[row(7, num_logprobs=3)]])
    assert isinstance(found[0], SampledToken)
    assert found[0].token_id == plain[7]
    assert found[0].logprob is not None
    assert len(found[0].top_logprobs) == 3


def test_what_a_grammar_asks_for_ends_as_soon_as_it_may(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "model: {output_tokens: 0}")

    class Only:
        """Lets these come."""

        def __init__(self, *token_ids: int) -> None:
            self.token_ids = token_ids

        def allowed(self) -> bytes:
            mask = bytearray(engine.vocab_size // 8 + 1)
            for token_id in self.token_ids:
                mask[token_id // 8] |= 1 << token_id % 8
            return bytes(mask)

    end = engine.eos_token_ids[0]
    for may_come, comes in (((400, end), end), ((400,), 400)):
        params = SamplingParams(seed=5, max_tokens=9, grammar="start: /a/")
        one = SampleRow(SequenceState([1]), params, guide=Only(*may_come))
        assert tokens(engine, [one]) == [comes]
