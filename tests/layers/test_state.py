"""State of divided modules, to the bit: unsplit, in slices, as shards; what does not fit is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.layers.state_model import SHAPES, Everything, Transformer, equal, step, unsplit
from tp_kernels.comm import ParallelGroup, Ranks, ShapeError, TpKernelsError, UnsupportedError
from tp_kernels.layers import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    as_dtensor,
    full_state_dict,
    full_tensors,
    load_full_state_dict,
    placements,
    sharded_state_dict,
)
from tp_kernels.layers.sharded import sharded

DTYPES = (torch.float64, torch.bfloat16)


def loaded(
    group: ParallelGroup, dtype: torch.dtype, tied: bool = True, seed: int = 0
) -> Everything:
    model = Everything(group, dtype, tied)
    assert load_full_state_dict(model, unsplit(dtype, seed, tied)) == ([], [])
    return model


def full_round_trip(dtype: torch.dtype) -> None:
    with ParallelGroup(timeout=30, provider="none") as group:
        for tied in (False, True):
            expected = unsplit(dtype, tied=tied)
            model = loaded(group, dtype, tied)
            column = expected["column.weight"].tensor_split(group.size)[group.rank]
            assert torch.equal(model.column.weight, column)
            found = full_state_dict(model)
            assert list(found) == list(model.state_dict())
            assert equal(found, expected)
            shared = found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
            assert shared == tied == (model.head.weight is model.embed.weight)
            assert all(p.requires_grad for p in model.parameters())
            found["norm.running_mean"].zero_()  # a copy
            assert equal(full_state_dict(model), expected)
            assert equal(
                full_state_dict(model, keep=group.rank == 0), {} if group.rank else expected
            )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_round_trip(world, size, dtype):
    world(size).run(full_round_trip, dtype)


def unsplit_tensors_alive() -> int:
    """The most unsplit tensors that exist beside the one just yielded."""
    with ParallelGroup(timeout=30) as group:
        model = loaded(group, torch.float32)
        most, yielded = 0, []
        for name, value in full_tensors(model):
            alive = sum(reference() is not None for reference in yielded)
            most = max(most, alive - (name != "embed.weight"))  # kept for its twin, which is last
            if name in SHAPES:
                yielded.append(weakref.ref(value))
        return most


def test_one_unsplit_tensor_at_a_time(world):
    assert world(2).run(unsplit_tensors_alive) == [0, 0]


def faults(tied: bool) -> list[str]:
    """What loading says about a state that does not fit; the model stays what it was."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = loaded(group, torch.float64, tied)
        before = full_state_dict(model)
        good = unsplit(torch.float64, 1, tied)
        slices = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        bad = [
            {n: v for n, v in good.items() if n not in ("column.bias", "norm.running_var")},
            good | {"other.weight": torch.zeros(2), "another": 1},
            good | {"row.weight": torch.zeros(7, 6), "packed.scale": torch.zeros(1)},
            good | slices,
            good | {"head.weight": good["head.weight"] + 1},
        ]
        texts = []
        for state in bad:
            try:
                load_full_state_dict(model, state)
                texts.append("")
            except TpKernelsError as error:
                texts.append(f"{type(error).__name__}: {error}")
                assert equal(full_state_dict(model), before)
                load_full_state_dict(model, before)
            model = loaded(group, torch.float64, tied)
        assert load_full_state_dict(model, bad[0] | bad[1], strict=False) == (
            [],
            ["other.weight", "another"],
        )
        del bad[0]["head.weight"]
        found = load_full_state_dict(model, bad[0], strict=False)
        assert found.missing_keys == [
            *(["column.bias"]),
            "norm.running_var",
            *([] if tied else ["head.weight"]),
        ]
        assert torch.equal(full_state_dict(model)["row.weight"], good["row.weight"])
        return texts


@pytest.mark.parametrize("tied", [False, True])
def test_what_does_not_fit(world, tied):
    for missing, unexpected, shapes, slices, twins in world(3).run(faults, tied):
        assert missing.startswith("TpKernelsError")
        assert "missing: column.bias" in missing and "missing: norm.running_var" in missing
        assert "unexpected: other.weight" in unexpected and "unexpected: another" in unexpected
        assert "row.weight is (7, 6), the unsplit tensor is (6, 7)" in shapes
        assert "packed.scale is (1,), the unsplit tensor is ()" in shapes
        assert slices.startswith("ShapeError") and "qkv.k_proj.weight is" in slices
        assert ("embed.weight and head.weight are tied, but differ" in twins) == tied


def test_meta_parameters_are_not_loaded():
    group = ParallelGroup()
    with torch.device("meta"):
        model = Everything(group, torch.float64)
    with pytest.raises(UnsupportedError, match=r"'embed.weight' is on the meta device"):
        load_full_state_dict(model, unsplit(torch.float64))


