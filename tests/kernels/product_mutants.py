"""Defects that the tests of the matrix products have to find; see mutants.py.

Here `test` and `body` name a file as well: "test_linear_reduce_scatter.test_bits" is in that file.
"""

from __future__ import annotations

from typing import Any

from tests.kernels.mutants import Mutant
from tp_kernels import CollectiveTimeoutError

SCATTER, REDUCE, GATHER = "linear_reduce_scatter", "linear_all_reduce", "all_gather_linear"
GRADIENT = "all_gather_weight_gradient"
SHAPES = [(3, 5, 4), (33, 5, 4)]  # rows, width, inner; the second bias is used
TWO, BY_SWITCH = f"{REDUCE}_2", f"{REDUCE}_switch"


def sums(test: str, operation: str, *args: Any) -> tuple[str, str, tuple[Any, ...]]:
    """(test, body, its arguments) in the tests of the products that sum over ranks."""
    file, body = operation.removesuffix("_2").removesuffix("_switch"), test
    return f"test_{file}.{TESTS[test]}", f"gemm_body.{body}", (operation, *args)


def gathers(test: str, operation: str, *args: Any) -> tuple[str, str, tuple[Any, ...]]:
    return f"test_{operation}.{TESTS[test]}", f"gather_body.{test}", (operation, *args)


TESTS = {
    "exact": "test_bits",
    "back_to_back": "test_back_to_back",
    "slow_rank": "test_slow_rank",
    "several_pairs": "test_several_pairs",
    "chunks_in_any_order": "test_chunks_in_any_order",
}
ONE_CHANNEL: dict[str, Any] = {"channels": 1}
DEEP: dict[str, Any] = {"depth": 4}
OWN_FIRST = "test_all_gather_linear.test_own_rows_first", "gather_body.own_rows_first", ()
ANY_ORDER = gathers("chunks_in_any_order", GATHER, (41, 7), 1)

