"""From steps that were taken to a model of their times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli import main
from tandem.core.config_tree import build
from tandem.core.errors import ConfigError
from tandem.core.step_times import Fitted, Terms
from tandem.core.time_model import FittedSpec, read_time_model
from tandem.core.windows import Windows
from tandem.sim.calibrate import Step, fit, fit_shared, read_steps, run, seconds_by_state, spec_of, tree_of
from tandem.sim.cores import STEPS, Beside, Kind, SharedCores, Slowdowns
from tandem.sim.kernel import Kernel
from tandem.sim.scenario import read_scenario
from tandem.worker.step_log import SUFFIX, StepLog

TRUE = Fitted(0.004, of_token_s=2e-5, of_row_s=1e-5, of_read_s=3e-8, of_pair_s=1e-9)


def terms(rng: random.Random, kind: Kind | None = None) -> Terms:
    rows, context, chunk = rng.randrange(64), rng.randrange(1, 8000), rng.choice((0, 0, 128, 512))
    rows = {None: rows, Kind.PROMPTS: 0, Kind.DECODE: max(1, rows)}[kind]
    pairs = rows * context + chunk * (chunk + 1) / 2
    return Terms(max(1, rows + chunk), rows, rows * context + chunk, pairs)


def steps_of(times: Fitted, num: int = 400, noise: float = 0.0, seed: int = 1) -> list[Step]:
    rng = random.Random(seed)
    drawn = [terms(rng) for _ in range(num)]
    return [Step("decode-0", one, times.seconds(one) * (1 + rng.uniform(-noise, noise))) for one in drawn]


coefficients = st.one_of(st.just(0.0), st.floats(0.1, 10.0))


@pytest.mark.long
@given(st.floats(1e-4, 0.05), coefficients, coefficients, coefficients, coefficients)
def test_what_steps_were_made_of_is_found(base: float, token: float, row: float, read: float, pair: float) -> None:
    true = Fitted(base, token * 1e-5, row * 1e-4, read * 1e-8, pair * 1e-9)
    found = fit(steps_of(true))
    assert found.median_off < 0.01
    assert abs(found.total_off) < 0.01
    rng = random.Random(2)
    for one in (terms(rng) for _ in range(50)):  # that were not among them
        assert found.times.seconds(one) == pytest.approx(true.seconds(one), rel=0.02)


def test_rows_that_cost_hardly_more_than_one_and_prompts_that_fill_a_processor_have_lines_of_their_own() -> None:
    true = Fitted(
        0.001, of_read_s=1e-8, of_rows=((1, 0.010), (4, 0.011), (32, 0.040)), of_prompts=((16, 0.020), (512, 0.3))
    )
    rng, steps = random.Random(3), list[Step]()
    for _ in range(600):
        prompt = rng.choice((rng.randint(1, 16), rng.randint(1, 700)))
        rows, chunk = rng.choice(((rng.randint(1, 40), 0), (0, prompt), (rng.randint(1, 8), 64)))
        one = Terms(rows + chunk, rows, rng.uniform(100, 900) * rows + chunk, 0.0)
        steps.append(Step("decode-0", one, true.seconds(one)))
    found = fit(steps)
    assert found.p90_off < 0.01
    for rows, chunk in ((1, 0), (2, 0), (4, 0), (20, 0), (60, 0), (0, 10), (0, 300), (0, 2000), (3, 64)):
        one = Terms(rows + chunk, rows, 500.0 * rows + chunk, 0.0)
        assert found.times.seconds(one) == pytest.approx(true.seconds(one), rel=0.03)
    again = build(FittedSpec, tree_of(spec_of(found.times))).times
    assert again.seconds(Terms(20, 20, 9000.0, 9000.0)) == pytest.approx(
        found.times.seconds(Terms(20, 20, 9000.0, 9000.0)), rel=1e-4
    )


def test_a_step_of_prompts_alone_may_have_a_base_of_its_own() -> None:
    true = Fitted(0.02, of_token_s=1e-4, of_row_s=2e-3, only_prompts_s=0.05)
    rng, steps = random.Random(7), list[Step]()
    for _ in range(600):
        rows, chunk = rng.choice(((rng.randint(1, 8), 0), (0, rng.randint(1, 500)), (rng.randint(1, 8), 32)))
        one = Terms(rows + chunk, rows, 500.0 * rows + chunk, 0.0)
        steps.append(Step("any", one, true.seconds(one) * rng.uniform(0.98, 1.02)))
    found = fit(steps)
    again = build(FittedSpec, tree_of(spec_of(found.times))).times
    for rows, chunk in ((0, 16), (0, 400), (4, 32), (4, 0)):
        one = Terms(rows + chunk, rows, 500.0 * rows + chunk, 0.0)
        assert found.times.seconds(one) == pytest.approx(true.seconds(one), rel=0.03)
        assert again.seconds(one) == pytest.approx(found.times.seconds(one), rel=1e-4)


def test_prompts_of_one_size_have_no_base_of_their_own_and_one_slow_step_makes_none() -> None:
    """Else a base would be all that they cost, and a step that something else held up would be of the model."""
    true = Fitted(0.02, of_token_s=1e-4, of_row_s=2e-3)
    rng = random.Random(8)
    decode = [Terms(rows, rows, 500.0 * rows, 0.0) for rows in (rng.randint(1, 8) for _ in range(300))]
    steps = [Step("any", one, true.seconds(one)) for one in [*decode, *[Terms(512, 0, 512.0, 0.0)] * 100]]
    found = fit(steps).times
    for one in (Terms(64, 0, 64.0, 0.0), Terms(516, 4, 2512.0, 0.0), Terms(2048, 0, 2048.0, 0.0)):
        assert found.seconds(one) == pytest.approx(true.seconds(one), rel=0.1)
    mixed = [Terms(rows + 32, rows, 500.0 * rows + 32, 0.0) for rows in (rng.randint(1, 8) for _ in range(300))]
    steps = [Step("any", one, true.seconds(one)) for one in (*decode, *mixed)]
    slow = fit([Step("any", Terms(64, 0, 64.0, 0.0), 3.0), *steps])
    assert slow.num_left_out == 1
    assert slow.times.seconds(Terms(64, 0, 64.0, 0.0)) == pytest.approx(true.seconds(Terms(64, 0, 64.0, 0.0)), rel=0.1)


def test_of_prompts_alone_what_is_read_is_not_made_of_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have read what they computed; behind a long context they would take hundreds of times as long."""
    true = Fitted(0.004, of_token_s=2e-5, of_pair_s=1e-9)
    rng, log = random.Random(5), StepLog(tmp_path / "logs", "prefill-0")
    for number in range(200):
        one = Terms.of([(0, rng.randint(1, 2048), False)])
        log.note(one, true.seconds(one) * rng.uniform(0.98, 1.02), float(number))
    log.close()
    found = fit(read_steps([tmp_path / "logs"])).times
    behind = Terms.of([(8000, 512, False)])
    assert found.seconds(behind) == pytest.approx(true.seconds(behind), rel=0.25)
    assert not found.of_rows
    run([tmp_path / "logs"], None)
    assert "no step generates in these logs" in capsys.readouterr().out


