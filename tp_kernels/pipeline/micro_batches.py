"""Batches cut into micro-batches, and outputs of micro-batches joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError


class Whole:
    """A value that every micro-batch gets as it is: a mask for all rows, a table of positions."""

    def __init__(self, value: Any) -> None:
        self.value = value


class MicroBatches:
    """Values that are cut already, one for each micro-batch, of any sizes."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in the order of its lists, tuples and dicts; one that is there twice, twice."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with `function` of everything in it that is no list, tuple or dict."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(function, item) for item in value]
    if isinstance(value, tuple):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return function(value)


def rows_of(value: Any, what: str = "batch") -> int | None:
    """How many rows the tensors of a value have that are cut; None if there are none.

    Raises:
        ShapeError: tensors of different numbers of rows.
    """
    sizes = {leaf.shape[0] for leaf in tensors_of(value) if leaf.dim()}
    if len(sizes) > 1:
        raise ShapeError(
            f"{what}: tensors of {sorted(sizes)} rows; those of one batch are cut along their first "
            "dimension and have equally many (Whole(value) goes to every micro-batch as it is)"
        )
    return min(sizes, default=None)


def cut(value: Any, count: int, what: str = "batch") -> list[Any]:
    """The value of each of `count` micro-batches: views of its tensors, cut along their first dimension.

    Sizes are those of `torch.tensor_split`: 5 rows over 2 are 3 and 2. Everything else, tensors without
    dimensions too, goes to all micro-batches, and so does what is in `Whole`. `MicroBatches` are cut already.

    Raises:
        ShapeError: tensors of different numbers of rows, fewer rows than micro-batches, or `MicroBatches`
            of another number.
    """
    rows = rows_of(value, what)
    if rows is not None and rows < count:
        raise ShapeError(
            f"{what}: {rows} rows for {count} micro-batches; every micro-batch needs a row: use at "
            f"most {rows} micro-batches, a larger batch, or MicroBatches([...]) that you cut"
        )
    return [mapped(partial(_part, what, index, count), value) for index in range(count)]


def _part(what: str, index: int, count: int, leaf: Any) -> Any:
    if isinstance(leaf, MicroBatches):
        if len(leaf.values) != count:
            raise ShapeError(
                f"{what}: MicroBatches of {len(leaf.values)} values for {count} micro-batches"
            )
        return leaf.values[index]
    if isinstance(leaf, Whole):
        return leaf.value
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    rows, more = divmod(leaf.shape[0], count)
    return leaf.narrow(0, index * rows + min(index, more), rows + (index < more))


def join(values: Sequence[Any]) -> Any:
    """One value of those of all micro-batches: tensors joined along their first dimension.

    Tensors without dimensions become one of them each; of anything else there is a list, or the value itself
    where all have the same.
    """
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values)) if first.dim() == 0 else torch.cat(list(values))
    if isinstance(first, dict):
        return {key: join([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        items = [join(parts) for parts in zip(*values, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*items)
        return type(first)(items)
    return first if all(value == first for value in values) else list(values)
