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
GRADIENTS = ("to grad", "to main_grad", "later")  # of weights

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
        gathered=s.o.gathered,
        delay_wgrad=s.o.gradients == "later",
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
    return not (o.gather_output and o.skip_bias_add) and (case.sp or o.gathered == "keep")


COLUMN = Entry(
    options={
        "tokens": TOKENS,
        "bias": FLAGS,
        "gather_output": FLAGS,
        "skip_bias_add": FLAGS,
        "gathered": ("keep", "redo"),
        "gradients": GRADIENTS,
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
        delay_wgrad=s.o.gradients == "later",
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
        "gradients": GRADIENTS,
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
    shapes: dict[str, Any] = {}
    if o.packed:
        shapes |= linear_parameters(o, INNER, 2 * OUTER, "gate_up_proj.")
    else:
        for name in ("gate_proj.", "up_proj.") if o.gated else ("up_proj.",):
            shapes |= linear_parameters(o, INNER, OUTER, name)
    return shapes | linear_parameters(o, OUTER, INNER, "down_proj.") | norm_parameters(o, "norm.")


def norm_parameters(o: Options, name: str) -> dict[str, Any]:
    if o.norm is None:
        return {}
    bias = {f"{name}bias": (INNER,)} if o.norm == "layer" else {}
    return {f"{name}weight": (INNER,)} | bias


def dense_norm(r: Rounding, o: Options, p: Named, x: Tensor, name: str) -> Tensor:
    if o.norm == "rms":
        return r.rms_norm(x, p[f"{name}weight"])
    return r.layer_norm(x, p[f"{name}weight"], p[f"{name}bias"])


def dense_mlp(r: Rounding, o: Options, p: Named, x: Named, prefix: str = "") -> Named:
    def linear(y: Tensor, name: str) -> Tensor:
        name = f"{prefix}{name}_proj."
        return r.linear(y, p[f"{name}weight"], p.get(f"{name}bias"))

    y = total = r(x["x"] + x["residual"]) if "residual" in x else x["x"]
    if o.norm:
        y = dense_norm(r, o, p, y, f"{prefix}norm.")
    if o.packed:
        both = linear(y, "gate_up")
        order = (2, OUTER) if o.packed == "blocks" else (OUTER, 2)
        gate, up = both.unflatten(-1, order).unbind(-2 if o.packed == "blocks" else -1)
    else:
        gate, up = linear(y, "gate") if o.gated else None, linear(y, "up")
    if gate is None:
        up = r.activation(up, o.activation)
    else:
        up = r(r.activation(gate, o.activation) * up)
    return {"y": linear(up, "down")} | ({"sum": total} if "residual" in x else {})


def call_mlp(s: Setting, layer: Any, x: Named) -> Named:
    y = layer(x["x"], rows_of(s, s.o), x.get("residual"))
    return dict(zip(("y", "sum"), y, strict=True)) if s.o.residual else {"y": y}


def mlp_inputs(o: Options) -> dict[str, Any]:
    shape = (BATCH, o.tokens, INNER)
    return {"x": shape} | ({"residual": shape} if o.residual else {})


def mlp_allowed(case: Case, o: Options) -> bool:
    usual = o.activation in ("silu", "gelu")  # the others meet neither packing nor norms
    return (
        (o.gated or o.packed is None)
        and (o.norm is not None or not o.residual)
        and (usual or (o.packed is None and o.norm is None))
    )


MLP = Entry(
    options={
        "tokens": (5,),
        "bias": FLAGS,
        "gated": FLAGS,
        "packed": (None, "blocks", "interleaved"),
        "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2"),
        "norm": (None, "rms", "layer"),
        "residual": FLAGS,
        "batch_first": (None,),
    },
    parameters=mlp_parameters,
    inputs=mlp_inputs,
    dense=dense_mlp,
    build=lambda s: ParallelMLP(
        INNER,
        OUTER,
        activation=s.o.activation,
        gated=s.o.gated,
        packed=s.o.packed,
        norm=s.o.norm,
        bias=s.o.bias,
        batch_first=s.o.batch_first,
        **s.common,
    ),
    call=call_mlp,
    parts=lambda s: dict.fromkeys(("x", "residual", "y", "sum"), Part(s.tokens)),
    allowed=mlp_allowed,
)

ENTRIES = {"column": COLUMN, "row": ROW, "mlp": MLP}
