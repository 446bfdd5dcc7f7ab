"""Sharded checkpoints: written by some ranks, read by others, equal to the bit; broken ones do not load."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.layers.state_model import Everything, equal, unsplit
from tp_kernels.comm import ParallelGroup, Ranks, ShapeError, TpKernelsError, UnsupportedError
from tp_kernels.layers import (
    as_dtensor,
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    materialize,
    placements,
    save_sharded,
    sharded_state_dict,
)

NAMES = [name for name in unsplit(torch.float32) if "_extra" not in name and "running" not in name]


def moments(seed: int, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Unsplit optimizer state of one parameter, the same in every process."""
    draw = torch.Generator().manual_seed(seed + 100 * NAMES.index(name))
    return {
        "exp_avg": torch.randn(shape, generator=draw),
        "exp_avg_sq": torch.rand(shape, generator=draw),
    }


def optimizer_of(model: nn.Module, seed: int | None) -> torch.optim.AdamW:
    """AdamW with two groups; with a seed, as if it had made that many steps."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.5
    )
    placed = {id(p): place for _, p, place in placements(model)}
    if seed is not None:
        optimizer.param_groups[0]["lr"] = 0.01 * seed
        for name, parameter in model.named_parameters():
            place = placed.get(id(parameter))
            shape = tuple(parameter.shape) if place is None else place.shape
            state: dict[str, Any] = {"step": torch.tensor(float(seed))}
            for key, whole in moments(seed, name, shape).items():
                # Moments stay fp32 whatever the parameter is.
                state[key] = (whole if place is None else place.slice(whole)).clone()
            optimizer.state[parameter] = state
    return optimizer


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    placed = {id(p): place for _, p, place in placements(model)}
    assert [group["lr"] for group in optimizer.param_groups] == [0.01 * seed, 0.5]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    names = dict(model.named_parameters())
    assert len(optimizer.state) == len(names)
    for name, parameter in names.items():
        place = placed.get(id(parameter))
        shape = tuple(parameter.shape) if place is None else place.shape
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(state["step"], torch.tensor(float(seed)))
        for key, whole in moments(seed, name, shape).items():
            assert state[key].dtype == torch.float32
            assert torch.equal(state[key], whole if place is None else place.slice(whole)), name


def write(directory: Path, dtype: torch.dtype, seed: int, tied: bool = True) -> None:
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, dtype, tied)
        load_full_state_dict(model, unsplit(dtype, seed, tied))
        save_sharded(directory, model, optimizer_of(model, seed))


def read(directory: Path, dtype: torch.dtype, seed: int, tied: bool = True) -> None:
    """Into a new optimizer on an odd number of ranks, into one with other state on an even one."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, dtype, tied)
        optimizer = optimizer_of(model, None if group.size % 2 else 77)
        if optimizer.state:
            optimizer.state[model.row.bias]["max_exp_avg_sq"] = torch.ones(6)
        load_sharded(directory, model, optimizer)
        assert equal(full_state_dict(model), unsplit(dtype, seed, tied))
        assert (model.head.weight is model.embed.weight) == tied
        check_optimizer(model, optimizer, seed)
        if dtype == torch.float32:  # torch's step wants moments of the parameter's dtype
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert optimizer.state[model.row.bias]["step"] == seed + 1


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_any_number_of_ranks_reads(world, tmp_path, saved):
    dtype = (torch.bfloat16, torch.float64, torch.float32, torch.float64)[saved - 1]
    world(saved).run(write, tmp_path, dtype, saved)
    for size in (1, 2, 3, 4):
        world(size).run(read, tmp_path, dtype, saved)


def read_other(directory: Path, tied: bool) -> list[str]:
    """Reading into a model that ties its head, or not, unlike the one that was saved."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float32, tied)
        load_sharded(directory, model)
        state = full_state_dict(model)
        return [
            name
            for name, value in unsplit(torch.float32).items()
            if name.endswith("weight") and not torch.equal(value, state[name])
        ]


def test_tied_and_not(world, tmp_path):
    world(2).run(write, tmp_path, torch.float32, 0, True)
    assert world(3).run(read_other, tmp_path, False) == [[]] * 3


def stored_once(directory: Path) -> int:
    """Bytes of what is stored for the model, by the metadata."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    total = 0
    for what in metadata.state_dict_metadata.values():
        for chunk in getattr(what, "chunks", ()):
            total += torch.Size(chunk.sizes).numel() * what.properties.dtype.itemsize
    return total


def write_model(directory: Path) -> None:
    with ParallelGroup(timeout=30, provider="none") as group:
        save_sharded(directory, Everything(group, torch.float32, tied=False))


