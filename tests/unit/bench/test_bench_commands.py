"""`tandem bench` as it is called, against a router with scripted workers and against peers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from bench_peers import END, REFUSED, STREAM, Peer, chunk, event, serving, usage, well_behaved

from tandem import cli
from tandem.bench import commands
from tandem.bench.report import json_file, results
from tandem.bench.settling import Settling
from tests.support.imports import loaded_by
from tests.support.router_site import Site, opened_site, write_checkpoint

pytestmark = pytest.mark.long

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:46.{n}00,{80 + n},{24 + n}\n" for n in range(8)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    with opened_site(checkpoint, {"transport.lease_s": 10.0}) as opened:
        yield opened


@contextlib.contextmanager
def in_thread(handler: Callable[..., Any]) -> Iterator[str]:
    """Serve in a loop of its own, as the command runs one in this thread; the URL."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with serving(handler) as url:
            stopped = asyncio.Event()
            ready.set_result((url, asyncio.get_running_loop(), stopped))
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, loop, stopped = ready.result(5)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()


def bench(*arguments: object) -> int:
    return cli.main(["bench", *(str(argument) for argument in arguments)])


def load(url: str, *arguments: object, num: int = 6) -> tuple[object, ...]:
    return ("--url", url, "--input-len", 20, "--output-len", 5, "--num-requests", num, *arguments)


