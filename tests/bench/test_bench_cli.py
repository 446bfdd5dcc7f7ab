"""`tp-kernels bench` as users run it, at the smallest sizes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from tests.bench.test_peers import environment_with_fakes
from tp_kernels import P2PChannel, Ranks, ShapeError, UnsupportedError, all_reduce
from tp_kernels.bench import block as work_block
from tp_kernels.bench import collectives as work_collectives
from tp_kernels.bench import linear as work_linear
from tp_kernels.bench.collectives import (
    OPS,
    buffers_of,
    gloo,
    ours,
    through_engine,
    through_python,
)
from tp_kernels.bench.p2p import Way, work_of
from tp_kernels.bench.pool import Pool
from tp_kernels.bench.slices import Work
from tp_kernels.bench.timing import Budget, Measurement, WrongResultError
from tp_kernels.cli import bench as cli_bench
from tp_kernels.cli import main
from tp_kernels.cli.app import app
from tp_kernels.cli.bench import _numbers


def bench(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def check_report(path, kind: str, cases: int) -> dict:
    found = json.loads(path.read_text())
    assert found["kind"] == kind and len(found["results"]) == cases
    for row in found["results"]:
        for name, sample in row["contestants"].items():
            assert sample["correct"] and sample["error"] <= 1.0 and sample["calls"] > 0, name
            assert 0 < sample["p10_us"] <= sample["median_us"] <= sample["p90_us"], name
    return found


def test_collectives(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PEER", "good")
    environment = environment_with_fakes(tmp_path)
    text = bench(
        *("collectives", "--quick", "--bytes", "1K,52", "--peers", environment),
        *("--world", "2,3", "--output", tmp_path / "out", "--json", tmp_path / "again.json"),
        *("--slice", "0.001"),
    )
    found = check_report(tmp_path / "out" / "collectives.json", "collectives", 12)
    assert found == json.loads((tmp_path / "again.json").read_text())
    for row in found["results"]:
        ran, case = set(row["contestants"]), row["case"]
        assert {"host", "raw"} <= ran
        assert ({"deepspeed", "openmpi"} <= ran) == (case["op"] == "all_reduce")
        even = case["bytes"] // 4 % case["world"] == 0
        assert ("gloo" in ran) == (even or case["op"] == "all_reduce"), row
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    assert names == {f"collectives-{op}-float32-{world}.png" for op in ops for world in (2, 3)}
    assert "all_gather float32, 3 ranks" in text and "not run" not in text
    assert found["settings"]["budget"] == {"rounds": 2, "seconds": 0.001}


def test_p2p(tmp_path):
    text = bench(
        *("p2p", "--bytes", "4,96K", "--slice", "0.001", "--rounds", 2, "--output", tmp_path)
    )
    found = check_report(tmp_path / "p2p.json", "p2p", 4)
    for row in found["results"]:
        case, facts, ran = row["case"], row["derived"], row["contestants"]
        assert set(ran) == {"pipeline", "channel", "gloo"}
        assert case["messages"] == {"latency": {4: 16}, "bandwidth": {4: 64, 96 << 10: 64}}[
            case["measure"]
        ].get(case["bytes"], 2)
        each = ran["gloo"]["median_us"] / case["messages"]
        assert facts["message_us"]["gloo"] == pytest.approx(each)
        assert facts["gigabytes_per_second"]["gloo"] == pytest.approx(case["bytes"] / each / 1e3)
        ratio = ran["gloo"]["median_us"] / ran["pipeline"]["median_us"]
        assert facts["gloo_over_pipeline"] == pytest.approx(ratio)
        assert facts["target"] == (
            10.0 if (case["measure"], case["bytes"]) == ("latency", 4) else None
        )
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "p2p-latency.png",
        "p2p-bandwidth.png",
    }
    assert "bandwidth, 2 ranks" in text and "latency up to 64 KiB: gloo / pipeline" in text


def test_messages_that_are_wrong(monkeypatch):
    """A message that arrives with another content ends the measurement."""
    with Ranks(2, threads=1) as ranks:
        pool = Pool(ranks, bind=False)
        case = {"measure": "latency", "world": 2, "bytes": 64, "messages": 4}
        spoiled = pool.contestant("spoiled", spoil_messages)
        with pytest.raises(WrongResultError, match="spoiled"):
            Measurement(case, Budget(1, 0.001), {}).run([spoiled])


def spoil_messages(group, case):
    """The last message of a call is another one."""
    channel, peer, out = P2PChannel(group), 1 - group.rank, torch.empty(16)
    last = case["messages"] // 2 - 1
    way = Way(lambda x, i: channel.send(x + (i == last), peer), lambda i: channel.recv(peer, out))
    return work_of(group, case, way)


@pytest.mark.parametrize("arguments", [("--bytes", "3"), ("--measure", "speed")])
def test_messages_that_are_refused(arguments):
    with pytest.raises((ShapeError, UnsupportedError)):
        bench("p2p", *arguments)


def test_linear(tmp_path):
    text = bench(
        *("linear", "--quick", "--hidden", 32, "--rows", "1,5", "--slice", "0.001"),
        *("--output", tmp_path, "--peers", environment_with_fakes(tmp_path)),
        *("--without", "openmpi"),
    )
    found = check_report(tmp_path / "linear.json", "linear", 16)
    for row in found["results"]:
        ran, case = set(row["contestants"]), row["case"]
        if row["derived"]["communicates"]:
            assert {"gemm", "comm", "serial", "host", "chunked", "reference"} <= ran
            assert row["derived"]["fused"] == "host" and "local" not in ran
        else:
            assert row["derived"]["fused"] == "local"
            assert not ran & {"comm", "serial", "host", "chunked", "reference"}
            assert (case["op"], case["pass"]) in {
                ("linear_all_reduce", "backward"),
                ("copy_linear", "forward"),
            }
        assert (row["derived"]["overhead_us"] is None) == (case["rows"] > 1)
    assert len(list(tmp_path.glob("linear-*.png"))) == 8
    assert "linear_reduce_scatter backward float32, 2 ranks" in text


def test_block(tmp_path):
    bench(*("block", "--quick", "--hidden", 64, "--rows", "1,5", "--output", tmp_path))
    found = check_report(tmp_path / "block.json", "block", 9)
    for row in found["results"]:
        assert set(row["contestants"]) == {
            *("host", "chunked", "reference"),
            *("1 process, 1 thread", "1 process, 2 threads"),
        }
    assert (tmp_path / "block-64-2.png").exists()


def test_compare_by_command_and_by_option(tmp_path):
    path = tmp_path / "a.json"
    bench(
        *("collectives", "--op", "all_reduce", "--dtype", "float32", "--bytes", "1K"),
        *("--rounds", 1, "--slice", "0.001", "--without", "deepspeed,openmpi,gloo"),
        *("--json", path),
    )
    for arguments in (("compare", path, path), ("--compare", path, path)):
        text = bench(*arguments)
        assert "2 rows: 0 faster, 0 slower" in text and "differ" not in text


@pytest.mark.parametrize("work", [work_block, work_collectives, work_linear])
def test_settings_are_the_usual_ones_but_for_the_options(work, monkeypatch):
    kind = work.__name__.rpartition(".")[2]
    found = []
    monkeypatch.setattr(cli_bench, "_run", lambda *arguments: found.append(arguments))
    bench(kind)
    bench(kind, "--quick")
    bench(kind, "--quick", "--world", "2,3", "--threads", 2, "--no-bind", "--slice", 0.5)
    bench(kind, "--rounds", 7)
    assert all(arguments[:2] == (kind, work.run) for arguments in found)
    seconds = work.Settings().budget.seconds
    assert [arguments[2] for arguments in found] == [
        replace(work.Settings(), worlds=[2]),
        replace(work.QUICK, worlds=[2]),
        replace(work.QUICK, worlds=[2, 3], threads=2, bind=False, budget=Budget(2, 0.5)),
        replace(work.Settings(), worlds=[2], budget=Budget(7, seconds)),
    ]


@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        (["collectives", "--op", "all_to_all"], "--op all_to_all: known are all_reduce"),
        (["collectives", "--bytes", "6"], "6 bytes are not a number of float32"),
        (["collectives", "--bytes", "4Q"], "--bytes 4Q: use positive numbers"),
        (["collectives", "--world", "1"], "measure 2 ranks or more"),
        (["collectives", "--world", ""], "--world: give at least one number"),
        (["collectives", "--peers", "/nonexistent"], "make bench-peers"),
        (["linear", "--without", "nccl"], "--without nccl: known are"),
        (["linear", "--dtype", "float32,float16"], "--dtype float32,float16: known are"),
        (["block", "--hidden", "100"], "no preset has hidden size 100"),
        (["compare", "/nonexistent.json", "/nonexistent.json"], "cannot be read"),
    ],
)
def test_mistakes_are_explained(arguments, explanation, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tp-kernels", "bench", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert explanation in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize("command", ["collectives", "linear", "block", "compare"])
def test_help_has_examples(command):
    assert f"tp-kernels bench {command}" in bench(command, "--help")


def test_numbers_have_units():
    assert _numbers("--bytes", "1K, 64,2m") == [1024, 64, 2 << 20]
    for text in ("", "0", "-4", "1.5K", "K"):
        with pytest.raises(ShapeError):
            _numbers("--bytes", text)


def test_a_wrong_result_of_the_engine_is_refused():
    """In real ranks: one that forgets another's summand from its second check on."""
    case = {"op": "all_reduce", "dtype": "float32", "world": 2, "bytes": 64}
    with Ranks(2, threads=1) as ranks:
        one = Pool(ranks, bind=False).contestant("host", forgetful)
        with pytest.raises(WrongResultError, match="host: wrong result on rank 1"):
            Measurement(case, Budget(1, 1e-6), {}).run([one])


