"""Defects that the tests of products that signal by groups have to find; see product_mutants.py."""

from __future__ import annotations

from typing import Any

from tests.kernels.mutants import Mutant
from tp_kernels import CollectiveTimeoutError

TESTS = {
    "exact": "test_bits_and_counters",
    "by_groups": "test_group_after_group",
    "programs": "test_programs",
    "waits": "test_waits",
    "sums": "test_sums",
}


def mutant(name: str, where: str, old: str, new: str, body: str, **more: Any) -> Mutant:
    """`old` replaced by `new` in `where`, found by `body` of signalled_body.py."""
    args = (0,) if body == "exact" else ()
    test, body = f"test_linear_signalled.{TESTS[body]}", f"signalled_body.{body}"
    return Mutant(name, where, ((old, new),), test, body, args, 1, **more)


KERNEL = "linear_signalled.multiply_by_groups"
MUTANTS = (
    mutant(
        "rows_of_shorter_parts_misplaced",
        "linear_signalled.tile_at",
        "tl.maximum(part - larger, 0) * of_shorter",
        "tl.maximum(part - larger, 0) * of_longer",
        "exact",
    ),
    mutant(
        "groups_before_are_all_full",
        "linear_signalled.tile_at",
        "(destinations - larger) * tl.minimum(small, before)",
        "(destinations - larger) * before",
        "exact",
    ),
    mutant(
        "rows_of_another_group",
        "linear_signalled.tile_at",
        "start_of(part, small, larger, unit) + before",
        "start_of(part, small, larger, unit) + tl.minimum(before, size)",
        "exact",
    ),
    mutant(
        "last_tiles_of_shorter_parts_missing",
        "linear_signalled.tiles_of",
        "tl.cdiv(rows_in(group, small, size), BLOCK_M)",
        "rows_in(group, small, size) // BLOCK_M",
        "exact",
    ),
    mutant(
        "last_group_missing",
        "linear_signalled.linear_signalled",
        "range(len(groups))",
        "range(len(groups) - 1)",
        "exact",
    ),
    mutant(
        "one_counter_for_all_groups",
        KERNEL,
        "tl.atomic_add(counters + group,",
        "tl.atomic_add(counters,",
        "exact",
    ),
    mutant("every_tile_counts_twice", KERNEL, "group, 1, sem", "group, 2, sem", "exact"),
    mutant(
        "rows_of_the_next_group_overwritten",
        KERNEL,
        "mask=(m < rows)[:, None]",
        "mask=(m < BLOCK_M)[:, None]",
        "exact",
    ),
    mutant(
        "tiles_in_another_order",
        KERNEL,
        "            tile, small, larger",
        "            tile // 10 * 10 + 9 - tile % 10, small, larger",
        "by_groups",
    ),
    mutant(
        "no_multiprocessor_reserved",
        "linear_signalled.programs_of",
        "most - reserved",
        "most",
        "programs",
    ),
    mutant(
        "one_tile_not_awaited",
        "wait_for_group.await_group",
        "tiles + lanes",
        "tiles - 1 + lanes",
        "waits",
    ),
    mutant(
        "one_tile_too_many_awaited",
        "wait_for_group.await_group",
        "tiles + lanes",
        "tiles + 2 + lanes",
        "waits",
        error=CollectiveTimeoutError,
    ),
    mutant(
        "counter_of_another_group",
        "wait_for_group.await_group",
        "counters + group",
        "counters + 1",
        "waits",
    ),
    mutant(
        "incomplete_rows_sent",
        "wait_for_group.await_group",
        "if not alive:",
        "if rank < 0:",
        "waits",
    ),
    mutant(
        "failed_wait_forgotten",
        "wait_for_group.await_group",
        "largest(tl.load(record + lanes * 0)) == 0",
        "rank >= 0",
        "waits",
    ),
    mutant(
        "last_rank_first",
        "sum_parts.add_in_order",
        "range(1, WORLD)",
        "range(WORLD - 1, 0, -1)",
        "sums",
    ),
    mutant(
        "bias_from_the_first_column",
        "sum_parts.add_in_order",
        "(first + start) % width",
        "first % width",
        "sums",
    ),
    mutant(
        "sum_rounded_twice",
        "sum_parts.add_in_order",
        "narrow(total, out",
        "narrow(widen(narrow(total, tl.bfloat16)), out",
        "sums",
    ),
)