MUTANTS = (
    Mutant(
        "products_not_awaited",
        "linear_reduce_scatter.scatter",
        (("READY, epoch, alive", "READY, epoch - 1, alive"),),
        *sums("back_to_back", SCATTER, 1),
    ),
    Mutant(
        "products_without_credit",
        "_tiles.send_products",
        (("CREDIT, epoch - DEPTH, alive", "CREDIT, epoch - DEPTH - 1000, alive"),),
        *sums("slow_rank", SCATTER, 0),
    ),
    Mutant(
        "products_with_credit_of_the_round_before",
        "_tiles.send_products",
        (("CREDIT, epoch - DEPTH, alive", "CREDIT, epoch - DEPTH - 1, alive"),),
        *sums("slow_rank", SCATTER, 0),
    ),
    Mutant(
        "signal_before_the_last_product",
        "_tiles.send_products",
        (("if step == WORLD - 1:", "if step == WORLD - 2:"),),
        *sums("slow_rank", SCATTER, 1),
        3,
    ),
    Mutant(
        "products_rotated_too_far",
        "_tiles.send_products",
        (("owner = (rank + step) % WORLD", "owner = (rank + step + 1) % WORLD"),),
        *sums("slow_rank", SCATTER, 1),
    ),
    Mutant(
        "epoch_of_products_short",
        "linear_reduce_scatter.scatter",
        (("begin + turns, alive", "begin + turns - 1, alive"),),
        *sums("back_to_back", SCATTER, 1),
    ),
    Mutant(
        "sum_of_another_tile",
        "linear_reduce_scatter.scatter",
        (("place(tile - programs,", "place(tile,"),),
        *sums("exact", SCATTER, [(40, 5, 4)]),
        2,
        ONE_CHANNEL,
    ),
    Mutant(
        "bias_of_every_rank",
        "_tiles.sum_tile",
        (("total += widen(", "total += WORLD * widen("),),
        *sums("exact", SCATTER, SHAPES),
    ),
    Mutant(
        "longer_parts_cut",
        "linear_reduce_scatter.scatter",
        (("small + tl.minimum(larger, 1) * unit", "small"),),
        *sums("exact", SCATTER, SHAPES),
    ),
    Mutant(
        "remainder_of_one_row",
        "_rounds.start_of",
        (("* unit", "* 1"),),
        *sums("several_pairs", SCATTER, 7),
    ),
    Mutant(
        "pair_left_out",
        "_gemm.product",
        (("range(len(xs))", "range(len(xs) - 1)"),),
        *sums("several_pairs", REDUCE),
    ),
    Mutant(
        "inner_size_of_the_first_pair",
        "_gemm.product",
        (("pick(inners, pair)", "inners[0]"),),
        *sums("several_pairs", REDUCE),
    ),
    Mutant(
        "second_shot_without_credit",
        "linear_all_reduce.two_shots",
        (("CREDIT, summed - DEPTH, alive", "CREDIT, summed - DEPTH - 1000, alive"),),
        *sums("slow_rank", TWO, 0),
        2,
        DEEP,
    ),
    Mutant(
        "second_shot_not_awaited",
        "linear_all_reduce.two_shots",
        (("READY, summed - 2, alive, timeout", "READY, summed - 4, alive, timeout"),),
        *sums("slow_rank", TWO, 1),
        2,
        DEEP,
    ),
    Mutant(
        "credit_of_nothing_kept_back",
        "linear_all_reduce.two_shots",
        (("if turn > 0:  # in", "if turn > 1:  # in"),),
        *sums("exact", TWO, [(99, 5, 4)]),
        2,
        ONE_CHANNEL | DEEP | {"timeout": 1.0},
        CollectiveTimeoutError,
    ),
    Mutant(
        "slices_of_the_switch_too_short",
        "linear_all_reduce.by_switch",
        (("(TILE // LINE + WORLD - 1) // WORLD", "TILE // LINE // WORLD"),),
        *sums("exact", BY_SWITCH, SHAPES),
        3,
        DEEP,
    ),
    Mutant(
        "switch_sums_without_waiting",
        "linear_all_reduce.by_switch",
        (("READY, sent - 2, alive", "READY, sent - 4, alive"),),
        *sums("back_to_back", BY_SWITCH, 1),
        2,
        DEEP,
    ),
    Mutant(
        "chunk_too_few",
        "_gather.await_rows",
        (("- 1) // part)", "- 1) // part - 1)"),),
        *ANY_ORDER,
        3,
    ),
    Mutant(
        "straddling_tile_of_one_rank",
        "_gather.await_rows",
        (("rounds = tl.maximum(rounds, needed)", "rounds = needed"),),
        *ANY_ORDER,
        3,
    ),
    Mutant(
        "one_channel_awaited",
        "_gather.await_rows",
        (("chunk >= oldest", "chunk >= latest"),),
        *ANY_ORDER,
        3,
    ),
    Mutant(
        "flags_not_put_back",
        "_gather.finish",
        (("== programs - 1:", "== programs:"),),
        *ANY_ORDER,
        3,
    ),
    Mutant(
        "rows_of_rank_0_first",
        "all_gather_linear.gather_and_multiply",
        (
            ("row_blocks_of(rank, small", "row_blocks_of(0, small"),
            ("row_block_at(turn, rank, small", "row_block_at(turn, 0, small"),
        ),
        *OWN_FIRST,
        3,
    ),
    Mutant(
        "copies_before_rows_are_staged",
        "_copies.gathered_by_copies",
        (("    barrier(workspace)\n    with _beside", "    with _beside"),),
        "test_all_gather_linear.test_by_copies",
        "gather_body.by_copies",
        ([(5, 19), (5, 19)],),
    ),
    Mutant(
        "last_chunk_not_copied",
        "_copies.gathered_by_copies",
        (("range(0, most, part)", "range(0, most - part, part)"),),
        "test_all_gather_linear.test_by_copies",
        "gather_body.by_copies",
        ([(5, 19)],),
        2,
        {"timeout": 1.0},
        CollectiveTimeoutError,
    ),
    Mutant(
        "gradient_does_not_wait",
        "all_gather_weight_gradient.gather_and_accumulate",
        (("if exists & (local == 0):", "if exists & (local != 0):"),),
        *gathers("chunks_in_any_order", GRADIENT, (41, 7), 1),
        3,
    ),
    Mutant(
        "gradient_replaces_main_grad",
        "all_gather_weight_gradient.gather_and_accumulate",
        (("if ADD:", "if False:"),),
        *gathers("exact", GRADIENT, [(3, 4), (3, 4)], ()),
    ),
    Mutant(
        "last_rows_of_a_gradient_cut",
        "_gather.row_blocks_of",
        (
            (
                "tl.cdiv(start_of(part + 1, small, larger, unit), BLOCK)",
                "start_of(part + 1, small, larger, unit) // BLOCK",
            ),
        ),
        *gathers("exact", GRADIENT, [(41, 5)], ()),
    ),
)