def own_slices() -> list[Tensor | bytes]:
    """torch's own state dict: the same rank's slices round trip, through a file too."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model, other = loaded(group, torch.float64), loaded(group, torch.float64, seed=7)
        state = model.state_dict()
        assert {n for n, _ in model.named_parameters(remove_duplicate=False)} <= set(state)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert equal(full_state_dict(other), unsplit(torch.float64))
        return file.getvalue()


def load_of(files: list[bytes], plain: bool) -> list[str]:
    """What `load_state_dict` says about the slices of each rank of another, or the same, world."""
    texts = []
    with ParallelGroup(timeout=30, provider="none") as group:
        model = Everything(group, torch.float64)
        for file in files:
            state = torch.load(io.BytesIO(file), weights_only=True)
            try:
                model.load_state_dict(dict(state) if plain else state)
                texts.append("")
            except ShapeError as error:
                texts.append(str(error))
        try:
            model.load_state_dict(unsplit(torch.float64))
            texts.append("")
        except ShapeError as error:
            texts.append(str(error))
    return texts


def test_slices_of_another_world(world):
    of = {size: world(size).run(own_slices) for size in (1, 2, 3)}
    for size in (1, 2, 3):
        for saved in (1, 2, 3):
            for rank, texts in enumerate(world(size).run(load_of, of[saved], False)):
                *texts, full = texts
                assert (full == "") == (size == 1)
                for origin, text in enumerate(texts):
                    if size == saved and rank == origin:
                        assert text == ""
                        continue
                    assert f"saved by rank {origin} of {saved}" in text or saved == 1
                    assert f"rank {rank} of {size} holds" in text
                    assert "load_full_state_dict" in text and "load_sharded" in text


def test_slices_without_metadata_are_refused_by_shape(world):
    of_four = world(4).run(own_slices)
    for texts in world(3).run(load_of, of_four, True):
        assert all("load_full_state_dict" in text for text in texts)


def shards() -> None:
    """Replica 0 of all ranks covers every unsplit tensor once; offsets say where views belong."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = loaded(group, torch.float64)
        expected = unsplit(torch.float64)
        state = sharded_state_dict(model)
        assert list(state) == list(model.state_dict())
        for name, value in state.items():
            if "norm." in name or "extra" in name:
                assert type(value) in (Tensor, dict)
                continue
            assert tuple(value.shape) == SHAPES[name] and value.dtype == torch.float64
            whole = torch.full(SHAPES[name], torch.nan, dtype=torch.float64)
            count = torch.zeros(SHAPES[name], dtype=torch.float64)
            for region, view in value.chunks:
                assert view.untyped_storage().data_ptr() == value.local.untyped_storage().data_ptr()
                box = tuple(
                    slice(at, at + size)
                    for at, size in zip(region.offsets, region.sizes, strict=True)
                )
                assert torch.equal(view, expected[name][box])
                whole[box] = view
                count[box] += region.replica == 0
            placement = {n: p for n, _, p in placements(model)}.get(name.replace("head", "embed"))
            assert torch.equal(placement.slice(whole), value.local)  # nothing left out
            counts = torch.stack(_gather(count, group)).sum(0)
            assert torch.equal(counts, torch.ones_like(counts)), name
        with pytest.raises(UnsupportedError, match="ShardedTensor, which only says where"):
            state["column.weight"] + 1
        copied = state["qkv.k_proj.weight"].clone()
        assert copied.regions == state["qkv.k_proj.weight"].regions
        assert copied.local.data_ptr() != model.qkv.k_proj.weight.data_ptr()
        with pytest.raises(ShapeError, match="this tensor is"):
            sharded(torch.zeros(1, 1), model.column.placements["weight"])


def _gather(x: Tensor, group: ParallelGroup) -> list[Tensor]:
    every = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(every, x, group=group.process_group)
    return every


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards(world, size):
    world(size).run(shards)


def dtensors() -> dict[str, str]:
    """Which parameters DTensor can express; their full tensors are the unsplit ones."""
    with ParallelGroup(timeout=30, provider="none") as group:
        torch.manual_seed(1)
        model = nn.ModuleDict(
            {
                "even": ColumnParallelLinear(6, 12, group=group),
                "six": VocabParallelEmbedding(6, 3, group=group),
                "seven": ColumnParallelLinear(6, 7, group=group),
                "all": Everything(group, torch.float32),
            }
        )
        results = {}
        for name, parameter, placement in placements(model):
            try:
                dtensor = as_dtensor(parameter, placement)
            except UnsupportedError as error:
                results[name] = "refused" if "sharded_state_dict" in str(error) else str(error)
                continue
            assert dtensor.to_local().data_ptr() == parameter.data_ptr()
            same = torch.equal(dtensor.full_tensor(), placement.gather(parameter))
            results[name] = "same" if same else "different"
        return results


