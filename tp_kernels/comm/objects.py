"""Small values between ranks: None, bool, int, float, str, bytes, and lists, tuples and dicts of them.

Nothing is pickled, so what arrives is data and never runs. One exchange moves what is encoded in `INLINE`
bytes or less; more takes a second one.

Encoding: a letter, then for
    N T F   None, True, False          nothing
    i       int, any size              length, bytes (two's complement, little endian)
    f       float                      8 bytes (IEEE 754, little endian)
    s b     str (UTF-8), bytes         length, bytes
    l t     list, tuple                number of items, items
    d       dict                       number of pairs, key, value, key, value, ...
    !       what a rank could not encode, as a str without its letter: all ranks raise it
Lengths and numbers are 4 bytes, little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from .collectives import check_source
from .errors import UnsupportedError
from .group import ParallelGroup
from .host_slot import OPERATIONS

INLINE = 1016  # with its length in front, 1 KiB
MAX_DEPTH = 64
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_SIZE = struct.Struct("<Q")

Write: TypeAlias = Callable[[Any, bytearray], bool]
Read: TypeAlias = Callable[[bytes, bytes, int], tuple[Any, int]]


def broadcast_object(value: Any, group: ParallelGroup, source: int = 0) -> Any:
    """`value` of rank `source` on every rank; what the others pass is not looked at.

    Raises UnsupportedError on every rank if it holds anything but None, bool, int, float, str, bytes, list,
    tuple and dict (subclasses do not count), or is nested more than `MAX_DEPTH` deep.
    """
    check_source("broadcast_object", source, group)
    data = _encode_or_error(value, source) if group.rank == source else b""
    if group.size == 1:
        return _decode(data)
    return group.run(
        "broadcast_object", _implementation(group), _broadcast_object, data, group, source
    )


def all_gather_object(value: Any, group: ParallelGroup) -> list[Any]:
    """The values of all ranks, in rank order. Raises as `broadcast_object` does, on every rank."""
    data = _encode_or_error(value, group.rank)
    if group.size == 1:
        return [_decode(data)]
    return group.run("all_gather_object", _implementation(group), _all_gather_object, data, group)


def encode(value: Any, write: Write | None = None) -> bytes:
    """Bytes from which `decode` makes an equal value of the same types.

    write: asked for what is of no other kind; writes a letter of its own and what belongs to it, or returns
        False.
    """
    out = bytearray()
    _write(value, out, 0, write)
    return bytes(out)


def decode(data: bytes, read: Read | None = None) -> Any:
    """The value that was encoded; ValueError if `data` is anything else.

    read: asked for letters that are not known here, with the place behind the letter; returns the value and
        the place behind that.
    """
    try:
        value, at = _read(data, 0, read)
    except (struct.error, IndexError) as error:
        raise ValueError(f"not an encoded value: it ends after {len(data)} bytes") from error
    except TypeError as error:  # a list as a key
        raise ValueError(f"not an encoded value: {error}") from error
    if at != len(data):
        raise ValueError(f"not an encoded value: {len(data) - at} bytes follow it")
    return value


def _write(value: Any, out: bytearray, depth: int, write: Write | None) -> None:
    if depth > MAX_DEPTH:
        raise UnsupportedError(
            f"a value nested more than {MAX_DEPTH} deep (or holding itself) cannot be sent to other ranks"
        )
    kind = type(value)
    if value is None or kind is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    elif kind is int:
        number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"i" + _LENGTH.pack(len(number)) + number
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind is str or kind is bytes:
        text = value.encode("utf-8", "surrogatepass") if kind is str else value
        out += (b"s" if kind is str else b"b") + _length(text) + text
    elif kind is list or kind is tuple:
        out += (b"l" if kind is list else b"t") + _length(value)
        for item in value:
            _write(item, out, depth + 1, write)
    elif kind is dict:
        out += b"d" + _length(value)
        for key, item in value.items():
            _write(key, out, depth + 1, None)
            _write(item, out, depth + 1, write)
    elif write is None or not write(value, out):
        raise UnsupportedError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks as an "
            "object: use None, bool, int, float, str, bytes, list, tuple and dict (and for tensors "
            "broadcast, all_gather or a P2PChannel)"
        )


def _length(value: str | bytes | list[Any] | tuple[Any, ...] | dict[Any, Any]) -> bytes:
    if len(value) >= 1 << 32:
        raise UnsupportedError(
            f"a {type(value).__name__} of {len(value)} items is too long to send"
        )
    return _LENGTH.pack(len(value))


def _read(data: bytes, at: int, read: Read | None) -> tuple[Any, int]:
    letter, at = data[at : at + 1], at + 1
    if letter in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[letter], at
    if letter == b"f":
        return _FLOAT.unpack_from(data, at)[0], at + 8
    if letter not in (b"i", b"s", b"b", b"l", b"t", b"d"):
        if letter and read is not None:
            return read(letter, data, at)
        raise ValueError(f"not an encoded value: {letter!r} at byte {at - 1}")
    (length,) = _LENGTH.unpack_from(data, at)
    at += 4
    if letter in (b"i", b"s", b"b"):
        content, at = data[at : at + length], at + length
        if at > len(data):
            raise IndexError
        if letter == b"i":
            return int.from_bytes(content, "little", signed=True), at
        return (content if letter == b"b" else content.decode("utf-8", "surrogatepass")), at
    items = []
    for _ in range(length if letter != b"d" else 2 * length):
        item, at = _read(data, at, read)
        items.append(item)
    if letter == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (items if letter == b"l" else tuple(items)), at


def _encode_or_error(value: Any, rank: int) -> bytes:
    """A rank that raised by itself would leave the others waiting."""
    try:
        return encode(value)
    except UnsupportedError as error:
        return b"!" + f"rank {rank}: {error}".encode()


def _decode(data: bytes) -> Any:
    if data[:1] == b"!":
        raise UnsupportedError(data[1:].decode())
    return decode(data)


def _implementation(group: ParallelGroup) -> str:
    return "host" if group.memory is not None else "process_group"


def _block(data: bytes) -> bytes:
    """The start of every exchange: the length, and as much as fits."""
    return _SIZE.pack(len(data)) + data[:INLINE].ljust(INLINE, b"\0")


def _broadcast_object(data: bytes, group: ParallelGroup, source: int) -> Any:
    def exchange(data: bytes, size: int) -> bytes:
        counts = [size if rank == source else 0 for rank in range(group.size)]
        return _gather("broadcast_object", data, counts, group)

    mine = group.rank == source
    block = exchange(_block(data) if mine else b"", _SIZE.size + INLINE)
    (size,) = _SIZE.unpack_from(block)
    whole = block[_SIZE.size :][:size]
    if size > INLINE:
        whole += exchange(data[INLINE:], size - INLINE)
    return _decode(whole)


def _all_gather_object(data: bytes, group: ParallelGroup) -> list[Any]:
    operation, stride = "all_gather_object", _SIZE.size + INLINE
    table = _gather(operation, _block(data), [stride] * group.size, group)
    blocks = [table[rank * stride :][:stride] for rank in range(group.size)]
    sizes = [_SIZE.unpack_from(block)[0] for block in blocks]
    rests = [max(0, size - INLINE) for size in sizes]
    rest = _gather(operation, data[INLINE:], rests, group) if any(rests) else b""
    values, at = [], 0
    for block, size, more in zip(blocks, sizes, rests, strict=True):
        values.append(_decode(block[_SIZE.size :][:size] + rest[at : at + more]))
        at += more
    return values


def _gather(operation: str, data: bytes, counts: list[int], group: ParallelGroup) -> bytes:
    """The bytes of all ranks, one after the other."""
    x = _tensor(data)
    if group.memory is not None:
        out = torch.empty(sum(counts), dtype=torch.uint8)
        group.slot.all_gather(x, out, counts, operation=operation)
    else:
        # The counts as one number: descriptions have a fixed size.
        digest = crc32(repr(counts).encode())
        group.transport.agree(operation, x, OPERATIONS[operation], digest)
        holders = [rank for rank, count in enumerate(counts) if count]
        if len(holders) == 1:
            out = x if group.rank in holders else torch.empty(sum(counts), dtype=torch.uint8)
            group.transport.broadcast(out, holders[0])
        else:
            out = group.transport.all_gather(x, counts).wait()
    return out.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