def test_steps_of_each_kind_of_one_size_share_no_base_that_neither_has() -> None:
    """Without steps of both kinds; else the base would be in the first row, and in the first tokens, too."""
    true = Fitted(0.004, of_token_s=2e-5, of_row_s=4e-5)
    rng, steps = random.Random(6), list[Step]()
    for number in range(600):
        one = Terms(32, 32, 32 * 500.0, 0.0) if number % 2 else Terms.of([(0, rng.randint(20, 2000), False)])
        steps.append(Step("any", one, true.seconds(one) * rng.uniform(0.98, 1.02)))
    found = fit(steps).times
    for one in (Terms(1, 1, 500.0, 0.0), Terms(64, 64, 64 * 500.0, 0.0), Terms(288, 32, 16_256.0, 0.0)):
        assert found.seconds(one) == pytest.approx(true.seconds(one), rel=0.15)


def test_a_log_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path, "decode-0")
    for step in steps_of(TRUE):
        log.note(step.terms, step.seconds, step.began_s)
    log.close()
    assert len(read_steps([tmp_path, log.path, tmp_path / "." / log.path.name])) == len(steps_of(TRUE))


def test_steps_of_a_worker_that_lie_in_each_other_or_take_no_time_are_refused() -> None:
    """Of two runs, whose clocks begin alike."""
    steps = steps_in_turn(((1, 0), (0, 1)), Slowdowns())
    with pytest.raises(ConfigError, match=r"lie in each other.*name each log once"):
        fit_shared([*steps, *steps, *steps], 2)
    with pytest.raises(ConfigError, match=r"prompts-. has a step of 0 s"):
        fit([*steps, replace(steps[0], seconds=0.0)])


