"""Defects that the tests of the kernels have to find, as changes of their source.

A mutant is a copy of the package tp_kernels.kernels in which a text is replaced. What the interpreter cannot
show, because there a program has one thread and every processor the same caches, is in test_aot.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tp_kernels
from tp_kernels import CollectiveTimeoutError

SOURCE = Path(tp_kernels.__file__).parent / "kernels"


@dataclass(frozen=True)
class Mutant:
    """A defect and who finds it.

    Args:
        name: of the defect.
        where: "file.function"; every text has to be there exactly once.
        changes: (text, replacement) pairs.
        test: the test that finds it, "file.function" (of test_aot.py where there is no `body`).
        body, args, options, size: the same test as a function, "file.function", and number of ranks.
        error: with which it does.
    """

    name: str
    where: str
    changes: tuple[tuple[str, str], ...]
    test: str
    body: str = ""
    args: tuple[Any, ...] = ()
    size: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    error: type[Exception] = AssertionError

    def write(self, directory: Path) -> str:
        """Make the copy; returns its name as a package."""
        package = f"mutant_{self.name}"
        (directory / package).mkdir()
        stem, _, function = self.where.partition(".")
        for path in SOURCE.glob("*.py"):
            text = path.read_text()
            (directory / package / path.name).write_text(
                self.change(text, function) if path.stem == stem else text
            )
        return package

    def change(self, text: str, function: str) -> str:
        found = re.search(rf"(?ms)^( *)def {function}\(.*?(?=^\1\S(?<!\))|\Z)", text)
        assert found, f"{self.name}: there is no {self.where}"
        changed = found[0]
        for old, new in self.changes:
            assert changed.count(old) == 1, f"{self.name}: {self.where} has not one {old!r}"
            changed = changed.replace(old, new)
        return text[: found.start()] + changed + text[found.end() :]


READY = "        publish(table, rank, channel, READY, epoch, alive, WORLD, STRIDE, LANES)\n"
CREDIT = "        publish(table, rank, channel, CREDIT, epoch, alive, WORLD, STRIDE, LANES)\n"
COUNT = (
    "        tl.debug_barrier()  # one thread releases for the whole block\n"
    '        tl.atomic_add(counters + group, 1, sem="release", scope="gpu")\n'
)
LATE = "largest(tl.where(seen - reached < 0, late, 0))"
ONE_BUFFER = {"depth": 1, "channels": 1}

INTERPRETED = (
    Mutant(
        "data_not_awaited",
        "all_reduce.one_shot",
        (("READY, epoch, alive, timeout", "READY, epoch - 1, alive, timeout"),),
        "test_collectives.test_back_to_back",
        *("body.back_to_back", ("all_reduce_1", 1)),
    ),
    Mutant(
        "sum_not_awaited",
        "all_reduce.two_shots",
        (
            (
                f"{READY}        publish(table, rank, channel, CREDIT, scattered, alive, "
                "WORLD, STRIDE, LANES)\n        alive = observe(\n"
                "            table, record, rank, channel, READY, epoch, alive",
                f"{READY}        publish(table, rank, channel, CREDIT, scattered, alive, "
                "WORLD, STRIDE, LANES)\n        alive = observe(\n"
                "            table, record, rank, channel, READY, epoch - 1, alive",
            ),
        ),
        "test_collectives.test_slow_rank",
        *("body.slow_rank", ("all_reduce_2", 1), 2, {"channels": 1}),
    ),
    Mutant(
        "a_rank_not_awaited",
        "_signals.observe",
        (("used = (peers < WORLD)", "used = (peers < WORLD - 1)"),),
        "test_collectives.test_back_to_back",
        *("body.back_to_back", ("all_gather", 2), 3),
    ),
    Mutant(
        "signal_before_the_stores",
        "all_reduce.one_shot",
        (
            (READY, ""),
            (
                "        for start in range(0, part, BLOCK):\n            offsets = start + "
                "tl.arange(0, BLOCK)\n            mask = (offsets < length) & alive\n"
                "            value",
                f"{READY}        for start in range(0, part, BLOCK):\n            offsets = start + "
                "tl.arange(0, BLOCK)\n            mask = (offsets < length) & alive\n"
                "            value",
            ),
        ),
        "test_collectives.test_slow_rank",
        *("body.slow_rank", ("all_reduce_1", 1), 2, {"channels": 1}),
    ),
    Mutant(
        "credit_removed",
        "_gather.gather_rows",
        (("CREDIT, epoch - DEPTH, alive", "CREDIT, epoch - DEPTH - 1000, alive"),),
        "test_collectives.test_slow_rank_with_one_buffer",
        *("body.slow_rank", ("all_gather", 1), 2, ONE_BUFFER),
    ),
    Mutant(
        "credit_of_the_round_before",
        "reduce_scatter.scatter",
        (("CREDIT, epoch - DEPTH, alive", "CREDIT, epoch - DEPTH - 1, alive"),),
        "test_collectives.test_slow_rank_with_one_buffer",
        *("body.slow_rank", ("reduce_scatter", 1), 2, ONE_BUFFER),
    ),
    Mutant(
        "credit_before_reading",
        "all_reduce_rms_norm.one_shot",
        (
            (CREDIT, ""),
            (
                "        for row in range(0, tl.minimum(rows - first, part)):",
                f"{CREDIT}        for row in range(0, tl.minimum(rows - first, part)):",
            ),
        ),
        "test_collectives.test_slow_rank_with_one_buffer",
        *("body.slow_rank", ("rms_norm_1", 1), 2, ONE_BUFFER),
    ),
    Mutant(
        "one_buffer_for_all_rounds",
        "_signals.buffer",
        (("(epoch & (DEPTH - 1))", "(epoch & 0)"),),
        "test_collectives.test_slow_rank",
        *("body.slow_rank", ("all_reduce_1", 1), 2, {"channels": 1}),
    ),
    Mutant(
        "epoch_not_advanced",
        "_signals.leave",
        (("mask=alive", "mask=alive & (epoch == 0)"),),
        "test_collectives.test_back_to_back",
        *("body.back_to_back", ("reduce_scatter", 1)),
    ),
    Mutant(
        "counter_compared_for_equality",
        "_signals.wait",
        ((LATE, "largest(tl.where(seen != reached, late, 0))"),),
        "test_collectives.test_slow_rank",
        *(
            "body.slow_rank",
            ("all_reduce_1", 1),
            2,
            {"channels": 1, "timeout": 1.0},
            CollectiveTimeoutError,
        ),
    ),
    Mutant(
        "counter_compared_without_wrap",
        "_signals.wait",
        ((LATE, "largest(tl.where(seen < reached, late, 0))"),),
        "test_collectives.test_epochs_wrap",
        *(
            "body.back_to_back",
            ("all_gather", 0),
            2,
            {"epoch": 2**31 - 3, "timeout": 1.0},
            CollectiveTimeoutError,
        ),
    ),
    Mutant(
        "signals_after_a_failure",
        "_signals.publish",
        ((" & alive", ""),),
        "test_collectives.test_late_for_one",
        *("body.late_for_one", ("all_reduce_2",), 3),
    ),
    Mutant(
        "failure_forgotten",
        "_signals.wait",
        (("return alive & (verdict != 2)", "return alive"),),
        "test_collectives.test_late_for_one",
        *("body.late_for_one", ("all_reduce_2",), 3),
    ),
    Mutant(
        "record_of_another_rank",
        "_signals.wait",
        (("tl.store(record + 5, lane)", "tl.store(record + 5, rank)"),),
        "test_collectives.test_absent_rank",
        *("body.absent_rank", ("all_reduce_1", 1)),
    ),
    Mutant(
        "own_summand_first",
        "_rounds.sum_of_ranks",
        (
            (
                "for source in tl.static_range(WORLD):\n",
                "for turn in tl.static_range(WORLD):\n        source = (rank + turn) % WORLD\n",
            ),
            ("if source == 0:", "if turn == 0:"),
        ),
        "test_collectives.test_bits",
        *("body.bits", ("reduce_scatter", [(7, 5)]), 3),
    ),
    Mutant(
        "rounded_at_every_addition",
        "_rounds.sum_of_ranks",
        (
            (
                "total += part",
                "total += part\n            if own.dtype == tl.float16:\n"
                "                total = total.to(tl.float16).to(tl.float32)",
            ),
        ),
        "test_collectives.test_bits",
        *("body.bits", ("all_reduce_1", [(7, 5)]), 3),
    ),
    Mutant(
        "peer_left_out",
        "_rounds.send_to_peers",
        (
            (
                "for step in range(1, WORLD):  #",
                "for step in range(2, WORLD):  #",
            ),
        ),
        "test_collectives.test_bits",
        *("body.bits", ("all_gather", [(7, 5)])),
    ),
    Mutant(
        "remainder_to_every_rank",
        "_rounds.start_of",
        (("tl.minimum(rank, larger)", "larger"),),
        "test_collectives.test_bits",
        *("body.bits", ("reduce_scatter", [(7, 5)])),
    ),
    Mutant(
        "sum_of_another_round",
        "all_reduce.two_shots",
        (("channel, scattered, offsets", "channel, epoch, offsets"),),
        "test_collectives.test_bits",
        *("body.bits", ("all_reduce_2", [(7, 5)])),
    ),
    Mutant(
        "bias_of_two_ranks",
        "all_reduce_rms_norm._add_to_row",
        (("total += widen(", "total += 2.0 * widen("),),
        "test_collectives.test_bits",
        *("body.bits", ("rms_norm_1", [(1, 3), (2, 5)])),
    ),
    Mutant(
        "residual_before_rounding",
        "all_reduce_rms_norm._add_to_row",
        (("narrow(widen(value) +", "narrow(total +"),),
        "test_collectives.test_bits",
        *("body.bits", ("rms_norm_2", [(1, 3), (1, 3), (5, 64)])),
    ),
)

# Found in what the compiler makes of them, by test_aot.py.
COMPILED = (
    Mutant(
        "release_without_barrier",
        "_signals.publish",
        (("    tl.debug_barrier()  # one thread releases for the whole block\n", ""),),
        "test_mutant_is_found",
    ),
    Mutant(
        "release_on_this_device_only",
        "_device.store_release",
        (("st.release.sys", "st.release.gpu"),),
        "test_mutant_is_found",
    ),
    Mutant(
        "volatile_store",
        "_device.store_release",
        (("st.release.sys.global", "st.volatile.global"),),
        "test_mutant_is_found",
    ),
    Mutant(
        "rows_not_ordered_before_tma",
        "_device.order_before_tma",
        (("fence.proxy.async.global; ", ""),),
        "test_mutant_is_found",
        options={
            "kernel": "all_gather_linear.gather_and_multiply",
            "shape": "many",
            "tma": True,
        },
    ),
    Mutant(
        "load_without_acquire",
        "_device.load_acquire",
        (("ld.acquire.sys", "ld.relaxed.sys"),),
        "test_mutant_is_found",
    ),
    Mutant(
        "tile_counted_without_barrier",
        "linear_signalled.multiply_by_groups",
        (("        tl.debug_barrier()  # one thread releases for the whole block\n", ""),),
        "test_mutant_is_found",
        options={"kernel": "linear_signalled.multiply_by_groups", "world": 1, "shape": "many"},
    ),
    Mutant(
        "tile_counted_before_its_stores",
        "linear_signalled.multiply_by_groups",
        (
            (COUNT, ""),
            ("        tl.store(\n", f"{COUNT}        tl.store(\n"),
        ),
        "test_mutant_is_found",
        options={"kernel": "linear_signalled.multiply_by_groups", "world": 1, "shape": "many"},
    ),
    Mutant(
        "tile_counted_without_release",
        "linear_signalled.multiply_by_groups",
        (('sem="release"', 'sem="relaxed"'),),
        "test_mutant_is_found",
        options={"kernel": "linear_signalled.multiply_by_groups", "world": 1, "shape": "many"},
    ),
    Mutant(
        "group_awaited_without_acquire",
        "_device.load_acquire",
        (("ld.acquire.sys", "ld.relaxed.sys"),),
        "test_mutant_is_found",
        options={"kernel": "wait_for_group.await_group", "world": 1},
    ),
)
