"""What a message says of its value, byte by byte, and what cannot be sent."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.oracle import lay_out
from tp_kernels import UnsupportedError
from tp_kernels.pipeline import message

Point = namedtuple("Point", "x y")


def through(value: Any) -> Any:
    """What arrives, by the description and the bytes alone."""
    head, tensors = message.encode(value)
    data = b"".join(map(bytes_of, tensors))
    described = message.decode(head)
    assert described.nbytes == len(data)
    received, at = [], 0
    for spec in described.tensors:
        part = bytearray(data[at : at + spec.nbytes])
        at += spec.nbytes
        flat = (
            torch.frombuffer(part, dtype=spec.dtype) if part else torch.empty(0, dtype=spec.dtype)
        )
        received.append(spec.finish(flat.view(spec.shape)))
    return described.value(received)


def bytes_of(x: Tensor) -> bytes:
    if x.numel() == 0:
        return b""
    plain = x.detach().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(torch.uint8).tolist())


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        kind = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return kind and bytes_of(a) == bytes_of(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a


def tensors() -> st.SearchStrategy[Tensor]:
    def make(dtype: torch.dtype, shape: tuple[int, ...], layout: str, grad: bool) -> Tensor:
        x = torch.randint(0, 2, shape).to(dtype)
        floating = dtype.is_floating_point and dtype.itemsize > 1
        x = lay_out(x, layout) if shape and floating else x
        return x.requires_grad_(grad and floating)

    shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    layouts = st.sampled_from(("plain", "transposed", "offset", "strided"))
    known = st.sampled_from([d for d in message.DTYPES if d not in UNPRINTABLE])
    return st.builds(make, known, shapes, layouts, st.booleans())


# torch cannot fill these from integers.
UNPRINTABLE = (torch.float8_e8m0fnu, torch.complex32)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(values)
def test_any_value_arrives(value):
    assert same(through(value), value)


def test_the_format():
    """As docs/pipeline.md has it."""
    x = torch.zeros(3, 0, dtype=torch.bfloat16, requires_grad=True)
    assert message.encode(x)[0] == b"x\x01\x01\x02" + (3).to_bytes(8, "little") + bytes(8)
    tensor = b"x\x04\x00\x00"  # int64, nothing, no dimension
    one = torch.tensor(1)
    head, tensors = message.encode(({"n": one}, [one], None))
    assert head == (
        b"t\x03\0\0\0" + b"d\x01\0\0\0s\x01\0\0\0n" + tensor + b"l\x01\0\0\0r\0\0\0\0" + b"N"
    )
    assert tensors == [one]
    assert [message.DTYPES.index(dtype) for dtype in (torch.float32, torch.bool)] == [0, 9]


def test_every_dtype_has_a_number():
    dtypes = {
        value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
    }
    dense = {d for d in dtypes if not str(d).startswith(("torch.q", "torch.bits", "torch.int1"))}
    dense = {d for d in dense if str(d)[-2:].strip("t") not in set("1234567")}  # int1 .. uint7
    assert dense - set(message.DTYPES) <= {
        getattr(torch, name, None) for name in ("float4_e2m1fn_x2", "int1", "uint1")
    }


def test_what_occurs_twice_is_one_tensor():
    x = torch.ones(2, requires_grad=True)
    a, (b, c) = through([x, (x, x.detach())])
    assert a is b and a is not c
    assert a.requires_grad and not c.requires_grad
    views = torch.zeros(4)
    a, b = through((views[:2], views[1:]))
    a += 1
    assert b.tolist() == [0, 0, 0]


def test_handed_over_without_a_copy():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    value = message.detached({"y": (y, y), "n": 1, "w": torch.zeros(1)})
    got = value["y"][0]
    assert got is value["y"][1] and got.is_leaf and got.requires_grad and value["n"] == 1
    assert got.data_ptr() == y.data_ptr() and not value["w"].requires_grad


def test_large_sizes_are_counted():
    """By arithmetic: more than 2^31 bytes, and more than 2^32 elements."""
    head = b"x\x00\x00\x02" + (1 << 20).to_bytes(8, "little") + (1 << 13).to_bytes(8, "little")
    described = message.decode(head)
    assert described.nbytes == described.tensors[0].nbytes == 1 << 35
    assert described.tensors[0].shape == (1 << 20, 1 << 13)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Point(1, 2), "Point"),
        (OrderedDict(a=1), "OrderedDict"),
        ({1, 2}, "builtins.set"),
        ([torch.zeros(2).to_sparse()], "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "on meta"),
        (nn.Linear(1, 1), "Linear"),
        ({torch.zeros(1): 1}, "Tensor"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "NestedTensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent(value, text):
    with pytest.raises(UnsupportedError, match=text):
        message.encode(value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_tensors_of_a_gpu_where_there_is_none():
    (spec,) = message.decode(b"x\0\x03\x01" + (2).to_bytes(8, "little")).tensors
    assert spec.on_cuda and spec.requires_grad
    with pytest.raises(UnsupportedError, match=r"a tensor \(2,\) that was on a CUDA device"):
        spec.finish(spec.empty())


def test_parameters_and_inference_tensors():
    assert type(through(nn.Parameter(torch.ones(2)))) is Tensor
    with torch.inference_mode():
        assert through(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    "head",
    [b"", b"x", b"x\xff\0\0", b"x\0\x08\0", b"x\0\0\x01", b"r\0\0\0\0", b"t\x01\0\0\0", b"?"],
)
def test_what_is_no_description(head):
    with pytest.raises(ValueError, match="not a"):
        message.decode(head)