def test_no_term_is_below_0_and_noise_is_told() -> None:
    found = fit(steps_of(TRUE, noise=0.2))
    assert min(found.times.base_s, found.times.of_row_s, found.times.of_read_s, found.times.of_pair_s) >= 0
    assert 0.05 < found.median_off < 0.15
    assert abs(found.total_off) < 0.03


def test_steps_that_something_else_held_up_are_left_out() -> None:
    steps = steps_of(TRUE)
    held_up = [Step(one.worker, one.terms, one.seconds * 40) for one in steps[:20]]
    found = fit([*held_up, *steps[20:]])
    assert found.num_left_out == 20
    assert found.times.seconds(steps[0].terms) == pytest.approx(steps[0].seconds, rel=0.02)


def steps_on_shared_cores(slowdowns: Slowdowns, noise: float = 0.0, until_s: float = 20.0) -> list[Step]:
    """Of two workers that compute prompts and two that generate, which rest now and then."""
    kernel, rng, found = Kernel(0.0), random.Random(3), list[Step]()
    cores = SharedCores(kernel, slowdowns)

    def begin(worker: str, kind: Kind) -> None:
        one, began_s = terms(rng, kind), kernel.now_s

        def end() -> None:
            found.append(Step(worker, one, kernel.now_s - began_s, began_s))
            if kernel.now_s < until_s:
                kernel.after(rng.choice((0.0, 0.0, 0.0, 0.2)), lambda: begin(worker, kind))

        cores.run(kind, TRUE.seconds(one) * (1 + rng.uniform(-noise, noise)), end)

    for number in range(2):
        begin(f"prefill-{number}", Kind.PROMPTS)
        begin(f"decode-{number}", Kind.DECODE)
    kernel.run_all()
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_cores", [2, 4])
def test_how_workers_slow_each_other_down_is_found_beside_what_steps_take_alone(num_cores: int) -> None:
    """Two that generate slow each other down more than one does beside a prompt."""
    slowdowns = Slowdowns(Beside(0.9, 0.6), Beside(0.3, 1.1), num_cores=num_cores)
    found = fit_shared(steps_on_shared_cores(slowdowns, noise=0.1, until_s=80.0), num_cores)
    assert found.slowdowns is not None
    for name in ("prompts", "decode"):
        beside, expected = getattr(found.slowdowns, name), getattr(slowdowns, name)
        assert (beside.prompts, beside.decode) == pytest.approx((expected.prompts, expected.decode), abs=0.1)
    rng = random.Random(2)
    for one in (terms(rng) for _ in range(50)):
        assert found.times.seconds(one) == pytest.approx(TRUE.seconds(one), rel=0.08)
    assert found.median_off < 0.06


