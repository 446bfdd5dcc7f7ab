"""Linear layers and the MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.parity.case import Case, Entry, Options, Part, Setting
from tests.parity.dense import Rounding
from tp_kernels.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear

BATCH, INNER, OUTER = 2, 10, 13  # widths that divide by nothing
TOKENS = (5, 3)  # with 3 tokens on 4 ranks, one has none
FLAGS = (False, True)
LAYOUTS = (None, True, False)

Named = dict[str, Tensor]


def linear_parameters(o: Options, inputs: int, outputs: int, name: str = "") -> dict[str, Any]:
    shapes: dict[str, Any] = {f"{name}weight": (outputs, inputs)}
    return shapes | ({f"{name}bias": (outputs,)} if o.bias else {})


def rows_of(s: Setting, o: Options) -> int | None:
    return o.tokens if s.sp else None


def dense_linear(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    return {"y": r.linear(x["x"], p["weight"], p.get("bias"))}


def build_column(s: Setting) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        INNER,
        OUTER,
        s.o.bias,
        gather_output=s.o.gather_output,
        skip_bias_add=s.o.skip_bias_add,
        batch_first=s.o.batch_first,
        **s.common,
    )


def with_bias(s: Setting, y: Any) -> Named:
    """What a caller does who adds the bias himself."""
    if not s.o.skip_bias_add:
        return {"y": y}
    y, bias = y
    return {"y": y if bias is None else y + bias}


def column_allowed(case: Case, o: Options) -> bool:
    return not (o.gather_output and o.skip_bias_add)


COLUMN = Entry(
    options={
        "tokens": TOKENS,
        "bias": FLAGS,
        "gather_output": FLAGS,
        "skip_bias_add": FLAGS,
        "batch_first": LAYOUTS,
    },
    parameters=lambda o: linear_parameters(o, INNER, OUTER),
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=dense_linear,
    build=build_column,
    call=lambda s, layer, x: with_bias(s, layer(x["x"], rows_of(s, s.o))),
    parts=lambda s: {
        "x": Part(s.tokens),
        "y": Part(s.all if s.o.gather_output else s.features),
    },
    allowed=column_allowed,
)


def build_row(s: Setting) -> RowParallelLinear:
    return RowParallelLinear(
        OUTER,
        INNER,
        s.o.bias,
        input_is_parallel=s.o.input_is_parallel,
        skip_bias_add=s.o.skip_bias_add,
        batch_first=s.o.batch_first,
        **s.common,
    )


ROW = Entry(
    options={
        "tokens": TOKENS,
        "bias": FLAGS,
        "input_is_parallel": FLAGS,
        "skip_bias_add": FLAGS,
        "batch_first": LAYOUTS,
    },
    parameters=lambda o: linear_parameters(o, OUTER, INNER),
    inputs=lambda o: {"x": (BATCH, o.tokens, OUTER)},
    dense=dense_linear,
    build=build_row,
    call=lambda s, layer, x: with_bias(s, layer(x["x"])),
    parts=lambda s: {
        "x": Part(s.features if s.o.input_is_parallel else s.all),
        "y": Part(s.tokens),
    },
)


def mlp_parameters(o: Options) -> dict[str, Any]:
    shapes = linear_parameters(o, INNER, OUTER, "up_proj.")
    if o.gated:
        shapes |= linear_parameters(o, INNER, OUTER, "gate_proj.")
    return shapes | linear_parameters(o, OUTER, INNER, "down_proj.")


def dense_mlp(r: Rounding, o: Options, p: Named, x: Named) -> Named:
    def linear(y: Tensor, name: str) -> Tensor:
        return r.linear(y, p[f"{name}_proj.weight"], p.get(f"{name}_proj.bias"))

    up = linear(x["x"], "up")
    if o.gated:
        up = r(r.activation(linear(x["x"], "gate"), o.activation) * up)
    else:
        up = r.activation(up, o.activation)
    return {"y": linear(up, "down")}


MLP = Entry(
    options={
        "tokens": TOKENS,
        "bias": FLAGS,
        "gated": FLAGS,
        "activation": ("silu", "gelu", "gelu_tanh", "relu"),
    },
    parameters=mlp_parameters,
    inputs=lambda o: {"x": (BATCH, o.tokens, INNER)},
    dense=dense_mlp,
    build=lambda s: ParallelMLP(
        INNER, OUTER, activation=s.o.activation, gated=s.o.gated, bias=s.o.bias, **s.common
    ),
    call=lambda s, layer, x: {"y": layer(x["x"], rows_of(s, s.o))},
    parts=lambda s: {"x": Part(s.tokens), "y": Part(s.tokens)},
)

ENTRIES = {"column": COLUMN, "row": ROW, "mlp": MLP}
