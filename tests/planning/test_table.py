"""The table of a group: rank 0's file, the same on all ranks, and never a tiling that may have other bits."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace

import pytest
import torch

from tests.planning import body
from tests.planning.test_cache import ENTRY, GPU
from tp_kernels import ParallelGroup
from tp_kernels.planning import Hardware, ShapeClass, TuningTable, cache, candidates, load

CPU = Hardware.of(torch.device("cpu"))
SHAPE = ShapeClass("linear_all_reduce", 1, 4, 2, 16, 64, 64)


def entry(hardware: Hardware, choice: int, **changes: int):
    tiling = asdict(candidates(hardware, SHAPE)[choice]) | changes
    return replace(ENTRY, tiling=tiling)


def test_all_ranks_have_the_table_of_rank_0(world, tmp_path):
    paths = [tmp_path / f"rank {rank}.json" for rank in range(2)]
    for choice, path in enumerate(paths, start=1):
        cache.add(path, CPU, {SHAPE: entry(CPU, choice)})
    expected = {SHAPE: candidates(CPU, SHAPE)[1]}, ()
    assert world(2).run(body.loaded, paths) == [expected, expected]


def test_rank_0_has_no_file_or_a_damaged_one(world, tmp_path):
    paths = [tmp_path / f"rank {rank}.json" for rank in range(2)]
    cache.add(paths[1], CPU, {SHAPE: entry(CPU, 1)})
    assert world(2).run(body.loaded, paths) == [({}, ())] * 2
    paths[0].write_text("{")
    found = world(2).run(body.loaded, paths)
    assert found[0] == found[1] and found[0][0] == {}
    assert "rank 0.json is ignored" in found[0][1][0]


@pytest.mark.parametrize(
    "change", [{"triton": "3.0.0"}, {"package": "0.0.9"}, {"device": "NVIDIA GH200"}]
)
def test_other_versions_and_devices_are_other_tables(world, tmp_path, change):
    path = tmp_path / "tilings.json"
    cache.add(path, replace(GPU, **change), {SHAPE: entry(GPU, 1)})
    assert world(2).run(body.loaded, [path] * 2, [GPU] * 2) == [({}, ())] * 2
    cache.add(path, GPU, {SHAPE: entry(GPU, 2)})
    found = world(2).run(body.loaded, [path] * 2, [GPU] * 2)
    assert found == [({SHAPE: candidates(GPU, SHAPE)[2]}, ())] * 2


def test_times_of_the_interpreter_are_not_for_a_gpu(world, tmp_path):
    path = tmp_path / "tilings.json"
    cache.add(path, CPU, {SHAPE: entry(CPU, 1)})
    assert world(2).run(body.loaded, [path] * 2, [GPU] * 2) == [({}, ())] * 2
    # Not even if somebody writes them into its table.
    cache.add(path, GPU, {SHAPE: entry(CPU, 1)})
    found = world(2).run(body.loaded, [path] * 2, [GPU] * 2)
    assert [tilings for tilings, _ in found] == [{}, {}]


@pytest.mark.parametrize("change", [{"block_k": 32}, {"programs": 7}, {"colour": 1}])
def test_only_candidates_are_used(world, tmp_path, change):
    """Another BLOCK_K would change bits."""
    path = tmp_path / "tilings.json"
    good = replace(SHAPE, rows=32)
    cache.add(path, CPU, {SHAPE: entry(CPU, 1, **change), good: entry(CPU, 1)})
    (first, notes), second = world(2).run(body.loaded, [path] * 2)
    assert first == {good: candidates(CPU, SHAPE)[1]} and second == (first, notes)
    assert len(notes) == 1 and "is no candidate and is ignored" in notes[0]


def test_ranks_with_other_devices_have_no_table(world, tmp_path):
    path = tmp_path / "tilings.json"
    other = replace(GPU, device="NVIDIA H100")
    for hardware in (GPU, other):
        cache.add(path, hardware, {SHAPE: entry(GPU, 1)})
    found = world(2).run(body.loaded, [path] * 2, [GPU, other])
    assert [tilings for tilings, _ in found] == [{}, {}]
    for _, (note,) in found:
        assert "rank 0 has NVIDIA H200 (sm_90)" in note and "rank 1 NVIDIA H100" in note


def test_only_rank_0_writes(world, tmp_path):
    paths = [tmp_path / f"rank {rank}.json" for rank in range(2)]
    assert world(2).run(body.saved, paths, {SHAPE: entry(CPU, 1)}) == ["", ""]
    assert cache.read(paths[0])[0] == {CPU: {SHAPE: entry(CPU, 1)}} and not paths[1].exists()


def test_rank_0_cannot_write(world, tmp_path):
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file" / "tilings.json", tmp_path / "rank 1.json"]
    for said in world(2).run(body.saved, paths, {SHAPE: entry(CPU, 1)}):
        assert "cannot be written" in said


def test_what_became_of_a_damaged_file_is_said_on_all_ranks(world, tmp_path):
    path = tmp_path / "tilings.json"
    path.write_text("")
    first, second = world(2).run(body.saved, [path] * 2, {SHAPE: entry(CPU, 1)})
    assert first == second and "moved to" in first


def test_lookup():
    tiling = candidates(GPU, SHAPE)[1]
    shape = ShapeClass("linear_reduce_scatter", 1, 2, 4, 128, 4096, 2048)
    table = TuningTable(GPU, {shape: tiling})
    half = torch.bfloat16

    def found(*changes, operation="linear_reduce_scatter", dtype=half, world=4):
        return table.tiling(operation, *changes, dtype, world)

    # Rows are those of all ranks.
    for numbers in ((512, 4096, 2048), (257, 2049, 1025), (300, 4000, 2000)):
        assert found(*numbers) == found(*numbers, dtype=torch.float16) == tiling
    for numbers in ((513, 4096, 2048), (256, 4096, 2048), (512, 4097, 2048), (512, 4096, 1024)):
        assert found(*numbers) is None
    for change in ({"operation": "linear_all_reduce"}, {"dtype": torch.float32}, {"world": 2}):
        assert found(512, 4096, 2048, **change) is None
    assert found(0, 4096, 2048) is None
    assert found(512, 4096, 2048, operation="copy_linear") is None


def test_table_does_not_change():
    tilings = {SHAPE: candidates(GPU, SHAPE)[0]}
    table = TuningTable(GPU, tilings)
    tilings.clear()
    assert len(table.tilings) == 1
    with pytest.raises(TypeError):
        table.tilings[SHAPE] = None
    with pytest.raises(FrozenInstanceError):
        table.tilings = {}


def test_one_rank(tmp_path):
    path = tmp_path / "tilings.json"
    cache.add(path, CPU, {SHAPE: entry(CPU, 1)})
    with ParallelGroup() as group:
        assert load(group, torch.device("cpu"), path).tilings == {SHAPE: candidates(CPU, SHAPE)[1]}
