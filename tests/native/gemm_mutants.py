"""Defects of the Hopper products that their C++ tests have to find; see mutants.py.

A fence between proxies is nothing on the host: that it is there is a gate of the machine code, see
tests/build/machine_code.py.
"""

from __future__ import annotations

from .mutants import RACE, Mutant

MAINLOOP, EPILOGUE = "cuda/gemm_sm90/mainloop.h", "cuda/gemm_sm90/epilogue.h"
SIGNAL, AWAIT, SEND = (f"cuda/gemm_sm90/{name}.h" for name in ("signal", "await", "send"))
RING, EDGES, PARTS = (f"test_gemm_signal.{name}" for name in ("ring", "edges", "empty_part"))
VAIN = "a barrier is waited for in vain"
WRONG = ", not "
MORE = "more arrivals at a barrier than it has"
POISON = "65535"

GEMM_MUTANTS = (
    # The ring of stages.
    Mutant(
        "stage_released_before_its_products",
        MAINLOOP,
        (
            ("if (block > 0) arrive_as_warp(shared.empty[before]);", ""),
            (
                "    products.wait<1>(sums);",
                "    arrive_as_warp(shared.empty[stage]);\n    products.wait<1>(sums);",
            ),
            ("  if (stages > 0) arrive_as_warp(shared.empty[before]);\n", ""),
        ),
        *(RING, RACE, "thread"),
    ),
    Mutant(
        "phase_that_does_not_turn",
        "cuda/gemm_sm90/config.h",
        (("      parity ^= 1;\n", ""),),
        *(RING, MORE),
    ),
    Mutant(
        "products_not_awaited",
        MAINLOOP,
        (("  products.wait<0>(sums);\n", ""),),
        *(RING, "products that nobody has waited for"),
    ),
    Mutant(
        "stage_read_before_it_is_full",
        MAINLOOP,
        (("    shared.full[stage].wait(place.parity);\n", ""),),
        *(RING, MORE),
    ),
    Mutant(
        "stage_loaded_before_it_is_empty",
        MAINLOOP,
        (("        shared.empty[place.stage].wait(place.parity ^ 1);\n", ""),),
        *(RING, MORE),
    ),
    Mutant(
        "one_warp_less_frees_a_stage",
        MAINLOOP,
        (
            (
                "shared.empty[stage].init(4 * Config::kGroups)",
                "shared.empty[stage].init(4 * Config::kGroups - 1)",
            ),
        ),
        *(RING, RACE, "thread"),
    ),
    Mutant(
        "turns_of_teams_swapped",
        MAINLOOP,
        (("team == 0 ? 1 : 0", "team == 0 ? 0 : 1"),),
        *(RING, VAIN),
    ),
    Mutant(
        "tile_replaced_too_early",
        MAINLOOP,
        (("  shared.done[next.place].wait(next.parity ^ 1);\n", ""),),
        *(PARTS, RACE, "thread"),
    ),
    Mutant(
        "sums_of_the_tile_before",
        MAINLOOP,
        (("    for (float& sum : atom) sum = 0;", "    for (float& sum : atom) sum = 1;"),),
        *(RING, WRONG),
    ),
    # Layouts.
    Mutant(
        "step_along_k",
        "cuda/hopper.h",
        (("major == Major::K ? 32 : 16 * 128", "major == Major::K ? 32 : 8 * 128"),),
        *(PARTS, WRONG),
    ),
    Mutant(
        "panels_of_columns",
        "cuda/gemm_sm90/mainloop.h",
        (
            (
                "load_box(map, barrier, to + panel * kAtomBytes, row + 64 * panel, k)",
                "load_box(map, barrier, to + panel * kAtomBytes, row, k)",
            ),
        ),
        *("test_gemm_await.gradients", WRONG.strip()),
    ),
    # What is stored.
    Mutant(
        "rows_beyond_the_edge",
        EPILOGUE,
        (("if (first + row < target.rows && left > 0)", "if (left > 0)"),),
        *(PARTS, RACE, "thread"),
    ),
    Mutant(
        "columns_beyond_the_edge",
        EPILOGUE,
        (
            (
                "const std::int32_t bytes = left < kLineBytes ? left : kLineBytes;",
                "const std::int32_t bytes = kLineBytes;",
            ),
        ),
        *(PARTS, RACE, "thread"),
    ),
    Mutant(
        "slice_read_before_it_is_written",
        EPILOGUE,
        (("      sync_warp();\n      TPK_NO_UNROLL\n", "      TPK_NO_UNROLL\n"),),
        *(PARTS, RACE, "thread"),
    ),
    Mutant(
        "signal_before_the_stores",
        SIGNAL,
        (
            (
                "    sync_threads(1 + team, Config::kTeamThreads);",
                "    //",
            ),
        ),
        *(PARTS, RACE, "thread"),
    ),
    Mutant(
        "signal_of_the_next_group",
        SIGNAL,
        (("tile.mark = place.group", "tile.mark = place.group == 0 ? 1 : place.group - 1"),),
        *(EDGES, RACE, "thread"),
    ),
    # Rows that arrive.
    Mutant(
        "rows_not_awaited",
        AWAIT,
        (("this->arrived_.is_own(tile.row, stop) || this->arrived_.wait(tile.row, stop)", "true"),),
        *("test_gemm_await.straddling_tiles", RACE, "thread"),
    ),
    Mutant(
        "chunk_before_awaited",
        AWAIT,
        (
            (
                "await(word(w, w.rank, channel, kDone), rounds,",
                "await(word(w, w.rank, channel, kDone), rounds - 1,",
            ),
        ),
        *("test_gemm_await.straddling_tiles", RACE, "thread"),
    ),
    Mutant(
        "bias_of_other_columns_in_other_rows",
        AWAIT,
        (
            (
                "store_tile<Config>(sums, shared, target, added, of_.activation);",
                "store_tile<Config>(sums, shared, target, {added.corner, 1}, of_.activation);",
            ),
        ),
        *("test_gemm_await.straddling_tiles", WRONG.strip()),
    ),
    Mutant(
        "void_sums_stored",
        AWAIT,
        (("    if (!alive) return;\n", ""),),
        *("test_gemm_await.missing_chunk_of_a_sum", POISON),
    ),
    Mutant(
        "flags_not_cleared",
        AWAIT,
        (("      *word(w, w.rank, channel, kDone) = 0;\n", ""),),
        *("test_gemm_await.gradients", " is "),
    ),
    # Rows that are sent.
    Mutant(
        "credit_not_awaited",
        SEND,
        (("      observe(shared, kCredit, earlier(channel_.epoch, w.depth));", "      //"),),
        *("test_gemm_send.slow_rank", RACE, "thread"),
    ),
    Mutant(
        "ready_before_the_stores",
        SEND,
        (("    sync();  // one thread releases for all\n", ""),),
        *("test_gemm_send.empty_rank", RACE, "thread"),
    ),
    Mutant(
        "ready_one_step_early",
        SEND,
        (("if (tile.mark == w.world - 2)", "if (tile.mark == 0)"),),
        *("test_gemm_send.empty_rank", RACE, "thread"),
    ),
    Mutant(
        "bias_of_every_rank",
        SEND,
        (
            (
                "{chunk, Config::kN, tile.rows, Config::kN}, Added{},",
                "{chunk, Config::kN, tile.rows, Config::kN}, Added{of_.bias, 0},",
            ),
        ),
        *("test_gemm_send.five_ranks", WRONG),
    ),
    Mutant(
        "sum_of_the_turn_itself",
        SEND,
        (("sum(earlier(channel_.epoch, 1), shared)", "sum(channel_.epoch, shared)"),),
        *("test_gemm_send.edges", WRONG),
    ),
    Mutant(
        "wait_that_expired_ignored",
        SEND,
        (("channel_.alive = channel_.alive && !failed[rank];", "(void)failed;"),),
        *("test_gemm_send.absent_rank", POISON),
    ),
)
