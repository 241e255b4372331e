"""From steps that were taken to a model of their times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli import main
from tandem.core.errors import ConfigError
from tandem.core.step_times import Fitted, Terms
from tandem.core.time_model import read_time_model
from tandem.core.windows import Windows
from tandem.sim.calibrate import Step, fit, fit_shared, read_steps, run, seconds_by_busy
from tandem.sim.cores import SharedCores
from tandem.sim.kernel import Kernel
from tandem.sim.scenario import read_scenario
from tandem.worker.step_log import SUFFIX, StepLog

TRUE = Fitted(0.004, of_token_s=2e-5, of_row_s=1e-5, of_read_s=3e-8, of_pair_s=1e-9)


def terms(rng: random.Random) -> Terms:
    rows, context, chunk = rng.randrange(64), rng.randrange(1, 8000), rng.choice((0, 0, 128, 512))
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


def steps_on_shared_cores(speeds: tuple[float, ...], noise: float = 0.0, until_s: float = 20.0) -> list[Step]:
    """Of as many workers as there are speeds, which rest now and then."""
    kernel, rng, found = Kernel(0.0), random.Random(3), list[Step]()
    cores = SharedCores(kernel, speeds)

    def begin(worker: str) -> None:
        one, began_s = terms(rng), kernel.now_s

        def end() -> None:
            found.append(Step(worker, one, kernel.now_s - began_s, began_s))
            if kernel.now_s < until_s:
                kernel.after(rng.choice((0.0, 0.0, 0.0, 0.2)), lambda: begin(worker))

        cores.run(TRUE.seconds(one) * (1 + rng.uniform(-noise, noise)), end)

    for number in range(len(speeds)):
        begin(f"decode-{number}")
    kernel.run_all()
    return found


@pytest.mark.long
def test_how_workers_slow_each_other_down_is_found_beside_what_steps_take_alone() -> None:
    speeds = 1.0, 0.9, 0.6, 0.45
    found = fit_shared(steps_on_shared_cores(speeds, noise=0.1))
    assert found.speeds == pytest.approx(speeds, rel=0.05)
    rng = random.Random(2)
    for one in (terms(rng) for _ in range(50)):
        assert found.times.seconds(one) == pytest.approx(TRUE.seconds(one), rel=0.05)
    assert found.median_off < 0.06


def steps_in_turn(of_each: tuple[int, ...], speeds: dict[int, float], num_workers: int) -> list[Step]:
    """Now so many workers compute at once, now so many: all of them from the same moment to the same."""
    rng, found, now_s = random.Random(4), list[Step](), 0.0
    for number in range(600):
        num = of_each[number % len(of_each)]
        one = terms(rng)
        seconds = TRUE.seconds(one) / speeds[num]
        found += [Step(f"decode-{each}", one, seconds, now_s) for each in rng.sample(range(num_workers), num)]
        now_s += seconds + 0.001
    return found


@pytest.mark.long
def test_of_numbers_of_workers_that_never_computed_at_once_nothing_is_made_up() -> None:
    found = fit_shared(steps_in_turn((1, 2), {1: 1.0, 2: 0.6}, num_workers=4))
    assert found.speeds == pytest.approx((1.0, 0.6), rel=0.01), "more than two share what is left"
    found = fit_shared(steps_in_turn((1, 3), {1: 1.0, 3: 0.5}, num_workers=4))
    assert found.speeds == pytest.approx((1.0, 0.75, 0.5), rel=0.01), "two are between one and three"


def test_steps_of_which_none_was_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="no other worker computed; add a load of one client"):
        fit_shared(steps_in_turn((2,), {2: 0.6}, num_workers=2))


def test_of_each_step_the_seconds_are_counted_by_how_many_computed() -> None:
    one = Terms(1, 1, 1, 1.0)
    steps = [Step("a", one, 4.0, 10.0), Step("b", one, 1.0, 11.0), Step("b", one, 3.0, 13.0)]
    assert seconds_by_busy(steps).tolist() == [[2.0, 2.0], [0.0, 1.0], [2.0, 1.0]]


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
def test_the_command_writes_speeds_of_shared_cores_as_a_scenario_reads_them(tmp_path: Path) -> None:
    speeds = 1.0, 0.7
    logs = {name: StepLog(tmp_path / "logs", name) for name in ("decode-0", "decode-1", "decode-2")}
    last_s = 1000.0  # a third worker computes by itself
    alone = [Step("decode-2", one.terms, one.seconds, last_s + number) for number, one in enumerate(steps_of(TRUE, 30))]
    for step in [*steps_on_shared_cores(speeds), *alone]:
        logs[step.worker].note(step.terms, step.seconds, step.began_s)
    for log in logs.values():
        log.close()
    out = tmp_path / "times.yaml"
    assert main(["sim", "calibrate", str(tmp_path / "logs"), "--shared-cores", "--out", str(out)]) == 0
    scenario = read_scenario(out)
    assert scenario.shape().speeds == pytest.approx(speeds, rel=0.02)
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
