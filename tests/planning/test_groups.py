"""Rows of a group, measured between interpreted ranks: all agree, the group goes by it, bits stay."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tp_kernels import ParallelGroup, UnsupportedError, explain
from tp_kernels.planning import GroupRows, Limits, groups, tune_groups

CPU = torch.device("cpu")
SIZES = {"rows": 40, "n": 24, "k": 16, "dtype": torch.float32, "device": CPU}


@pytest.mark.parametrize("operation", groups.OPERATIONS)
def test_ranks_agree_on_what_is_fastest(interpreted, operation):
    first, second = interpreted(2).run(choose, operation)
    assert first == second and first["winner"] == 7
    # torch's product of the rows of a larger group may have other bits.
    assert operation == "all_gather_linear" or first["measured"] == [7, 16, 128]
    assert first["measured"] + first["dropped"] == [7, 16, 128]


def choose(operation: str) -> dict[str, Any]:
    """One candidate is the fastest by the clock of every call; calls are real."""
    seconds = {16: 3.0, 7: 1.0, 128: 2.0}
    with ParallelGroup(timeout=30) as group:
        real = groups._Overlap.seconds

        def timed(self: groups._Overlap, size: GroupRows) -> float:
            real(self, size)
            return seconds[size.rows]

        with (
            mock.patch.object(groups._Overlap, "seconds", timed),
            mock.patch.object(groups, "candidates", return_value=[128, 7]),
        ):
            tuned = tune_groups(group, operation, **SIZES, limits=Limits(rounds=1))
        shape = {"rows": 40, "in_features": 16, "out_features": 24, "group": group}
        reason = explain(operation, **shape, implementation="cuda").reason
        assert "groups of 7 rows (measured)" in reason, reason
        other = explain(operation, **shape | {"rows": 39}, implementation="cuda").reason
        assert "groups of 16 rows" in other and "measured" not in other
        return {
            "winner": tuned.winner.rows,
            "measured": sorted(size.rows for size in tuned.timings),
            "dropped": [size.rows for size in tuned.dropped],
        }


def test_nothing_is_kept_of_what_failed(interpreted):
    interpreted(2).run(fail)


def fail() -> None:
    with ParallelGroup(timeout=30) as group:
        with (
            mock.patch.object(groups._Overlap, "digest", side_effect=RuntimeError("no")),
            pytest.raises(
                UnsupportedError, match=r"built-in choice .* does not work: rank 0: Runt"
            ),
        ):
            tune_groups(group, "linear_all_reduce", **SIZES)
        assert not group.group_sizes
        for change, why in (
            ({"operation": "copy_linear"}, "use one of linear_all_reduce"),
            ({"rows": 0}, "of 0 rows"),
        ):
            given = {"operation": "linear_all_reduce"} | SIZES | change
            with pytest.raises(UnsupportedError, match=why):
                tune_groups(group, given.pop("operation"), **given)
        with (
            mock.patch.object(groups, "direct_obstacle", return_value=None),
            pytest.raises(UnsupportedError, match="there are no groups"),
        ):
            tune_groups(group, "linear_all_reduce", **SIZES)
