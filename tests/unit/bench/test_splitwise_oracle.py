"""Splitwise's cluster as we simulate it: small ones by hand, and beside runs of the original where they are there."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks.splitwise_oracle.__main__ import main
from benchmarks.splitwise_oracle.compare import compare
from benchmarks.splitwise_oracle.machine import ROOM, TOKEN_BYTES
from benchmarks.splitwise_oracle.runs import Arrival, MachineSpec, RoleChange, Run, Times
from benchmarks.splitwise_oracle.times import Curve, Splitwise, read_profile
from benchmarks.splitwise_oracle.world import LINK_BYTES_PER_S, Outcome, simulate
from tandem.core.errors import ConfigError
from tandem.core.step_times import Terms

#: Beside the repository, where its users may lay data: see docs/simulator.md.
REFERENCE = Path(__file__).parents[4] / "shared" / "data" / "splitwise-oracle"
#: A prompt takes 1 ms a token, a step of sequences 10 ms and what each of them adds, 0.1 ms.
TIMES = Splitwise(prompt=Curve((0, 1000), (0.0, 1.0)), token=Curve((0, 1000), (0.010, 0.110)))


def run_of(arrivals: list[tuple[float, int, int]], *homes: str) -> Run:
    machines = [MachineSpec(number, "a card", home) for number, home in enumerate(homes)]
    return Run("a run", [Arrival(number, *each) for number, each in enumerate(arrivals)], machines, [], [])


def outcome_of(arrivals: list[tuple[float, int, int]], *homes: str) -> Outcome:
    return simulate(run_of(arrivals, *homes), {"a card": TIMES})


def times_of(arrivals: list[tuple[float, int, int]], *homes: str) -> list[tuple[float, float]]:
    """TTFT and E2E of each."""
    times = outcome_of(arrivals, *homes).times
    assert None not in times
    return [(each.ttft_s, each.e2e_s) for each in times if each]


def test_times_are_read_off_two_curves_and_a_step_of_both_kinds_takes_a_tenth_more() -> None:
    assert TIMES.seconds(Terms(500, 0, 0, 0)) == pytest.approx(0.5)
    assert TIMES.seconds(Terms(10, 10, 0, 0)) == pytest.approx(0.011)
    assert TIMES.seconds(Terms(510, 10, 0, 0)) == pytest.approx(1.1 * 0.51)
    assert TIMES.seconds(Terms(2000, 0, 0, 0)) == pytest.approx(2.0), "beyond its last point a curve goes on"


def test_a_profile_gives_medians_by_tokens_in_all(tmp_path: Path) -> None:
    profile = tmp_path / "profile.csv"
    rows = [(512, 1, 10, 1), (512, 1, 30, 3), (256, 2, 20, 2), (1024, 1, 40, 4)]
    lines = [f"bloom-176b,h,{size},{batch},8,{prompt},{token}" for size, batch, prompt, token in rows]
    lines += ["bloom-176b,h,512,1,4,999,999", "another,h,512,1,8,999,999"]
    profile.write_text(
        "\n".join(["model,hardware,prompt_size,batch_size,tensor_parallel,prompt_time,token_time", *lines])
    )
    times = read_profile(profile)["h"]
    assert times.prompt == Curve([512, 1024], [0.020, 0.040])
    assert times.token == Curve([512, 1024], [0.002, 0.004])


def test_a_machine_computes_a_prompt_and_then_all_tokens_at_once() -> None:
    ((ttft_s, e2e_s),) = times_of([(1.0, 100, 11)], "both")
    assert (ttft_s, e2e_s) == pytest.approx((0.1, 0.1 + 10 * 0.0101))


def test_an_arrival_ends_a_run_after_its_step_and_joins() -> None:
    first, second = times_of([(1.0, 100, 101), (1.115, 200, 2)], "both")
    # Steps from 1.1 on: the second of them ends at 1.1202, and with it the run.
    mixed_s = 1.1 * 0.201
    assert second == pytest.approx((1.1202 + mixed_s - 1.115, 1.1202 + mixed_s + 0.0102 - 1.115))
    assert first[1] == pytest.approx(0.1 + 2 * 0.0101 + mixed_s + 0.0102 + 96 * 0.0101)


def test_a_long_prompt_throws_out_who_generates() -> None:
    first, second = times_of([(1.0, 100, 11), (1.105, 3000, 2)], "both")
    assert second[0] == pytest.approx(1.1101 + 3.0 - 1.105), "alone, without the tenth"
    assert first[1] == pytest.approx(0.1 + 0.0101 + 3.0 + 0.0102 + 8 * 0.0101)


def test_prompts_that_do_not_fit_in_a_batch_wait_in_their_order() -> None:
    arrivals = [(1.0, 1500, 2), (1.1, 1500, 2), (1.2, 600, 2), (1.3, 100, 2)]
    ttfts = [ttft_s + at_s for (ttft_s, _), (at_s, _, _) in zip(times_of(arrivals, "both"), arrivals, strict=True)]
    second_s = 2.5 + 1.1 * 1.501  # beside the first one's token; the third is too much, and the fourth waits behind it
    assert ttfts == pytest.approx([2.5, second_s, second_s + 1.1 * 0.701, second_s + 1.1 * 0.701])


def test_a_split_request_pays_for_its_transfer() -> None:
    ((ttft_s, e2e_s),) = times_of([(1.0, 100, 11)], "prompt", "token")
    assert ttft_s == pytest.approx(0.1)
    assert e2e_s == pytest.approx(0.1 + 100 * TOKEN_BYTES / LINK_BYTES_PER_S + 10 * 0.0101)


def test_a_prompt_without_memory_starts_when_a_transfer_has_made_room() -> None:
    many = int(ROOM) - 1000
    (first_s, _), (second_s, _) = times_of([(1.0, many, 11), (1.5, 1000, 11)], "prompt", "token")
    assert second_s + 1.5 == pytest.approx(1.0 + first_s + many * TOKEN_BYTES / LINK_BYTES_PER_S + 1.0)


def test_a_machine_turns_mixed_where_prompts_are_too_many_and_goes_home_when_it_is_empty() -> None:
    outcome = outcome_of([(1.0, 4000, 2), (1.1, 4000, 2), (1.2, 4000, 2)], "prompt", "token")
    changes = [change.what for change in outcome.role_changes]
    assert changes == [(1, "token", "mixed"), (1, "mixed", "token")]
    assert outcome.role_changes[0].time_s == pytest.approx(1.2)


def test_a_request_for_which_no_machine_has_room_does_not_end() -> None:
    outcome = outcome_of([(1.0, int(ROOM) + 1, 2)], "both")
    assert outcome.times == [None]
    run = run_of([(1.0, int(ROOM) + 1, 2)], "both")
    found = compare(Run(run.name, run.arrivals, run.machines, [Times(1, 1, 1)], []), outcome)
    assert not found.is_within
    assert "request 0 did not end" in found.line()


def write(directory: Path, e2e_s: float = 0.201, roles: str = "") -> Path:
    """A folder of one run of one request: 100 tokens of prompt, 11 of output, on one machine."""
    (directory / "traces").mkdir(parents=True)
    (directory / "results").mkdir()

    def gz(name: str, text: str) -> None:
        (directory / name).write_bytes(gzip.compress(text.encode()))

    (directory / "summary.csv").write_text("run,trace\none,short\n")
    gz("instances.csv.gz", "run,instance,hardware,home\none,0,h,both\n")
    gz("roles.csv.gz", f"run,time,instance,home,from,to\n{roles}")
    gz("traces/short.csv.gz", "request_id,arrival_timestamp,prompt_size,token_size\n7,1.0,100,11\n")
    tbt_s = (e2e_s - 0.1) / 11
    gz("results/one.csv.gz", f"request_id,ttft,tbt,e2e\n7,0.1,{tbt_s:.9f},{e2e_s}\n")
    profile = "model,hardware,prompt_size,batch_size,tensor_parallel,prompt_time,token_time\n"
    profile += "bloom-176b,h,100,1,8,100,20\nbloom-176b,h,200,1,8,200,30\n"
    (directory / "profile.csv").write_text(profile)
    return directory


def run_main(directory: Path, *more: str) -> int:
    return main([str(directory), "--profile", str(directory / "profile.csv"), *more])


def test_a_folder_within_bounds_ends_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(write(tmp_path / "d", e2e_s=0.1 + 10 * 0.0101)) == 0
    line, total = capsys.readouterr().out.splitlines()
    assert line.startswith("one ")
    assert "1 of 1 requests within" in line
    assert total.startswith("1 of 1 runs")


@pytest.mark.parametrize(
    ("e2e_s", "roles", "told"),
    [
        (0.1 + 10 * 0.0101 + 3e-6, "", "0 of 1 requests within; worst E2E of request 7"),
        (0.1 + 10 * 0.0101, "one,5,0,both,token,mixed\n", "roles part at 5.000000 s (machine 0 to mixed)"),
    ],
)
def test_a_missed_bound_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], e2e_s: float, roles: str, told: str
) -> None:
    assert run_main(write(tmp_path / "d", e2e_s, roles)) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: (d / "summary.csv").unlink(), "summary.csv: No such file"),
        (lambda d: (d / "summary.csv").write_text("run\none\n"), "has no column 'trace'"),
        (lambda d: (d / "roles.csv.gz").write_bytes(b"no"), "roles.csv.gz is no whole gzip file"),
        (lambda d: (d / "profile.csv").write_text("model\n"), "has no two sizes of bloom-176b"),
        (
            lambda d: (d / "traces/short.csv.gz").write_bytes(
                gzip.compress(b"request_id,arrival_timestamp,prompt_size,token_size\n8,1.0,100,11\n")
            ),
            "have not the same requests",
        ),
        (
            lambda d: (d / "instances.csv.gz").write_bytes(
                gzip.compress(b"run,instance,hardware,home\none,0,another,both\n")
            ),
            "the profile has no another",
        ),
    ],
    ids=["no summary", "no column", "no gzip", "no profile", "other requests", "other hardware"],
)
def test_a_folder_that_is_wrong_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, told: str
) -> None:
    directory = write(tmp_path / "d")
    assert callable(change)
    change(directory)
    assert run_main(directory) == 2
    assert told in capsys.readouterr().err


def test_a_run_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(write(tmp_path / "d"), "--run", "two") == 2
    assert "has no run two; it has one" in capsys.readouterr().err


def test_the_first_request_to_part_is_named() -> None:
    run = run_of([(1.0, 100, 11), (2.0, 100, 11)], "both")
    wanted = [Times(0.1, 0.1, 5.0), Times(0.1, 0.1, 1.0)]
    got: list[Times | None] = [Times(0.1, 0.1, 5.5), Times(0.1, 0.1, 1.5)]
    found = compare(Run(run.name, run.arrivals, run.machines, wanted, []), Outcome(got, []))
    assert found.first_missed == 1, "its end is at 3 s, and that of the other at 6 s"


def test_hardware_that_the_profile_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="the profile has no a card"):
        simulate(run_of([(1.0, 100, 2)], "both"), {})


def test_a_missing_role_change_is_found() -> None:
    run = run_of([(1.0, 100, 2)], "both")
    change = RoleChange(2.0, 0, "token", "mixed")
    times = Times(0.1, 0.1, 0.2)
    wanted = Run(run.name, run.arrivals, run.machines, [times], [change])
    assert compare(wanted, Outcome([times], [])).first_role == change
    assert compare(wanted, Outcome([times], [change])).is_within


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["a-base-h100x2", "a-hhcap-1p1t", "e-code35-hh-8p5t", "e-conv45-hh-8p5t", "a-base-a100x2", "e-code45-hh-8p5t"],
)
def test_a_run_of_the_original_is_met_request_by_request(name: str) -> None:
    """One machine's batches; role changes; batches that throw out; transfers that wait for memory; two overloads."""
    if not REFERENCE.is_dir():
        pytest.skip("the runs of Splitwise's simulator are not beside the repository")
    assert main([str(REFERENCE), "--run", name]) == 0
