"""Initial values: the same on any number of ranks, in construction, from the meta device, and by name."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.layers.state_model import Transformer, equal
from tp_kernels.comm import ParallelGroup, UnsupportedError, split_range
from tp_kernels.layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelLMHead,
    ParallelMLP,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_state_dict,
    initialize_,
    materialize,
    placements,
)
from tp_kernels.layers.gradients import use_main_grads


class Model(nn.Module):
    """Every kind of layer; the output head is tied and has a bias of its own."""

    def __init__(self, group: ParallelGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options = {"group": group, "dtype": dtype}
        size = group.size
        blocks = [(split_range(6, size, r), split_range(5, size, r)) for r in range(size)]
        packed = tuple((a, (b[0] + 6, b[1] + 6)) for a, b in blocks)
        self.embed = VocabParallelEmbedding(13, 6, padding_idx=2, **options)
        self.first_norm = LayerNorm(6, sequence_parallel=True, **options)
        self.packed = ColumnParallelLinear(6, 11, ranges=packed, **options)
        self.qkv = QKVParallelLinear(6, 5, 2, 3, True, **options)
        self.row = RowParallelLinear(7, 6, **options)
        self.dense = nn.Linear(6, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.last_norm = RMSNorm(6, zero_centered=True, **options)
        self.head = ParallelLMHead(6, 13, bias=True, **options)
        self.mlp = ParallelMLP(6, 9, bias=True, **options)
        self.head.weight = self.embed.weight


def built(seed: int | None, dtype: torch.dtype, meta: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Unsplit state of a new model, and what torch draws next."""
    with ParallelGroup(timeout=30) as group:
        if meta:
            with torch.device("meta"):
                model = Model(group, dtype)
            model.packed.weight.requires_grad_(False)
            torch.manual_seed(3)
            if seed is None:
                assert materialize(model) is model
            else:
                materialize(model, seed=seed)
            assert model.head.weight is model.embed.weight
            assert isinstance(model.head.bias, nn.Parameter) and model.head.bias.requires_grad
            assert not model.packed.weight.requires_grad
            assert len(list(placements(model))) == len(list(model.parameters())) - 4
        else:
            torch.manual_seed(3 if seed is None else seed)
            model = Model(group, dtype)
        return full_state_dict(model), torch.rand(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_on_any_number_of_ranks(world, dtype):
    ((expected, following),) = world(1).run(built, None, dtype, False)
    assert torch.equal(expected["embed.weight"][2], torch.zeros(6, dtype=dtype))
    assert expected["qkv.k_proj.weight"].std() > 0.1
    for size in (1, 2, 3, 4):
        for meta in (False, True):
            for state, drawn in world(size).run(built, None, dtype, meta):
                assert equal(state, expected)
                assert torch.equal(
                    drawn, following
                )  # the generator is where construction leaves it


def test_a_seed_leaves_the_generators_alone(world):
    ((expected, _),) = world(1).run(built, 11, torch.float32, False)
    for state, drawn in world(3).run(built, 11, torch.float32, True):
        assert equal(state, expected)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(3)))


def transformer(meta: bool) -> dict[str, Tensor]:
    with ParallelGroup(timeout=30) as group:
        with torch.device("meta" if meta else "cpu"):
            torch.manual_seed(6)
            model = Transformer(group, torch.float32)
        if meta:
            materialize(model, seed=6)
        assert len(list(placements(model))) == len(list(model.parameters()))
        return full_state_dict(model)


def test_whole_blocks_start_alike(world):
    """Packed and shared heads, packed MLPs, sinks, norms and a tied head, built anywhere."""
    ((expected),) = world(1).run(transformer, False)
    for size in (1, 2, 3, 4):
        for meta in (False, True):
            for state in world(size).run(transformer, meta):
                assert equal(state, expected)


