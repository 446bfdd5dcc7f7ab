"""Defects that the tests of gated, rotary, norm and cross_entropy have to find; see mutants.py.

Here `test` and `body` name a file as well: "test_norm.test_against_float64" is in test_norm.py.
"""

from __future__ import annotations

import torch

from tests.kernels.mutants import Mutant

F32, BF16 = (torch.float32,), (torch.bfloat16,)
GATED = "test_gated.test_against_float64", "elementwise_body.gated"
FAR = "test_gated.test_far_from_zero", "elementwise_body.far", ()
ROTARY = "test_rotary.test_against_float64", "elementwise_body.rotary"
NORM = "test_norm.test_against_float64", "norm_body.norm"
LOSS = "test_cross_entropy.test_against_float64", "cross_entropy_body.loss"
SLOW = "test_cross_entropy.test_slow_rank", "cross_entropy_body.slow_rank", (1,)

HEADS = ((2, 2, 2, 9), 3)
WIDE = [(2, 37)]
# The second shape has a residual and a bias.
TALL = [(1, 3), (13, 3)]

MUTANTS = (
    Mutant(
        "slope_of_silu",
        "_activation.value_and_slope",
        (("slope = s * (1.0 + x * rest)", "slope = s * (1.0 + rest)"),),
        *(*GATED, ("silu", WIDE, "plain"), 1),
    ),
    Mutant(
        "activation_rounded",
        "gated.forward",
        (("narrow(value * factor", "narrow(widen(narrow(value, y.dtype.element_ty)) * factor"),),
        *(*GATED, ("gelu", WIDE, "plain"), 1),
    ),
    Mutant(
        "forms_of_gelu_swapped",
        "gated._form",
        (('if approximate == "tanh"', 'if approximate != "tanh"'),),
        *(*GATED, ("gelu_tanh", WIDE, "plain"), 1),
    ),
    Mutant(
        "halves_interleaved",
        "gated._halves",
        (("gate.chunk(2, dim=-1)", "gate[..., ::2], gate[..., 1::2]"),),
        *(*GATED, ("silu", WIDE, "plain"), 1),
    ),
    Mutant(
        "sigmoid_overflows",
        "_activation.sigmoids",
        (
            ("tl.exp(-tl.abs(x))", "tl.exp(-x)"),
            ("tl.where(x >= 0, above, below), tl.where(x >= 0, below, above)", "above, below"),
        ),
        *(*FAR, 1),
    ),
    Mutant(
        "zero_times_infinity",
        "_activation.value_and_slope",
        (("tl.where(s * rest == 0, 0.0, bend)", "bend"),),
        *(*FAR, 1),
    ),
    Mutant(
        "turned_the_wrong_way",
        "rotary.rotary_backward",
        (("inverse=True", "inverse=False"),),
        *(*ROTARY, (*HEADS, False, "plain"), 1),
    ),
    Mutant(
        "pairs_half_a_head_apart",
        "rotary.turn",
        (("column + half, mask=mask, other", "column + half + rest // 2, mask=mask, other"),),
        *(*ROTARY, (*HEADS, False, "plain"), 1),
    ),
    Mutant(
        "end_of_a_head_not_copied",
        "rotary.turn",
        (("(column < rest)", "(column < rest - 1)"),),
        *(*ROTARY, (*HEADS, True, "plain"), 1),
    ),
    Mutant(
        "angles_of_the_first_batch",
        "rotary.turn",
        (("at = batch * cos_batch + token", "at = token"),),
        *(*ROTARY, (*HEADS, True, "plain"), 1),
    ),
    Mutant(
        "last_part_missing",
        "norm.sum_parts",
        (("range(0, count)", "range(0, count - 1)"),),
        *(*NORM, ("rms_norm", TALL, "plain", F32), 1),
    ),
    Mutant(
        "residual_gradient_dropped",
        "norm.backward",
        (("value += widen(tl.load(ds", "value += 0.0 * widen(tl.load(ds"),),
        *(*NORM, ("rms_norm", TALL, "plain", F32), 1),
    ),
    Mutant(
        "mean_not_subtracted",
        "norm._units",
        (("value -= tl.load(mean", "value -= 0.0 * tl.load(mean"),),
        *(*NORM, ("layer_norm", TALL, "plain", F32), 1),
    ),
    Mutant(
        "mean_gradient_not_subtracted",
        "norm.backward",
        (("(g - shift - unit", "(g - unit"),),
        *(*NORM, ("layer_norm", TALL, "plain", F32), 1),
    ),
    Mutant(
        "variance_of_squares",
        "norm.forward",
        (
            ("other=0.0)) - center\n            squares", "other=0.0))\n            squares"),
            (
                "        average = tl.sum(squares, axis=1)[:, None] / width\n",
                "        average = tl.sum(squares, axis=1)[:, None] / width - center * center\n",
            ),
        ),
        *("test_norm.test_far_from_zero", "norm_body.norm"),
        *(("layer_norm", [(3, 37)], "plain", F32, 1000.0), 1),
    ),
    Mutant(
        "sum_not_rounded",
        "norm.forward",
        (
            (
                "            total += widen(value)\n",
                "            total += widen(value) + (0.0 if residual is None else 1e-3)\n",
            ),
        ),
        *(*NORM, ("layer_norm", TALL, "plain", BF16), 1),
    ),
    Mutant(
        "smoothed_over_the_shard",
        "cross_entropy.gradient",
        (("smoothing / vocab", "smoothing / width"),),
        *(*LOSS, (*F32, False, 0.1)),
    ),
    Mutant(
        "loss_smoothed_over_a_rank",
        "cross_entropy.combine",
        (("total / vocab", "total / (vocab // WORLD)"),),
        *(*LOSS, (*F32, False, 0.1)),
    ),
    Mutant(
        "maxima_ignored",
        "cross_entropy.combine",
        (("partial * tl.exp(maximum - base)", "partial"),),
        *(*LOSS, F32),
    ),
    Mutant(
        "maximum_of_the_last_rank",
        "cross_entropy.combine",
        (("largest = tl.maximum(largest, theirs)", "largest = theirs"),),
        *(*LOSS, (*F32, False, 0.0, 0.0, 1e4)),
    ),
    Mutant(
        "maximum_not_carried",
        "cross_entropy.measure",
        (("sums = sums * tl.exp(largest - base) +", "sums = sums +"),),
        *(*LOSS, F32),
    ),
    Mutant(
        "label_off_by_one",
        "cross_entropy.measure",
        (("(place < width)", "(place < width - 1)"),),
        *(*LOSS, F32),
    ),
    Mutant(
        "gradient_of_the_next_label",
        "cross_entropy.gradient",
        (("label - start,", "label - start + 1,"),),
        *(*LOSS, F32),
    ),
    Mutant(
        "padding_takes_part",
        "cross_entropy.width",
        (("min(columns, self.vocab - self.start)", "columns"),),
        *(*LOSS, (*F32, True)),
    ),
    Mutant(
        "ignored_rows_have_gradients",
        "cross_entropy.gradient",
        (("(label != ignore_index) & (column", "(column"),),
        *(*LOSS, F32),
    ),
    Mutant(
        "half_of_the_z_loss_gradient",
        "cross_entropy.gradient",
        (("2.0 * z_loss", "z_loss"),),
        *(*LOSS, (*F32, False, 0.0, 1e-3)),
    ),
    Mutant(
        "own_shard_first",
        "cross_entropy.combine",
        tuple(
            (f"{name} = receive(\n                    tl.float32, table, source,",
             f"{name} = receive(\n                    tl.float32, table, (rank + source) % WORLD,")
            for name in ("maximum", "partial")
        ),
        *(*LOSS, F32, 3),
    ),
    Mutant(
        "data_not_awaited_by_combine",
        "cross_entropy.combine",
        (("READY, epoch, alive, timeout", "READY, epoch - 1, alive, timeout"),),
        *SLOW,
    ),
    Mutant(
        "credit_of_combine_removed",
        "cross_entropy.combine",
        (("CREDIT, epoch - DEPTH, alive", "CREDIT, epoch - DEPTH - 1000, alive"),),
        *SLOW,
    ),
)  # fmt: skip
