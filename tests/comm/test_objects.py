"""Small values between ranks: what comes back, of which types, and what is refused."""

from __future__ import annotations

import enum
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_kernels import (
    GroupMismatchError,
    ParallelGroup,
    TpKernelsError,
    UnsupportedError,
    all_gather_object,
    broadcast_object,
)
from tp_kernels.comm import barrier
from tp_kernels.comm.objects import INLINE, MAX_DEPTH, decode, encode

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 127, 128, -128, -129, 2**63, -(2**64), 3**500),
    *(0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, "", "x", "Ä€\0𝄞", "\ud800", b"", b"\0\xff"),
    *([], (), {}, [1, "1", b"1", 1.0, True], ((),), [[], [()]], {"a": {"b": [1, (2, 3)]}}),
    {None: 1, True: 2, 2: 3, 2.5: 4, "k": 5, b"k": 6, (1, ("x",)): 7},
)


class Color(enum.IntEnum):
    RED = 1


REFUSED: dict[str, Any] = {
    "numpy.float64": np.float64(1.0),
    "Tensor": torch.ones(1),
    "builtins.set": {1},
    "builtins.complex": 1j,
    "builtins.bytearray": bytearray(b"x"),
    "OrderedDict": OrderedDict(a=1),
    "Color": [{"a": Color.RED}],
    "torch.Size": (torch.Size([1]),),
    "object": {"a": [object()]},
    "frozenset": {frozenset(): 1},
}


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types all the way down, zeros and NaNs included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, float):
        return str(a) == str(b) and (a == b or a != a)
    return bool(a == b)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(st.characters())
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.binary())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_encoding(value):
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("value", VALUES)
def test_encoding_of_edges(value):
    assert same(decode(encode(value)), value)


@given(values, st.integers(0), st.integers(0))
def test_what_is_not_an_encoded_value(value, cut, change):
    """Damaged bytes are a ValueError or another value, never anything else."""
    data = encode(value)
    for damaged in (data[: cut % len(data)], data + b"N", b"", b"x"):
        with pytest.raises(ValueError, match="not an encoded value"):
            decode(damaged)
    flipped = bytearray(data)
    flipped[change % len(data)] ^= 1 << change % 8
    with suppress(ValueError):
        decode(bytes(flipped))


def groups() -> Iterator[ParallelGroup]:
    for options in ({}, {"provider": "none"}, {"window": 512}):
        with ParallelGroup(timeout=30, **options) as group:
            yield group


def sized(size: int) -> bytes:
    """A value with an encoding of `size` bytes."""
    return Random(size).randbytes(size - 5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchanges(world, size):
    world(size).run(exchange)


def exchange() -> None:
    sizes = (6, INLINE - 1, INLINE, INLINE + 1, 5000, 300_000)
    for group in groups():
        for index, value in enumerate((*VALUES, *map(sized, sizes))):
            source = index % group.size
            assert same(
                broadcast_object(value if group.rank == source else object(), group, source), value
            )
            gathered = all_gather_object([value, group.rank], group)
            assert same(gathered, [[value, rank] for rank in range(group.size)])
        for longest in range(group.size):  # one rank needs the second exchange
            mine = sized(4000 if group.rank == longest else 10)
            expected = [sized(4000 if rank == longest else 10) for rank in range(group.size)]
            assert all_gather_object(mine, group) == expected


def test_back_to_back(world):
    world(3).run(repeat)


def repeat() -> None:
    shared = Random(1)
    with ParallelGroup(timeout=30) as group:
        for call in range(200):
            source, size = shared.randrange(group.size), shared.choice((10, 100, 3000))
            assert broadcast_object((call, sized(size)), group, source) == (call, sized(size))
            gathered = all_gather_object((call, group.rank), group)
            assert gathered == [(call, rank) for rank in range(group.size)]


@pytest.mark.parametrize("size", [1, 3])
def test_refused_values(world, size):
    """On every rank, naming the type and the rank, and without a wait; the group goes on."""
    world(size).run(refuse)


def refuse() -> None:
    for group in groups():
        culprit = group.size - 1
        start = time.monotonic()
        for name, value in REFUSED.items():
            for call in (all_gather_object, partial(broadcast_object, source=culprit)):
                with pytest.raises(UnsupportedError, match=f"rank {culprit}: .*{name}") as caught:
                    call(value if group.rank == culprit else 1, group)
                assert "use None, bool, int, float, str, bytes, list" in str(caught.value)
        assert time.monotonic() - start < 20
        with pytest.raises(UnsupportedError, match=f"source={group.size} is not a rank"):
            broadcast_object(1, group, group.size)
        assert all_gather_object(1, group) == [1] * group.size
        barrier(group)


def test_depth():
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert same(decode(encode(value)), value)
    cycle: list[Any] = []
    cycle.append(cycle)
    for deep in ([value], {"a": value}, cycle):
        with pytest.raises(UnsupportedError, match=f"nested more than {MAX_DEPTH} deep"):
            encode(deep)


@pytest.mark.parametrize("provider", ["host", "none"])
@pytest.mark.parametrize("what", ["source", "call"])
def test_ranks_that_differ(world, provider, what):
    for error in world(4).run(differ, provider, what):
        assert "different arguments" in error and "_object" in error
        if what == "call" and provider == "host":
            assert "op all_gather_object " in error and "op broadcast_object " in error


def differ(provider: str, what: str) -> str:
    with ParallelGroup(provider=provider, timeout=10) as group:
        odd = group.rank == 1
        call = partial(broadcast_object, source=3 if odd and what == "source" else 2)
        with pytest.raises(GroupMismatchError) as caught:
            (all_gather_object if odd and what == "call" else call)(1, group)
        return str(caught.value)


def test_errors_name_the_operation(world):
    first, _ = world(2).run(arrive_alone)
    assert first.startswith("broadcast_object: rank 0 of group")


def arrive_alone() -> str:
    with ParallelGroup(timeout=0.5) as group:
        if group.rank == 0:
            with pytest.raises(TpKernelsError) as caught:
                broadcast_object(1, group, 1)
            return str(caught.value)
        time.sleep(1.0)
        return ""
