"""What travels between stages: any nesting of plain values and tensors, described in each message.

A message is a description and, behind it, the elements of its tensors one after the other, each in row-major
order without gaps. The description holds everything that a receiver has to know, so nothing about shapes,
dtypes or structure is agreed beforehand and every micro-batch may differ. Nothing is pickled.

The description is the encoding of `tp_kernels.comm.objects` (None, bool, int, float, str, bytes, list, tuple,
dict: a letter, then 4-byte lengths) with two more letters. All numbers are little endian.

    x   a tensor            dtype  1 byte, the number in DTYPES
                            flags  1 byte: 1 it requires grad, 2 it was on a CUDA device, 4 its elements go
                                   from device to device and are not in the message
                            dims   1 byte, then 8 bytes for each size
    r   the same tensor     index of an earlier tensor of this message, 4 bytes

A tensor that occurs twice (the same object) is sent once and arrives as one tensor. Views that share memory
arrive as tensors of their own. Whatever the strides were, tensors arrive contiguous: each in memory of its
own, so that one which is kept does not keep the others.

A tensor that was on a CUDA device arrives on the receiver's CUDA device. Its elements go there as
device_routes.py says, or else through host memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_kernels.comm import objects
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.symmetric_memory import _host

# A dtype is sent as its place here: entries are only ever added, at the end.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu),
)
_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
_REQUIRES_GRAD, _ON_CUDA, _APART = 1, 2, 4
_LARGE = 128 << 10  # bytes; see csrc/host/large_blocks.h
_TENSOR = struct.Struct("<BBB")
_INDEX = struct.Struct("<I")


class TensorSpec(NamedTuple):
    """A tensor of a message, as its receiver makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_cuda: bool
    apart: bool  # its elements are not in the message
    nbytes: int

    def empty(self) -> Tensor:
        """Host memory for it, contiguous; a large one is used again when nothing refers to it any more."""
        if self.nbytes >= _LARGE and _host is not None:
            memory = _host.large_memory(self.nbytes)
            if memory is not None:
                return torch.empty(0, dtype=self.dtype).set_(
                    memory.untyped_storage(), 0, self.shape, _contiguous(self.shape)
                )
        return torch.empty(self.shape, dtype=self.dtype)

    def finish(self, memory: Tensor) -> Tensor:
        """The received tensor from that memory, filled."""
        if self.on_cuda and not torch.cuda.is_available():
            raise UnsupportedError(
                f"a tensor {tuple(self.shape)} that was on a CUDA device cannot be received by a process "
                "without one: send .cpu()"
            )
        value = memory.cuda() if self.on_cuda and not self.apart else memory
        return value.requires_grad_() if self.requires_grad else value


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


class Description(NamedTuple):
    """A description that was read: what its tensors are, and how the value is made of them."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int  # of all their elements
    here: int  # of those in the message
    value: Callable[[Sequence[Tensor]], Any]  # finished tensors -> the value that was sent


def encode(value: Any, apart: Callable[[Tensor], bool] | None = None) -> tuple[bytes, list[Tensor]]:
    """The description of `value`, and its tensors in the order in which they follow.

    Args:
        value: None, bool, int, float, str, bytes, dense tensors of any shape, stride and dtype of `DTYPES`,
            and lists, tuples and dicts of them. Subclasses of these do not count, so that nothing arrives as
            another type than it was: pass `tuple(x)` of a namedtuple, `dict(x)` of a ModelOutput.
        apart: of which tensors the elements are not in the message.

    Raises:
        UnsupportedError: it holds anything else.
    """
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def write(item: Any, out: bytearray) -> bool:
        if not isinstance(item, Tensor):
            return False
        place = places.get(id(item))
        if place is not None:
            out += b"r" + _INDEX.pack(place)
            return True
        out += b"x" + _describe(item, apart is not None and apart(item))
        places[id(item)] = len(tensors)
        tensors.append(item)
        return True

    return objects.encode(value, write), tensors


def decode(head: bytes) -> Description:
    """Read a description; ValueError if `head` is none."""
    specs: list[TensorSpec] = []

    def read(letter: bytes, data: bytes, at: int) -> tuple[Any, int]:
        if letter == b"r":
            (place,) = _INDEX.unpack_from(data, at)
            if place >= len(specs):
                raise ValueError(f"not a description: tensor {place} of {len(specs)}")
            return _Place(place), at + _INDEX.size
        if letter != b"x":
            raise ValueError(f"not a description: {letter!r} at byte {at - 1}")
        number, flags, dims = _TENSOR.unpack_from(data, at)
        if number >= len(DTYPES) or flags > (_REQUIRES_GRAD | _ON_CUDA | _APART):
            raise ValueError(f"not a description: dtype {number}, flags {flags}")
        at += _TENSOR.size
        shape = struct.unpack_from(f"<{dims}Q", data, at)
        dtype = DTYPES[number]
        nbytes = prod(shape) * dtype.itemsize
        grad, cuda, apart = (bool(flags & bit) for bit in (_REQUIRES_GRAD, _ON_CUDA, _APART))
        specs.append(TensorSpec(shape, dtype, grad, cuda, apart, nbytes))
        return _Place(len(specs) - 1), at + 8 * dims

    skeleton = objects.decode(head, read)
    tensors = tuple(specs)
    total = sum(spec.nbytes for spec in tensors)
    here = sum(spec.nbytes for spec in tensors if not spec.apart)
    if type(skeleton) is _Place:
        return Description(tensors, total, here, _only)
    return Description(tensors, total, here, lambda given: _fill(skeleton, given))


def detached(value: Any) -> Any:
    """What would arrive if `value` were sent, without a copy of its tensors."""
    head, tensors = encode(value)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    return decode(head).value(leaves)


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """`value` with other tensors in place of its own, in the order of `encode`."""
    return decode(encode(value)[0]).value(tensors)


class _Place(NamedTuple):
    """Stands in a skeleton for a tensor."""

    number: int


def _only(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _fill(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(skeleton)
    if kind is _Place:
        return tensors[skeleton.number]
    if kind is list:
        return [_fill(item, tensors) for item in skeleton]
    if kind is tuple:
        return tuple(_fill(item, tensors) for item in skeleton)
    if kind is dict:
        return {key: _fill(item, tensors) for key, item in skeleton.items()}
    return skeleton


def _describe(tensor: Tensor, apart: bool) -> bytes:
    number = _NUMBER.get(tensor.dtype)
    if (
        number is None
        or tensor.layout != torch.strided
        or tensor.device.type not in ("cpu", "cuda")
        or hasattr(tensor, "__tensor_flatten__")  # a wrapper of other tensors, such as a DTensor
    ):
        raise UnsupportedError(
            f"a {type(tensor).__name__} {tuple(tensor.shape)} of {tensor.dtype}, {tensor.layout}, on "
            f"{tensor.device} cannot be sent to another stage: send dense tensors on CPU or CUDA "
            "(.to_dense(), .to_local(), .dequantize())"
        )
    flags = _REQUIRES_GRAD * tensor.requires_grad | _ON_CUDA * tensor.is_cuda | _APART * apart
    shape = tensor.shape
    return _TENSOR.pack(number, flags, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