def test_a_run_against_the_router(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "run.json"
    given = load(site.url, "--concurrency", 2, "--slo-ttft", "5s", "--slo-tpot", "5000ms", "--json", path, "--records")
    assert bench("run", *given) == 0
    said = capsys.readouterr().out
    assert "6 of 6 succeeded" in said
    assert "100.0% of the requests kept the SLO" in said
    for name in ("TTFT", "TPOT", "ITL", "E2E", "first to second token"):
        assert re.search(rf"{name} +[\d.,]+ +[\d.,]+ +[\d.,]+ +[\d.,]+", said), name
    # The router shares this process, and its CPU time counts as the generator's.
    assert [line for line in said.splitlines() if "note:" in line and "the generator" not in line] == []
    content = results.read(path)
    assert (content["kind"], content["server"]["model"]) == ("run", "toy")
    assert content["options"]["slo_tpot"] == 5.0
    assert content["machine"]["num_cores"] >= 1
    assert content["versions"]["tandem"]
    (run,) = content["runs"]
    figures = run["figures"]
    assert figures["num_output_tokens"] == 30
    assert figures["num_input_tokens"] == 120
    assert figures["token_sources"] == {"usage": 6}
    assert len(run["records"]) == len(run["digests"]) == 6
    assert all(len(record["event_s"]) == 5 for record in run["records"])
    assert run["generator"]["cpu_s"] > 0
    starts = [command.start for command in site.prefill.received if command.WhichOneof("command") == "start"]
    assert {len(start.prompt_ids) for start in starts[-6:]} == {20}
    assert all(start.sampling.ignore_eos and start.sampling.temperature == 0 for start in starts[-6:])


def test_a_poisson_run_of_a_trace(site: Site, checkpoint: Path, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.csv", tmp_path / "run.json"
    trace.write_text(AZURE)
    given = ("--url", site.url, "--trace", trace, "--limit", 5, "--scale-lengths", 0.25, "--rate", 200)
    assert bench("run", *given, "--tokenizer", checkpoint, "--json", path) == 0
    content = results.read(path)
    assert (content["options"]["trace"], content["options"]["tokenizer"]) == ("trace.csv", "toy")
    assert "input_len" not in content["options"]
    (run,) = content["runs"]
    assert run["shape"] == {"name": "poisson", "concurrency": None, "rate": 200}
    assert run["figures"]["num_requests"] == 5
    assert run["figures"]["num_input_tokens"] == sum(round((80 + n) / 4) for n in range(5))
    assert run["figures"]["num_output_tokens"] == sum(round((24 + n) / 4) for n in range(5))
    assert run["figures"]["lateness_s"]["num"] == 5
    assert "records" not in run


def test_a_trace_is_replayed_at_its_own_times(site: Site, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.csv", tmp_path / "run.json"
    trace.write_text(AZURE)
    given = ("--url", site.url, "--trace", trace, "--scale-lengths", 0.1, "--scale-time", 0.25)
    assert bench("run", *given, "--json", path, "--records") == 0
    (run,) = results.read(path)["runs"]
    assert run["shape"]["name"] == "trace"
    assert [record["planned_s"] for record in run["records"]] == pytest.approx([n / 40 for n in range(8)], abs=1e-5)


async def tells_what_it_had(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    """A block of all prompts but one."""
    num = len(body["prompt"])
    writer.write(STREAM + chunk(event(finish_reason="length")) + chunk(usage(1, num, 0 if num == 1200 else 512)) + END)
    return True


def test_blocks_that_repeat_are_sent_alike_and_what_is_too_long_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "run.json"
    rows = [(1200, [1, 2, 3]), (9000, [1, 2, *range(10, 26)]), (600, [1, 5])]
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": n, "input_length": num, "output_length": 6, "hash_ids": ids})
            for n, (num, ids) in enumerate(rows)
        )
    )
    peer = Peer(tells_what_it_had)
    with in_thread(peer) as url:
        given = ("--url", url, "--trace", trace, "--concurrency", 1, "--warmup", 0, "--json", path)
        assert bench("run", *given) == 1
        assert "cut them with --cut" in capsys.readouterr().err
        assert bench("run", *given, "--format", "mooncake", "--cut") == 0
    first, second, third = (body["prompt"] for body in peer.bodies[-3:])
    assert [len(prompt) for prompt in (first, second, third)] == [1200, 4090, 600]
    assert first[:1024] == second[:1024]
    assert first[:512] == third[:512] != second[512:1024]
    said = capsys.readouterr().out
    assert "note: 1 of 3 requests are cut to 4,096 tokens: 54.5% of the prompt tokens and 100.0% of" in said
    assert "1,024 of 5,890 prompt tokens, 17.4%" in said
    assert "66.7% of 1,536 that were there before" in said
    content = results.read(path)
    assert content["cut"]["num_cut"] == 1
    assert content["runs"][0]["figures"]["cache"]["num_repeated_tokens"] == 1024 + 512


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--concurrency", "1", "--url", "http://127.0.0.1:9"), "nobody answers at http://127.0.0.1:9"),
        (("--concurrency", "1", "--url", "nonsense"), "no URL of a server"),
        (("--concurrency", "1", "--url", "http://127.0.0.1:99999"), "no URL of a server"),
        (("--concurrency", "1", "--url", "http://127.0.0.1:9", "--json", "/proc/run.json"), "cannot be written"),
        (("--trace", "/none.csv"), "cannot read the trace /none.csv: No such file or directory"),
        (("--vocab", "0:1", "--tokenizer", "CHECKPOINT"), "--vocab names no ids but special ones"),
        (("--concurrency", "1", "--model", "other"), "it serves: toy, toy/alias"),
        (("--concurrency", "1", "--input-len", "300"), "longer than the context of 256"),
        (("--concurrency", "1", "--vocab", "9999:10000"), "outside the vocabulary"),
        (("--concurrency", "1", "--api", "chat"), "--api says something of conversations: give --conversations"),
        (("--concurrency", "1", "--turns", "3"), "--turns says something of conversations"),
        (("--concurrency", "1", "--think-time", "1s"), "--think-time says something of conversations"),
        (("--concurrency", "1", "--limit", "3"), "--limit says something of a trace: give --trace"),
        (("--rate", "1", "--speed", "2"), "--scale-time (or --speed) says something of a trace"),
        (("--trace", "T", "--input-len", "9"), "--input-len does not go with --trace, which has its own lengths"),
        (("--trace", "T", "--output-len", "9"), "--output-len does not go with --trace"),
        (("--trace", "T", "--limit", "3", "--num-requests", "2"), "--num-requests does not go with --limit"),
        (("--trace", "T", "--rate", "9", "--speed", "2"), "of a trace's own times, and --rate has others: leave it"),
        (("--trace", "T", "--concurrency", "1", "--scale-time", "2"), "(or --speed) says something of a trace's own"),
        (("--concurrency", "1", "--records"), "--records says something of the file of --json"),
        (("--concurrency", "1", "--conversations", "2", "--scale-lengths", "0.5"), "does not go with --conversations"),
        ((), "--rate or --concurrency"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    site: Site, checkpoint: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = tuple(str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments)
    lengths = () if "--trace" in arguments else ("--input-len", 20, "--output-len", 2)
    assert bench("run", "--url", site.url, *lengths, *arguments) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_search_takes_no_times_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    assert bench("goodput", "--url", "http://127.0.0.1:9", "--trace", trace, "--speed", 2) == 1
    assert "--scale-time (or --speed) says something of a trace's own times, and a search" in capsys.readouterr().err


def test_a_server_that_wants_a_key_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right-key-of-some-length\n")
    keys.chmod(0o600)
    with opened_site(checkpoint, {"http.api_keys_file": str(keys)}, with_workers=False) as guarded:
        assert bench("run", *load(guarded.url, "--concurrency", 1)) == 1
        assert "wants an API key; put it into TANDEM_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("TANDEM_API_KEY", "wrong")
        assert bench("run", *load(guarded.url, "--concurrency", 1)) == 1
        assert "takes another API key" in capsys.readouterr().err


def every_third_refused() -> Peer:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body["max_tokens"] == 1 or len(peer.bodies) % 3:
            return await well_behaved(body, writer)
        writer.write(REFUSED)
        return True

    peer = Peer(answer)
    return peer


def test_failures_are_counted_apart_and_in_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    with in_thread(every_third_refused()) as url:
        assert bench("run", *load(url, "--concurrency", 1, "--warmup", 0, "--json", path, num=9)) == 1
    said = capsys.readouterr().out
    assert "6 of 9 succeeded" in said
    assert "note: 3 failed: http_429" in said
    figures = results.read(path)["runs"][0]["figures"]
    assert figures["num_failed"] == {"http_429": 3}
    assert figures["ttft_s"]["num"] == 6


def test_what_a_reader_must_know_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        events = chunk(event("abc")), chunk(event("d", "stop")), chunk(usage(4, 99)), chunk(b"data: [DONE]\n\n")
        writer.write(STREAM + b"".join(events) + b"0\r\n\r\n")
        return True

    with in_thread(Peer(answer)) as url:
        assert bench("run", *load(url, "--concurrency", 1)) == 0
    said = capsys.readouterr().out
    assert "6 requests got fewer tokens than they asked for" in said
    assert "6 prompts have another length" in said
    assert "an event brings 2.00 tokens" in said


@pytest.mark.processes
def test_ctrl_c_ends_a_run_in_order(tmp_path: Path) -> None:
    is_hanging = threading.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if len(peer.bodies) > 5:
            if len(peer.bodies) == 7:  # both clients hang; all before were answered
                is_hanging.set()
            await asyncio.sleep(60)
        return await well_behaved(body, writer)

    peer, path = Peer(answer), tmp_path / "run.json"
    with in_thread(peer) as url:
        given = load(url, "--concurrency", 2, "--warmup", 0, "--json", path, num=50)
        command = [sys.executable, "-m", "tandem.cli", "bench", "run", *map(str, given)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert is_hanging.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "note: partial: the run was stopped before its end" in out
    assert "Traceback" not in err
    content = results.read(path)
    assert content["was_interrupted"]
    assert content["runs"][0]["is_partial"]
    assert content["runs"][0]["figures"]["num_succeeded"] == 4
    assert content["runs"][0]["figures"]["num_failed"] == {"interrupted": 2}


class RefusesWhenBusy(Peer):
    """Serves `num_places` at a time, each in a twentieth of a second, and refuses the others."""

    def __init__(self, num_places: int) -> None:
        super().__init__(self.serve)
        self.num_places = num_places

    async def serve(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if self.num_under_way > self.num_places:
            writer.write(REFUSED)
            return True
        await asyncio.sleep(0.05)
        return await well_behaved(body, writer)


def test_goodput_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, peer = tmp_path / "goodput.json", RefusesWhenBusy(num_places=6)
    given = ("--slo-ttft", "10s", "--slo-tpot", "10s", "--precision", 1.5, "--start-rate", 20, "--json", path)
    with in_thread(peer) as url:
        assert bench("goodput", *load(url, *given, num=30)) == 0
    content = results.read(path)
    found = content["search"]["goodput_per_s"]
    assert 5 <= found < 200  # six places of 50 ms and more: 120 a second at the most
    assert found < content["search"]["failed_from_per_s"] <= found * 1.5
    assert f"goodput: {found:.3f} requests/s" in capsys.readouterr().out
    good = [run for run in content["runs"] if not run["is_partial"]]
    assert max(run["shape"]["rate"] for run in good) == found
    assert all(run["figures"]["goodput"]["share"] >= 0.9 for run in good)
    assert len(good) < len(content["runs"]), "a probe that has failed is not waited for"
    measured = [tuple(body["prompt"]) for body in peer.bodies[1:]]  # after the one to try
    assert len(set(measured)) == len(measured), "a probe finds nothing of another in a prefix cache"
    assert bench("plot", path, "--output", tmp_path / "search") == 0


def test_where_no_rate_will_do_the_search_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(Peer(well_behaved)) as url:
        given = ("--slo-ttft", "0.001ms", "--start-rate", 100, "--max-probes", 2)
        assert bench("goodput", *load(url, *given, num=10)) == 1
    assert "no rate down to 50.000 /s kept the SLO" in capsys.readouterr().out


def test_a_search_that_ran_out_of_probes_says_that_more_may_go(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--slo-ttft", "60s", "--slo-tpot", "60s", "--start-rate", 100, "--max-probes", 2)
    with in_thread(Peer(well_behaved)) as url:
        assert bench("goodput", *load(url, *given, num=4)) == 0
    said = capsys.readouterr().out
    assert "goodput: 200.000 requests/s" in said
    assert "(--max-probes): a higher rate may keep the SLO too" in said


@pytest.mark.parametrize("num", [3, 6])  # while it is seen how fast it is alone, and in the first probe
def test_a_search_that_is_interrupted_in_its_beginning_claims_nothing(
    num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if len(peer.bodies) == num:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await well_behaved(body, writer)

    peer = Peer(answer)
    with in_thread(peer) as url:
        given = load(url, "--start-rate", 1, "--warmup", 0, num=50)
        assert bench("goodput", *given) == 130
    said = capsys.readouterr().out
    assert "note: partial: the search was stopped before its end" in said
    assert "kept the SLO" not in said.partition("note:")[2], "nothing is known of any rate"


class GoesOnWithWhatWasBrokenOff(Peer):
    """For `busy_s` after a request was broken off, all answers take longer."""

    def __init__(self, busy_s: float) -> None:
        super().__init__(self.serve)
        self.busy_s, self.until_s = busy_s, 0.0
        self.asked: list[tuple[int, bool]] = []  # the length of each prompt, and whether it came while that lasted

    async def serve(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        now_s = time.monotonic()
        self.asked.append((len(body["prompt"]), now_s < self.until_s))
        if len(body["prompt"]) == 20 and len(self.asked) == 5:  # the first of the first probe
            self.until_s = now_s + self.busy_s
        if self.asked[-1][1]:
            await asyncio.sleep(0.3)
        return await well_behaved(body, writer)


def test_a_probe_waits_until_the_server_is_done_with_the_one_that_was_broken_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--slo-ttft", "0.001ms", "--start-rate", 100, "--max-probes", 2, "--warmup", 0)
    with in_thread(peer := GoesOnWithWhatWasBrokenOff(1.0)) as url:
        assert bench("goodput", *load(url, *given, num=10)) == 1
    assert [num for num, _ in peer.asked[:5]] == [1, 16, 16, 16, 20]
    assert [is_busy for num, is_busy in peer.asked if num == 16][3:5] == [True] * 2, "it was asked while it was busy"
    second = max(at for at, (num, _) in enumerate(peer.asked) if num == 16)
    assert [is_busy for num, is_busy in peer.asked[second:]] == [False] * (len(peer.asked) - second)
    assert "still busy" not in capsys.readouterr().err


def test_a_server_that_stays_busy_is_not_waited_for_without_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "Settling", functools.partial(Settling, limit_s=0.5))
    given = ("--slo-ttft", "0.001ms", "--start-rate", 100, "--max-probes", 2, "--warmup", 0)
    with in_thread(GoesOnWithWhatWasBrokenOff(60.0)) as url:
        assert bench("goodput", *load(url, *given, num=10)) == 1
    assert "note: the server is still busy 0.5 s after a probe was broken off" in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_runs(site: Site, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("runs")
    first, second = directory / "a.json", directory / "b.json"
    given = ("run", *load(site.url, "--concurrency", 2))
    assert bench(*given, "--label", "ours", "--json", first) == 0
    assert bench(*given, "--json", second) == 0
    return first, second


def changed(path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a result of which something is different."""
    content = results.read(path)
    change(content)
    other = path.with_name(name)
    json_file.write(other, content)
    return other


def set_throughput(value: float) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["runs"][0]["figures"]["output_tokens_per_s"] = value

    return change


def test_ratios_are_the_first_over_the_second(two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    firsts = [changed(two_runs[0], f"a{n}.json", set_throughput(value)) for n, value in enumerate((30, 90, 31))]
    second = changed(two_runs[1], "b1.json", set_throughput(62.0))
    assert bench("compare", ",".join(map(str, firsts)), second) == 0
    said = capsys.readouterr().out
    assert re.search(r"ours +b1 +ratio", said)
    assert re.search(r"output tokens/s +31\.000 +62\.000 +0\.500", said)
    assert re.search(r"TTFT p99, ms( +[\d.,]+){3}", said)
    assert "differ" not in said


def test_equal_and_other_outputs_are_told_apart(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("compare", *two_runs)
    assert "note: 6 of 6 greedy outputs are the same text" in capsys.readouterr().out
    other = changed(two_runs[1], "c.json", lambda content: content["runs"][0]["digests"].__setitem__(0, "x"))
    bench("compare", two_runs[0], other)
    assert "note: 5 of 6 greedy outputs are the same text" in capsys.readouterr().out


def test_other_loads_and_machines_are_noted(two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def change(content: dict[str, Any]) -> None:
        content["options"]["output_len"] = 7
        content["machine"]["num_cores"] = 99
        content["was_interrupted"] = True

    assert bench("compare", two_runs[0], changed(two_runs[1], "d.json", change)) == 0
    said = capsys.readouterr().out
    assert "the loads differ in output_len: 5 and 7" in said
    assert "the machines differ" in said
    assert "is partial" in said
    assert "greedy" not in said


def test_plots_are_written(two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labelled = changed(two_runs[0], "e.json", lambda content: content["options"].update(label="<b>&ours"))
    stem = tmp_path / "new" / "plots"
    assert bench("plot", labelled, two_runs[1], "--output", stem) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["plots-latency.png", "plots-itl.png", "plots.html"]
    for path in paths[:2]:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = paths[2].read_text()
    assert page.count("<svg") == 2
    assert "<h2>&lt;b&gt;&amp;ours</h2>" in page
    assert "6 of 6" in page


def test_a_simulation_is_compared_with_a_measurement_and_drawn_beside_it(
    two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, found = tmp_path / "planned.yaml", tmp_path / "planned.json"
    scenario.write_text("load: {requests: 30, rate: 10, input_median: 200, output_median: 20}\n")
    assert cli.main(["sim", "run", str(scenario), "--json", str(found)]) == 0
    figures = json.loads(found.read_text())["runs"][0]["figures"]
    measured = json.loads(two_runs[0].read_text())["runs"][0]["figures"]
    assert figures.keys() == measured.keys()
    capsys.readouterr()
    assert bench("compare", found, two_runs[0]) == 0
    said = capsys.readouterr().out
    rows = {" ".join(words[:-3]): words[-3:] for words in map(str.split, said.splitlines()) if len(words) > 3}
    for name, attribute, statistic in (("TTFT p50, ms", "ttft_s", "p50"), ("ITL p99, ms", "itl_s", "p99")):
        ours, others = (side[attribute][statistic] * 1e3 for side in (figures, measured))
        assert float(rows[name][0].replace(",", "")) == pytest.approx(ours, abs=0.06)
        assert float(rows[name][2].replace(",", "")) == pytest.approx(ours / others, rel=0.01, abs=0.001)
    assert "planned is simulated" in said
    assert "the loads differ" not in said
    assert "the machines differ" not in said
    assert bench("plot", found, two_runs[0], "--output", tmp_path / "both") == 0
    page = (tmp_path / "both.html").read_text()
    assert "planned, simulated, " in page
    assert "30 of 30" in page
    assert "planned p50" in page, "the legend"


def test_two_simulations_differ_in_what_their_scenarios_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for rate in (5, 10):
        (tmp_path / "s.yaml").write_text(f"load: {{requests: 10, rate: {rate}, output_median: 5}}\n")
        files.append(tmp_path / f"{rate}.json")
        assert cli.main(["sim", "run", str(tmp_path / "s.yaml"), "--json", str(files[-1])]) == 0
    capsys.readouterr()
    assert bench("compare", *files) == 0
    said = capsys.readouterr().out
    assert said.count("the loads differ") == 1
    assert "the loads differ in rate: 5.0 and 10.0" in said


def test_files_that_are_not_ours_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign, broken = tmp_path / "foreign.json", tmp_path / "broken.json"
    foreign.write_text(json.dumps({"format": "other"}))
    broken.write_text("{")
    assert bench("compare", foreign, foreign) == 1
    assert "no file of `tandem bench`" in capsys.readouterr().err
    assert bench("plot", broken) == 1
    assert "cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--concurrency", "0"),
        ("run", "--concurrency", "1", "--rate", "1"),
        ("run", "--rate", "nan"),
        ("run", "--slo-ttft", "3"),
        ("run", "--vocab", "9:3"),
        ("run", "--speed", "0"),
        ("run", "--speed", "2", "--scale-time", "0.5"),
        ("goodput", "--share", "90"),
        ("goodput", "--precision", "1"),
        (),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("name", ["run", "goodput", "compare", "plot", "overload", "cache"])
def test_each_subcommand_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(name, "--help")
    assert f"tandem bench {name}" in capsys.readouterr().out.split("example:")[1]


@pytest.mark.processes
def test_help_imports_nothing_heavy() -> None:
    heavy = ("tandem.bench.commands", "rich", "uvloop", "matplotlib", "tokenizers")
    assert loaded_by("from tandem import cli; cli.make_parser()", *heavy) == []