def test_elements_are_stored_once(world, tmp_path):
    """Also those of KV heads that several ranks hold, and of whole parameters."""
    state = unsplit(torch.float32, tied=False)
    del state["packed._extra_state"], state["counting._extra_state"]  # objects
    expected = sum(tensor.nbytes for tensor in state.values())
    for size in (1, 3, 4):
        world(size).run(write_model, tmp_path / str(size))
        assert stored_once(tmp_path / str(size)) == expected


def plain_dcp(directory: Path, saving: str) -> None:
    """`sharded_state_dict` with torch's own save and load, nested as users nest it."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float64)
        state = {"app": {"model": sharded_state_dict(model), "step": 4}}
        if saving:
            load_full_state_dict(model, unsplit(torch.float64))
            model.packed.set_extra_state(torch.tensor(5))
            state["app"]["model"] = sharded_state_dict(model)
        if saving == "dtensor":
            for name, parameter, placement in placements(model):
                with suppress(UnsupportedError):  # of those that DTensor cannot express
                    state["app"]["model"][name] = as_dtensor(parameter, placement)
            assert isinstance(state["app"]["model"]["column.weight"], DTensor)
        if saving in ("save", "dtensor"):
            dcp.save(state, checkpoint_id=directory)
        elif saving == "async_save":
            done = dcp.async_save(state, checkpoint_id=directory)
            load_full_state_dict(model, unsplit(torch.float64, 1))  # training goes on meanwhile
            done.result()
        else:
            state["app"]["step"] = 0
            dcp.load(state, checkpoint_id=directory)
            assert state["app"]["step"] == 4
            model.packed.set_extra_state(state["app"]["model"]["packed._extra_state"])
            model.counting.set_extra_state({"calls": 7})  # torch saves a dict as its elements
            assert equal(full_state_dict(model), unsplit(torch.float64))


@pytest.mark.parametrize("saving", ["save", "async_save", "dtensor"])
def test_plain_dcp(world, tmp_path, saving):
    world(4).run(plain_dcp, tmp_path, saving)
    for size in (2, 3):
        world(size).run(plain_dcp, tmp_path, "")


def errors(directory: Path, full: Path) -> dict[str, str]:
    """What each misuse says; the model and the optimizer keep what they held."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float32)
        load_full_state_dict(model, unsplit(torch.float32, 3))
        optimizer = optimizer_of(model, 3)
        wider = nn.ModuleDict({"column": nn.Linear(6, 8)})
        more = Everything(group, torch.float32)
        more.extra = nn.Linear(2, 2)
        one_group = torch.optim.AdamW(model.parameters())
        foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))])
        factored = torch.optim.AdamW(model.parameters())
        factored.state[model.column.weight] = {
            "row": torch.zeros(model.column.weight.shape[0], 6, 1)
        }
        calls = {
            "nothing there": lambda: load_sharded(directory / "none", model),
            "exists": lambda: save_sharded(full, model),
            "shape": lambda: load_sharded(full, wider, strict=False),
            "missing": lambda: load_sharded(full, more),
            "unexpected": lambda: load_sharded(full, model.column, strict=True),
            "no optimizer": lambda: load_sharded(directory / "model", model, optimizer),
            "groups": lambda: load_sharded(full, model, one_group),
            "foreign": lambda: save_sharded(directory / "foreign", model, foreign),
            "factored": lambda: save_sharded(directory / "factored", model, factored),
        }
        texts = {}
        for name, call in calls.items():
            try:
                call()
                texts[name] = ""
            except TpKernelsError as error:
                texts[name] = f"{type(error).__name__}: {error}"
            assert equal(full_state_dict(model), unsplit(torch.float32, 3)), name
            check_optimizer(model, optimizer, 3)
        load_sharded(full, more, strict=False)
        assert torch.equal(more.norm.weight, unsplit(torch.float32, 1)["norm.weight"])
        return texts


def test_misuse(world, tmp_path):
    world(2).run(write, tmp_path / "full", torch.float32, 1)
    world(2).run(write_model, tmp_path / "model")
    for texts in world(3).run(errors, tmp_path, tmp_path / "full"):
        assert "no complete checkpoint" in texts["nothing there"]
        assert "already exists" in texts["exists"]
        assert texts["shape"].startswith("ShapeError: load_sharded"), texts["shape"]
        assert "model.column.weight is (7, 6)" in texts["shape"] and "(8, 6)" in texts["shape"]
        assert "missing ['extra.weight', 'extra.bias']" in texts["missing"]
        assert "unexpected ['model." in texts["unexpected"]
        assert "saved without an optimizer" in texts["no optimizer"]
        assert "groups hold [['embed.weight'" in texts["groups"]
        assert "is not of the model" in texts["foreign"]
        assert "'row' of shape" in texts["factored"] and "column.weight" in texts["factored"]


