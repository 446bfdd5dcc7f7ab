"""Whether there is a core for a communication thread."""

from __future__ import annotations

import pytest

from tp_kernels.comm.cores import Cores, spare_cores


def ranks(*masks: str, threads: int = 1) -> list[Cores]:
    return [Cores(frozenset(map(int, mask.split())), threads) for mask in masks]


@pytest.mark.parametrize(
    ("cores", "spare"),
    [
        (ranks("0 1", "0 1"), False),
        (ranks("0 1 2", "0 1 2"), False),  # one of the two would go without
        (ranks("0 1 2 3", "0 1 2 3"), True),
        (ranks("0 1 2 3", "0 1 2 3", threads=2), False),
        (ranks("0", "1"), False),
        (ranks("0 1", "2 3"), True),
        (ranks("0 1", "2 3", threads=2), False),
        (ranks("0 1", "1 2"), False),  # one core in common
        (ranks("0", "0 1 2 3"), False),  # rank 0 is pinned
        (ranks("0 1 2 3", "0"), False),  # rank 1 is
        (ranks("0 1", "2 3", "4"), False),  # all ranks or none
        (ranks("0 1 2 3 4 5"), True),
    ],
)
def test_spare_cores(cores, spare):
    assert spare_cores(cores)[0] == spare


def test_the_reason_counts_those_who_share():
    assert spare_cores(ranks("0 1", "0 1")) == (False, "2 cores for 2 compute threads of all ranks")
    three = ranks("2 3 4", "0 1", "0 1", threads=2)
    assert spare_cores(three) == (
        False,
        "2 cores for 4 compute threads of 2 ranks, rank 1 among them",
    )
    apart = ranks("0 1", "2 3")
    assert spare_cores(apart) == (True, "2 cores for 1 compute threads of rank 1")


def test_json_round_trip():
    here = Cores.current()
    assert here.cpus and here.threads >= 1
    assert Cores.from_json(here.to_json()) == here
