"""Sends and receives that autograd knows, for training loops written by hand.

    x = recv_forward(comm, micro_batch=i)            # on all stages but the first
    token = send_forward(stage(x), comm, micro_batch=i)   # on all stages but the last
    ...
    token.backward()     # receives the gradient, goes back through the stage, sends the gradient of x on

The order of the backward calls is the caller's, and has to be the same on all stages; `PipelineRunner` finds
one.

A gradient travels as a tuple: one entry for each tensor of the value that requires grad, in the order of the
message, None where there is none. Nothing is sent back for a value without such tensors, which both sides
know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .communicator import PipelineCommunicator
from .message import encode, with_tensors


def send_forward(
    value: Any, comm: PipelineCommunicator, *, micro_batch: int, stage: int | None = None
) -> Tensor:
    """Send `value` to the next stage; a token whose backward waits for the gradient and goes on with it.

    Returns a float32 zero (). It requires grad if a tensor of `value` does; add tokens of several values, or
    the token of one, to a loss, or call `backward()` of each. Raises as `PipelineCommunicator.send_forward`
    does.
    """
    _, tensors = encode(value)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    comm.send_forward(value, micro_batch=micro_batch, stage=stage)
    return _Token.apply(comm, micro_batch, stage, *wanted)


def recv_forward(comm: PipelineCommunicator, *, micro_batch: int, stage: int | None = None) -> Any:
    """Receive a value from the previous stage, to which the backward of its tensors sends their gradients.

    The gradient is sent once those of all tensors are there; None stands for a tensor that was not used. If
    nothing uses any of them there is no backward, and the previous stage waits in vain.
    """
    value = comm.recv_forward(micro_batch=micro_batch, stage=stage)
    _, received = encode(value)
    wanted = [tensor for tensor in received if tensor.requires_grad]
    if not wanted:
        return value
    anchor = torch.empty(0, requires_grad=True)  # or autograd would record nothing
    tracked = iter(_Received.apply(comm, micro_batch, stage, anchor, *wanted))
    tensors = [next(tracked) if tensor.requires_grad else tensor for tensor in received]
    return with_tensors(value, tensors)


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Any, micro_batch: int, stage: int | None, *tensors: Tensor
    ) -> Tensor:
        ctx.where = comm, micro_batch, stage
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        comm, micro_batch, stage = ctx.where
        return None, None, None, *comm.recv_backward(micro_batch=micro_batch, stage=stage)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Any, micro_batch: int, stage: int | None, *inputs: Tensor) -> Any:
        ctx.where = comm, micro_batch, stage
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        comm, micro_batch, stage = ctx.where
        comm.send_backward(gradients, micro_batch=micro_batch, stage=stage)
        return (None,) * (4 + len(gradients))