def test_one_process_without_torch_distributed(tmp_path):
    assert not dist.is_initialized()
    write(tmp_path, torch.float32, 2)
    read(tmp_path, torch.float32, 2)
    group = ParallelGroup()
    wrong = nn.ModuleDict({"packed": nn.Linear(5, 10)})
    with pytest.raises(ShapeError, match=r"packed.weight is \(10, 6\)"):
        load_sharded(tmp_path, wrong, strict=False)
    with pytest.raises(TpKernelsError, match="already exists"):
        save_sharded(tmp_path, Everything(group, torch.float32))


def killed(directory: Path) -> None:
    """Rank 1 dies when all files but the metadata may have been written."""
    with ParallelGroup(timeout=5, provider="none") as group:
        model = Everything(group, torch.float32)
        if group.rank == 1:
            finish = dcp.FileSystemWriter.write_data

            def die(*args: Any) -> Any:
                finish(*args).wait()
                os.kill(os.getpid(), signal.SIGKILL)

            dcp.FileSystemWriter.write_data = die
        save_sharded(directory, model)


def test_a_killed_save_leaves_no_checkpoint(world, tmp_path):
    with Ranks(2) as ranks, pytest.raises(RuntimeError, match="rank 1"):
        ranks.run(killed, tmp_path)
    assert list(tmp_path.glob("*.distcp"))  # it had begun
    for text in world(2).run(unreadable, tmp_path):
        assert "no complete checkpoint" in text
    world(2).run(write, tmp_path, torch.float32, 1)  # and may be repeated in place
    world(3).run(read, tmp_path, torch.float32, 1)


def unreadable(directory: Path) -> str:
    with ParallelGroup(timeout=30, provider="none") as group:
        try:
            load_sharded(directory, Everything(group, torch.float32))
        except UnsupportedError as error:
            return str(error)
        return ""


def fails(directory: Path) -> str:
    """Rank 1 cannot write; every rank hears of it."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float32)
        write_data = dcp.FileSystemWriter.write_data
        if group.rank == 1:

            def full(*_: Any) -> Any:
                raise OSError("no space left on device")

            dcp.FileSystemWriter.write_data = full
        try:
            save_sharded(directory, model)
        except TpKernelsError as error:
            return str(error)
        finally:
            dcp.FileSystemWriter.write_data = write_data
        return ""


def test_a_failed_save(world, tmp_path):
    for text in world(3).run(fails, tmp_path):
        assert "failed on ranks {1: 'OSError: no space left on device'}" in text
    assert not (tmp_path / ".metadata").exists()


def fully_sharded(group: ParallelGroup, mesh: DeviceMesh) -> Everything:
    """The model, whose slices FSDP2 divides over "dp": rows of rows, of packed and of shared ones too."""
    model = Everything(group, torch.float32)
    fully_shard(model.packed, mesh=mesh, ignored_params={model.packed.scale})  # it takes no scalars
    fully_shard(model.qkv, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.packed.scale})
    assert isinstance(model.qkv.k_proj.weight, DTensor)
    return model


def fsdp(directory: Path, saving: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with ParallelGroup(mesh["tp"], timeout=30, provider="none") as group:
        with torch.device("meta"):
            empty = fully_sharded(group, mesh["dp"])
        with pytest.raises(UnsupportedError, match="materialize before fully_shard"):
            materialize(empty)
        model = fully_sharded(group, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        if saving:
            for seed in (4, 1):
                expected = unsplit(torch.float32, seed)
                load_full_state_dict(model, expected)
                assert equal(full_state_dict(model), expected)
            for parameter in model.parameters():
                parameter.grad = 3 * parameter.detach()
            optimizer.step()
            save_sharded(directory, model, optimizer)
        else:
            load_sharded(directory, model, optimizer)
        return full_state_dict(model) | whole_moments(model, optimizer)


def whole_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    placed = {id(p): place for _, p, place in placements(model)}
    whole = {}
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        moment = moment.full_tensor() if isinstance(moment, DTensor) else moment
        place = placed.get(id(parameter))
        whole[f"moment.{name}"] = moment if place is None else place.gather(moment)
    return whole


def without_fsdp(directory: Path) -> dict[str, Any]:
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        load_sharded(directory, model, optimizer)
        return full_state_dict(model) | whole_moments(model, optimizer)


def test_fully_shard_around_divided_layers(world, tmp_path):
    expected = world(4).run(fsdp, tmp_path, True)
    assert not torch.equal(expected[0]["row.weight"], unsplit(torch.float32, 1)["row.weight"])
    grad = 3 * unsplit(torch.float32, 1)["qkv.k_proj.weight"]
    torch.testing.assert_close(
        expected[0]["moment.qkv.k_proj.weight"], grad / 10, rtol=1e-5, atol=0
    )
    found = world(4).run(fsdp, tmp_path, False) + world(3).run(without_fsdp, tmp_path)
    assert all(equal(state, expected[0]) for state in expected + found)