class Partly(nn.Module):
    """`reset_parameters` forgets the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(3))


def test_what_cannot_be_materialized():
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(2, 2), Bare())
        partly = nn.Sequential(Partly())
    with pytest.raises(
        UnsupportedError, match=r"no reset_parameters\(\) in 1 \(Bare\): scale, table"
    ):
        materialize(bare)
    assert all(p.is_meta for p in bare.parameters())
    with pytest.raises(UnsupportedError, match=r"of 0 \(Partly\) does not fill 'bias'"):
        materialize(partly)


def test_hooks_and_attributes_are_not_lost_in_silence():
    with torch.device("meta"):
        hooked, marked = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(
        UnsupportedError, match=r"'weight' of the model itself \(Linear\) has hooks"
    ):
        materialize(hooked)
    use_main_grads(marked)
    with pytest.raises(
        UnsupportedError, match=r"'weight' of the model itself \(Linear\) .* \(main_grad\)"
    ):
        materialize(marked)


def test_what_has_values_keeps_them():
    group = ParallelGroup()
    with torch.device("meta"):
        model = Model(group)
    weight = torch.arange(13.0 * 6).view(13, 6)
    model.embed.weight = model.head.weight = nn.Parameter(weight.clone())
    model.dense = nn.Linear(6, 5)
    dense = copy.deepcopy(model.dense.state_dict())
    materialize(model, seed=1)
    assert torch.equal(model.head.weight, weight)
    assert equal(model.dense.state_dict(), dense)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


RULES = {
    "*norm.weight": lambda w, g: nn.init.uniform_(w, 0.5, 1.5, generator=g),
    "*.bias": lambda b, g: nn.init.zeros_(b),
    "*o_proj*": lambda w, g: nn.init.zeros_(w),
    "*": lambda w, g: nn.init.normal_(w, std=0.02, generator=g),
}


def by_name(seed: int, reverse: bool) -> dict[str, Tensor]:
    with ParallelGroup(timeout=30, provider="none") as group:
        model: nn.Module = Model(group, torch.float64)
        if reverse:
            children = dict(reversed(list(model.named_children())))
            model = nn.ModuleDict(children)
        rules = {name: rule for name, rule in RULES.items() if name != "*o_proj*"}
        assert initialize_(model, rules, seed=seed) is model
        return full_state_dict(model)


def test_by_name(world):
    (expected,) = world(1).run(by_name, 5, False)
    assert not expected["packed.bias"].any() and 0.01 < expected["packed.weight"].std() < 0.03
    assert expected["norm.weight"].min() >= 0.5 and expected["norm.weight"].std() > 0
    assert not torch.equal(expected["qkv.k_proj.weight"], expected["qkv.v_proj.weight"])
    assert not torch.equal(world(1).run(by_name, 6, False)[0]["row.weight"], expected["row.weight"])
    for size in (1, 2, 3, 4):
        for state in world(size).run(by_name, 5, False):
            assert equal(state, expected)
    (reverse,) = world(1).run(by_name, 5, True)
    # a tied parameter has the first of its names, which is now another
    tied = ("embed.weight", "head.weight")
    assert equal(
        {n: reverse[n] for n in expected if n not in tied},
        {n: v for n, v in expected.items() if n not in tied},
    )


def test_rules_that_do_not_fit():
    group = ParallelGroup()
    model = Model(group)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"nothing left for the rules \['\*o_proj\*'\]"):
        initialize_(model, RULES, seed=0)
    with pytest.raises(UnsupportedError, match=r"no rule for .*'embed.weight'"):
        initialize_(model, {"*.bias": RULES["*.bias"]}, seed=0)
    assert equal(model.state_dict(), before)
    with torch.device("meta"):
        model = Model(group)
    with pytest.raises(UnsupportedError, match=r"'embed.weight' is on the meta device"):
        initialize_(model, RULES, seed=0)


LAYERS, WIDTH = 12, 2048
LAYER_MB = WIDTH * WIDTH * 4 / 2**20


def peak_megabytes() -> float:
    """How far resident memory rises while a model of 12 wide layers is materialized."""
    with ParallelGroup(timeout=60) as group:
        with torch.device("meta"):
            layers = [ColumnParallelLinear(WIDTH, WIDTH, False, group=group) for _ in range(LAYERS)]
            model = nn.Sequential(*layers)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        materialize(model, seed=1)
        return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def test_the_unsplit_model_never_exists(world):
    """Half of each layer, and one unsplit layer with its copy in flight: 8 MB * 12 + 2 * 16 MB + slack."""
    own = LAYERS * LAYER_MB / 2
    for peak in world(2).run(peak_megabytes):
        assert own * 0.9 < peak < own + 3 * LAYER_MB < LAYERS * LAYER_MB, peak