def test_dtensors(world):
    for size, refused in ((2, set()), (3, {"seven"}), (4, {"six"})):
        for found in world(size).run(dtensors):
            assert "different" not in found.values()
            assert found["even.weight"] == found["even.bias"] == "same"
            assert found["all.row.bias"] == found["all.packed.scale"] == "same"
            assert found["all.packed.weight"] == "refused"
            assert found["all.qkv.k_proj.weight"] == ("same" if size == 2 else "refused")
            for name in refused:
                assert found[f"{name}.weight"] == "refused"
            for name in {"six", "seven"} - refused:
                assert found[f"{name}.weight"] == "same"


def test_dtensors_need_a_process_group():
    layer = ColumnParallelLinear(2, 2, group=ParallelGroup())
    with pytest.raises(UnsupportedError, match=r"needs torch.distributed"):
        as_dtensor(layer.weight, layer.placements["weight"])


def transformer(state: dict[str, Tensor] | None, moved: str) -> list[dict[str, Tensor]]:
    """State and one training step of a transformer with that state, itself or moved in some way."""
    with ParallelGroup(timeout=30, provider="none") as group:
        torch.manual_seed(1)
        model = Transformer(group, torch.float64)
        if state is not None:
            load_full_state_dict(model, state)
        before = step(model)
        if moved == "copied":
            model = copy.deepcopy(model)
        elif moved == "pickled":
            model = pickle.loads(pickle.dumps(model))
        elif moved == "sliced":
            slices = model.state_dict()
            model = Transformer(group, torch.float64)
            model.load_state_dict(slices)
        assert equal(step(model), before)
        return [full_state_dict(model), before]


def test_transformer(world):
    """The state of one rank gives the same numbers on any number of ranks; so does a copy."""
    ((state, expected),) = world(1).run(transformer, None, "")
    ways = {1: "copied", 2: "pickled", 3: "copied", 4: "sliced"}
    for size, moved in ways.items():
        for found, numbers in world(size).run(transformer, state, moved):
            assert equal(found, state)
            assert numbers.keys() == expected.keys()
            for name, value in numbers.items():
                # about 100 dependent roundings of 1.1e-16, in sums of up to 100 terms
                scale = expected[name].abs().max()
                assert (value - expected[name]).abs().max() <= 1e-13 * scale, name


def copies() -> bool:
    with ParallelGroup(timeout=30, provider="none") as group:
        model = loaded(group, torch.float64)
        twin = copy.deepcopy(model)
        assert twin.head.weight is twin.embed.weight and twin.embed.weight is not model.embed.weight
        assert twin.embed.group is group
        load_full_state_dict(twin, unsplit(torch.float64, 9))
        assert equal(full_state_dict(twin), unsplit(torch.float64, 9))
        assert equal(full_state_dict(model), unsplit(torch.float64))
        twin.load_state_dict(model.state_dict())  # its hooks are those of the copy
        assert equal(full_state_dict(twin), unsplit(torch.float64))
        return True


def test_deepcopy(world):
    assert world(2).run(copies) == [True, True]


def pickled() -> bytes:
    """A whole module in bytes; in the process that made it, it comes back in the same group."""
    with ParallelGroup(timeout=30, provider="none") as group:
        model = loaded(group, torch.float64)
        file = io.BytesIO()
        torch.save(model, file)
        check_unpickled(file.getvalue(), group)
        return file.getvalue()


def check_unpickled(data: bytes, group: ParallelGroup) -> None:
    twin = torch.load(io.BytesIO(data), weights_only=False)
    assert twin.head.weight is twin.embed.weight and twin.embed.group is group
    assert twin.column.placements["weight"].group is group
    assert equal(full_state_dict(twin), unsplit(torch.float64))
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    column = nn.functional.linear(
        x, *(unsplit(torch.float64)[f"column.{n}"] for n in ("weight", "bias"))
    )
    found = twin.row(twin.column(x))
    expected = nn.functional.linear(
        column, *(unsplit(torch.float64)[f"row.{n}"] for n in ("weight", "bias"))
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    with pytest.raises(ShapeError, match="load_full_state_dict"):  # its hooks came along
        twin.load_state_dict(unsplit(torch.float64))


def unpickled(data: list[bytes]) -> str:
    """In other processes: without a group, and with the group that a new run makes first."""
    try:
        torch.load(io.BytesIO(data[dist.get_rank()]), weights_only=False)
    except UnsupportedError as error:
        text = str(error)
    with ParallelGroup(timeout=30, provider="none") as group:
        check_unpickled(data[group.rank], group)
    return text


def test_pickling():
    with Ranks(2) as ranks:
        data = ranks.run(pickled)
    with Ranks(2) as ranks:
        assert all("there is none in this process" in text for text in ranks.run(unpickled, data))
    with pytest.raises(UnsupportedError, match="load a state"):
        torch.load(io.BytesIO(data[0]), weights_only=False)
    alone = pickle.loads(pickle.dumps(Everything(ParallelGroup(), torch.float64)))
    gc.collect()  # the group that it was made in
    assert alone.row(alone.column(torch.zeros(1, 6, dtype=torch.float64))).shape == (1, 6)