def steps_in_turn(together: Sequence[tuple[int, int]], slowdowns: Slowdowns) -> list[Step]:
    """Now so many steps of prompts and so many that generate are under way at once, now so many: all of them from the
    same moment to the same."""
    rng, found, now_s = random.Random(4), list[Step](), 0.0
    for number in range(900):
        nums = dict(zip(STEPS, together[number % len(together)], strict=True))
        seconds = rng.uniform(0.01, 0.1)
        for kind, num in nums.items():
            for worker in rng.sample(range(2), num):
                alone_s = seconds / slowdowns.of(kind, *nums.values())
                one = Terms(round((alone_s - LINEAR.base_s) / LINEAR.of_token_s), int(kind is Kind.DECODE), 0.0, 0.0)
                found.append(Step(f"{kind.value}-{worker}", one, seconds, now_s))
        now_s += seconds + 0.001
    return found


LINEAR = Fitted(0.001, of_token_s=1e-6)


@pytest.mark.parametrize("num_cores", [2, 4])
def test_beside_so_many_as_were_never_seen_each_takes_as_much_as_those_that_were(num_cores: int) -> None:
    """None was seen beside two others, and so none took turns."""
    slowdowns = Slowdowns(Beside(1.0, 0.25), Beside(0.5, 1.5), num_cores=num_cores)
    found = fit_shared(steps_in_turn(((1, 0), (0, 1), (1, 1), (2, 0), (0, 2)), slowdowns), num_cores).slowdowns
    assert found is not None
    for kind, *nums in ((Kind.PROMPTS, 2, 2), (Kind.DECODE, 2, 2)):
        assert found.of(kind, *nums) == pytest.approx(slowdowns.of(kind, *nums), rel=0.03)


@pytest.mark.parametrize(
    ("together", "named"),
    [(((1, 1), (0, 1)), "computes prompts was taken while no other"), (((1, 0), (1, 1)), "that generates was taken")],
)
def test_steps_of_which_none_was_alone_are_refused(together: Sequence[tuple[int, int]], named: str) -> None:
    with pytest.raises(ConfigError, match=f"hardly any step that {named.removeprefix('that ')}.*load of one client"):
        fit_shared(steps_in_turn(together, Slowdowns()), 2)


def test_of_each_step_the_seconds_are_counted_by_what_computed_meanwhile() -> None:
    prompt, generated = Terms(1, 0, 1, 1.0), Terms(1, 1, 1, 1.0)
    steps = [Step("a", prompt, 4.0, 10.0), Step("b", generated, 1.0, 11.0), Step("c", prompt, 3.0, 13.0)]
    found = seconds_by_state(steps)
    assert found.shape == (3, 3, 2)
    assert {state: found[0][state] for state in np.ndindex(3, 2) if found[0][state]} == {
        (1, 0): 2.0, (1, 1): 1.0, (2, 0): 1.0,
    }  # fmt: skip
    assert found[1, 1, 1] == 1.0
    assert (found[2, 2, 0], found[2, 1, 0]) == (1.0, 2.0)
    assert found.sum() == 8.0


def test_too_few_steps_are_said() -> None:
    with pytest.raises(ConfigError, match="19 steps are too few"):
        fit(steps_of(TRUE, num=19))


def test_the_command_writes_what_a_scenario_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = StepLog(tmp_path / "logs", "decode-0")
    for step in steps_of(TRUE):
        log.note(step.terms, step.seconds, step.began_s)
    log.close()
    out = tmp_path / "times.yaml"
    assert main(["sim", "calibrate", str(tmp_path / "logs"), "--out", str(out)]) == 0
    assert "decode-0" in capsys.readouterr().out
    times = read_time_model(out).step_times()
    for step in steps_of(TRUE, seed=7):
        assert times.seconds(step.terms) == pytest.approx(step.seconds, rel=0.02)
    assert yaml.safe_load(out.read_text())["times"] == "fitted"


