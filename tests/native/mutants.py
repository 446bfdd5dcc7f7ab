"""Defects that the C++ tests of the kernels have to find, as changes of their source.

A mutant is a copy of csrc in which a text is replaced, compiled and run. What only the machine code of a GPU
shows, scopes and orders of its instructions among it, is for the gates of the build: here releases and
acquires are those of the shim (csrc/tests/simt.h).
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "csrc"
PATIENCE = 2  # seconds that a wait lasts for nothing

VARIANTS = {
    "plain": ("-O0",),
    "thread": ("-O0", "-fsanitize=thread"),
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
RACE = "data race"
EARLY = "a block waits that has let the next kernel start"
WRONG = "is false"  # of CHECK
OTHER = ", "  # of CHECK_EQUAL, which names both values


@dataclass(frozen=True)
class Mutant:
    """A defect and who finds it.

    Args:
        name: of the defect.
        path: of the file under csrc.
        changes: (text, replacement); each text is there exactly once.
        test: "program.test" that finds it.
        finding: what it says, a regular expression.
        variant: of VARIANTS, which the program is compiled as.
    """

    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    test: str
    finding: str
    variant: str = "plain"

    def write(self, directory: Path) -> Path:
        """Make the copy; returns its csrc."""
        copy = directory / "csrc"
        shutil.copytree(SOURCE, copy)
        text = (copy / self.path).read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.name}: {self.path} has not one {old!r}"
            text = text.replace(old, new)
        (copy / self.path).write_text(text)
        return copy

    def run(self, directory: Path) -> subprocess.CompletedProcess[str]:
        """What the test makes of it."""
        program, _, name = self.test.partition(".")
        return run(self.write(directory), program, self.variant, directory, name)


def run(
    source: Path, program: str, variant: str, directory: Path, *names: str
) -> subprocess.CompletedProcess[str]:
    """Compile a program of `source` and run the tests of it that are named, or all."""
    binary = directory / program
    folders = [f"-I{source / folder}" for folder in ("include", "cuda", "host", "tests")]
    options = ["-std=c++17", "-ffp-contract=off", f"-DTPK_PATIENCE_SECONDS={PATIENCE}"]
    subprocess.run(
        [
            *("g++", *options, *VARIANTS[variant], *folders),
            *(source / "tests" / f"{program}.cpp", "-o", binary, "-pthread"),
        ],
        check=True,
    )
    return subprocess.run([binary, *names], capture_output=True, text=True, timeout=90)


CREDIT = "observe(c, kCredit, earlier(c.epoch, w.depth))"
BITS, SLOW = "test_cuda_collectives.bits", "test_cuda_collectives.slow_rank"
ABSENT, WAIT = "test_cuda_faults.absent_rank", "test_cuda_faults.wait_for"

MUTANTS = (
    # Publish and observe.
    Mutant(
        "release_without_barrier",
        "cuda/channel.h",
        (("  sync_block();  // one thread releases for the whole block\n", ""),),
        *(BITS, RACE, "thread"),
    ),
    Mutant(
        "observed_without_barrier",
        "cuda/channel.h",
        (("c.alive = !sync_block_or(failed);", "c.alive = !failed;"),),
        *(BITS, f"{RACE}|{EARLY}", "thread"),
    ),
    Mutant(
        "store_without_release",
        "tests/simt.h",
        (("store(value, std::memory_order_release)", "store(value, std::memory_order_relaxed)"),),
        *(BITS, RACE, "thread"),
    ),
    Mutant(
        "load_without_acquire",
        "tests/simt.h",
        (
            (
                "  block().pause();\n  return atomic(word).load(std::memory_order_acquire)",
                "  block().pause();\n  return atomic(word).load(std::memory_order_relaxed)",
            ),
        ),
        *(BITS, RACE, "thread"),
    ),
    Mutant(
        "data_not_awaited",
        "cuda/reduce_scatter.h",
        (("    if (!observe(c, kReady, c.epoch)) return;\n", ""),),
        *(SLOW, WRONG),
    ),
    Mutant(
        "sums_not_awaited",
        "cuda/rms_norm.h",
        (
            (
                "    tell(c, kCredit, scattered);\n    if (!observe(c, kReady, c.epoch)) return;\n",
                "    tell(c, kCredit, scattered);\n",
            ),
        ),
        *(SLOW, RACE, "thread"),
    ),
    Mutant(
        "partial_sums_not_awaited",
        "cuda/rms_norm.h",
        (
            (
                "    shared[threads + thread] = partial;\n  }\n  sync_block();\n",
                "    shared[threads + thread] = partial;\n  }\n",
            ),
        ),
        *(BITS, RACE, "thread"),
    ),
    Mutant(
        "successor_started_before_the_last_wait",
        "cuda/all_reduce.h",
        (
            (
                "    let_start(first + step >= bytes);\n    sum_lines",
                "    let_start(true);\n    sum_lines",
            ),
        ),
        *(BITS, EARLY),
    ),
    # Reuse of buffers.
    Mutant(
        "credit_removed",
        "cuda/all_gather.h",
        ((CREDIT, "true"),),
        *(SLOW, RACE, "thread"),
    ),
    Mutant(
        "credit_of_the_round_before",
        "cuda/reduce_scatter.h",
        (("earlier(c.epoch, w.depth)", "earlier(c.epoch, w.depth + 1)"),),
        *(SLOW, RACE, "thread"),
    ),
    Mutant(
        "credit_before_reading",
        "cuda/reduce_scatter.h",
        (
            ("    publish(c, kCredit, c.epoch);\n", ""),
            (
                "    const std::int32_t mine =",
                "    publish(c, kCredit, c.epoch);\n    const std::int32_t mine =",
            ),
        ),
        *(SLOW, RACE, "thread"),
    ),
    Mutant(
        "one_buffer_for_all_rounds",
        "include/tpk/channel.h",
        (("(epoch & (w.depth - 1))", "(epoch & 0)"),),
        *(SLOW, RACE, "thread"),
    ),
    Mutant(
        "epoch_not_kept",
        "cuda/channel.h",
        (("if (thread_index() == 0) *word", "if (thread_index() == -1) *word"),),
        *(SLOW, WRONG),
    ),
    # Counters.
    Mutant(
        "counter_compared_for_equality",
        "cuda/channel.h",
        (
            (
                "static_cast<std::uint32_t>(expected)) >= 0",
                "static_cast<std::uint32_t>(expected)) == 0",
            ),
        ),
        *(WAIT, OTHER),
    ),
    Mutant(
        "counter_compared_without_wrap",
        "cuda/channel.h",
        (
            (
                "  return static_cast<std::int32_t>(static_cast<std::uint32_t>(seen) -\n"
                "                                   static_cast<std::uint32_t>(expected)) >= 0;",
                "  return seen >= expected;",
            ),
        ),
        *(WAIT, OTHER),
    ),
    Mutant(
        "epoch_overflows",
        "cuda/channel.h",
        (("return c.epoch = earlier(c.epoch, -1);", "return ++c.epoch;"),),
        *("test_cuda_collectives.epochs_wrap", "signed integer overflow", "address"),
    ),
    # Failures.
    Mutant(
        "record_not_claimed",
        "cuda/channel.h",
        (("if (claim(record + kState, kIntact, kFilling))", "if (true)"),),
        *(ABSENT, RACE, "thread"),
    ),
    Mutant(
        "record_of_another_rank",
        "cuda/channel.h",
        (("record[kPeer] = wait.peer;", "record[kPeer] = wait.rank;"),),
        *(ABSENT, OTHER),
    ),
    Mutant(
        "failure_forgotten",
        "cuda/channel.h",
        (("  return c.alive;\n", "  return true;\n"),),
        *(ABSENT, WRONG),
    ),
    Mutant(
        "failed_workspace_used",
        "cuda/channel.h",
        (("load_relaxed(w.record + kState) == kIntact}", "true}"),),
        *("test_cuda_faults.failed_rank_is_silent", f"{OTHER}|{WRONG}"),
    ),
    Mutant(
        "failed_record_waited_for",
        "cuda/wait.h",
        (("if (load_relaxed(record + kState) == kIntact) await", "await"),),
        *(WAIT, WRONG),
    ),
    # Sums.
    Mutant(
        "own_summand_first",
        "cuda/sum.h",
        (
            ("const int source = base + r;", "const int source = (base + r + w.rank) % w.world;"),
            ("if (source >= w.world) continue;", "if (base + r >= w.world) continue;"),
        ),
        *(BITS, WRONG),
    ),
    Mutant(
        "rounded_at_every_addition",
        "cuda/sum.h",
        (
            (
                "totals.values[k][i] += values[i];",
                "{ const float sums[2] = {totals.values[k][i] + values[i], 0}; float rounded[2];\n"
                "Number::widen(Number::narrow(sums), rounded); totals.values[k][i] = rounded[0]; }",
            ),
        ),
        *(BITS, WRONG),
    ),
    Mutant(
        "sign_of_zero_lost",
        "cuda/sum.h",
        (("value = -0.0f;", "value = 0.0f;"),),
        *("test_cuda_collectives.special_numbers", WRONG),
    ),
    Mutant(
        "sum_of_another_round",
        "cuda/all_reduce.h",
        (("sum_lines<Number>(c, scattered,", "sum_lines<Number>(c, c.epoch,"),),
        *(BITS, WRONG),
    ),
    Mutant(
        "residual_before_rounding",
        "cuda/rms_norm.h",
        (("      widen<Number>(line, values);\n      widen", "      widen"),),
        *(BITS, WRONG),
    ),
    Mutant(
        "float8_not_saturated",
        "include/tpk/number.h",
        (("if (size >= 0x43e00000u) byte = 0x7e;", ""),),
        *("test_cuda_collectives.narrow_to_e4m3", OTHER),
    ),
    # Lengths and places.
    Mutant(
        "peer_left_out",
        "cuda/lines.h",
        (
            (
                "for (int step = 1; step < w.world; ++step) {",
                "for (int step = 2; step < w.world; ++step) {",
            ),
        ),
        *(BITS, WRONG),
    ),
    Mutant(
        "end_not_seen",
        "cuda/lines.h",
        (("return bytes >= kLineBytes && reinterpret_cast", "return reinterpret_cast"),),
        *(BITS, "AddressSanitizer: heap-buffer-overflow", "address"),
    ),
    Mutant(
        "alignment_not_seen",
        "cuda/lines.h",
        ((" && reinterpret_cast<std::uintptr_t>(at) % kLineBytes == 0", ""),),
        *("test_cuda_collectives.alignment", "access of 16 bytes at"),
    ),
    Mutant(
        "remainder_to_every_rank",
        "include/tpk/order.h",
        (("unit * smaller(rank, more)", "unit * more"),),
        *("test_order.division", OTHER),
    ),
    Mutant(
        "chunk_that_straddles_left_out",
        "include/tpk/order.h",
        (("(high * width - 1) / part", "high * width / part - 1"),),
        *("test_order.arrival", OTHER),
    ),
    Mutant(
        "peers_one_after_the_other",
        "include/tpk/order.h",
        (("% (world - 1)) % world)", "/ blocks(rank) % (world - 1)) % world)"),),
        *("test_order.arrival_order", ""),
    ),
    Mutant(
        "short_part_counted_as_full",
        "include/tpk/order.h",
        (("row += smaller(division.rows(p), group * size);", "row += group * size;"),),
        *("test_order.row_groups", OTHER),
    ),
)

# Programs and variants, which find nothing without a defect.
UNCHANGED = tuple(sorted({(mutant.test.partition(".")[0], mutant.variant) for mutant in MUTANTS}))
