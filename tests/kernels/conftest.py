"""Rank processes in which Triton kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import rank_pools
from tp_kernels import Ranks


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[int], Ranks]]:
    """As `world`, with the Triton interpreter in every rank."""
    with rank_pools({"TRITON_INTERPRET": "1"}) as get:
        yield get