def forgetful(group, case) -> Work:
    buffers = buffers_of(group, case)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        forgets = calls > 4 and group.rank == 1
        all_reduce(buffers.x, group, buffers.x.clone() if forgets else buffers.x)

    return buffers.work(call)


def test_every_contestant_writes_its_input():
    """In real ranks: without that the result is wrong."""
    builders = {
        "host": partial(ours, via=through_python),
        "raw": partial(ours, via=through_engine),
        "gloo": gloo,
    }
    with Ranks(2, threads=1) as ranks:
        pool = Pool(ranks, bind=False)
        for name, build in builders.items():
            for op in OPS:
                case = {"op": op, "dtype": "bfloat16", "world": 2, "bytes": 64}
                careless = pool.contestant(name, partial(without_writing, build=build))
                with pytest.raises(WrongResultError, match=f"{name}: wrong result"):
                    Measurement(case, Budget(1, 1e-6), {}).run([careless])


def without_writing(group, case, build) -> Work:
    work = build(group, case)
    work.before = lambda: None
    return work


def test_ranks_stay_on_their_cores():
    with Ranks(3, threads=1) as ranks:
        Pool(ranks)
        usable = sorted(os.sched_getaffinity(0))
        found = ranks.run(os.sched_getaffinity, 0)
        assert found == [{usable[rank % len(usable)]} for rank in range(3)]