@pytest.mark.long
def test_the_command_writes_what_is_lost_on_shared_cores_as_a_scenario_reads_them(tmp_path: Path) -> None:
    slowdowns = Slowdowns(Beside(1.0, 0.5), Beside(0.25, 0.75), num_cores=2)
    names = "prefill-0", "prefill-1", "decode-0", "decode-1"
    logs = {name: StepLog(tmp_path / "logs", name) for name in names}
    for step in steps_on_shared_cores(slowdowns):
        logs[step.worker].note(step.terms, step.seconds, step.began_s)
    for log in logs.values():
        log.close()
    out = tmp_path / "times.yaml"
    assert main(["sim", "calibrate", str(tmp_path / "logs"), "--shared-cores", "2", "--out", str(out)]) == 0
    scenario = read_scenario(out)
    assert scenario.cores.prompts.prompts == pytest.approx(1.0, rel=0.05)
    assert scenario.cores.decode.decode == pytest.approx(0.75, rel=0.05)
    assert scenario.cores.num_cores == 2
    assert scenario.shape().slowdowns == scenario.cores
    assert scenario.card.is_cpu, "nothing else shares cores"


def test_of_a_windowed_model_the_log_says_so_and_a_scenario_counts_alike(tmp_path: Path) -> None:
    """Steps of long texts cost what their layers see, in the log, in the fit, and in what reads it."""
    windows = Windows(512, num_windowed=5, num_full=1)
    truth = Fitted(0.01, 1e-5, 0.0, 1e-6)
    log = StepLog(tmp_path / "logs", "decode-0", windows)
    for number in range(200):
        one = Terms.of([(number * 40, 1, True)] * (1 + number % 5), windows)
        log.note(one, truth.seconds(one), float(number))
    log.close()
    out = tmp_path / "times.yaml"
    assert main(["sim", "calibrate", str(tmp_path / "logs"), "--out", str(out)]) == 0
    times = read_scenario(out).step_times()
    assert times.windows == windows
    one = Terms.of([(9_999, 1, True)] * 4, times.windows)
    assert times.seconds(one) == pytest.approx(0.01 + 4e-5 + 4e-6 * (10_000 + 5 * 512) / 6, rel=1e-3)
    other = StepLog(tmp_path / "logs", "decode-1")
    other.note(one, 0.1, 0.0)
    other.close()
    with pytest.raises(ConfigError, match="logs are of several models"):
        run([tmp_path / "logs"], None)


def test_the_newest_steps_are_kept_in_two_files(tmp_path: Path) -> None:
    log = StepLog(tmp_path, "prefill-3", most_bytes=8000)
    for number in range(2000):
        log.note(Terms(number + 1, 0, 1, 1.0), 0.5, 1.0)
    log.flush()
    steps = read_steps([tmp_path])
    numbers = sorted(step.terms.num_tokens for step in steps)
    assert numbers[-1] == 2000
    assert numbers == list(range(numbers[0], 2001))
    assert {step.worker for step in steps} == {"prefill-3"}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 16000
    assert 300 < len(steps) < 1000


def test_a_new_life_of_a_worker_begins_its_log_anew(tmp_path: Path) -> None:
    for seconds in (0.1, 0.01):
        log = StepLog(tmp_path, "decode-0", most_bytes=8000)
        for number in range(600):
            log.note(Terms(number + 1, 0, 1, 1.0), seconds, 1.0)
        log.close()
    assert {step.seconds for step in read_steps([tmp_path])} == {0.01}


def test_a_full_disk_ends_the_log_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(tmp_path, "decode-0")
    log._file.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the log closes it
    for _ in range(1000):
        log.note(Terms(1, 1, 1, 1.0), 0.5, 1.0)
    log.close()
    assert "no more steps are written" in caplog.text


@pytest.mark.parametrize(
    ("text", "named"), [("a,b\n1,2\n", "its first line must be"), (None, "cannot read"), ("", "its first line")]
)
def test_a_file_that_is_no_step_log_is_named(tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / f"x{SUFFIX}"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=named) as caught:
        read_steps([file])
    assert str(file) in caught.value.message


def test_an_empty_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.step_log: DIRECTORY"):
        read_steps([tmp_path])
