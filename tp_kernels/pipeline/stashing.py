"""Weight stashing of PipeDream: a backward uses the weights of its forward, however often they changed since.

Without a flush a stage updates its weights after every micro-batch, while later micro-batches are between
their forward and their backward (Narayanan et al., "PipeDream", SOSP 2019, section 3.3). Gradients are
those of the weights that the forward used, and are applied to the latest ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Version:
    """The weights between two updates, as leaves that collect the gradients of one micro-batch at a time."""

    def __init__(self, module: nn.Module) -> None:
        self.micro_batches: set[int] = set()
        # .data and not detach(): the optimizer writes to a parameter in place, which must not look like a
        # change of these.
        self.weights = {
            name: p.data.requires_grad_(p.requires_grad) for name, p in module.named_parameters()
        }


class WeightStash:
    """Versions of the weights of one module that micro-batches under way still need.

    A version shares the memory of the parameters until `before_update`, and has its own from then on if a
    micro-batch still needs it: as many copies as there are forwards ahead of the backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._latest: _Version | None = None
        self._of: dict[int, _Version] = {}

    @property
    def versions(self) -> int:
        """How many are alive."""
        return len({id(version) for version in self._of.values()})

    def take(self, micro_batch: int) -> dict[str, Tensor]:
        """The latest weights by name, for the forward of a micro-batch."""
        if self._latest is None:
            self._latest = _Version(self.module)
        self._latest.micro_batches.add(micro_batch)
        self._of[micro_batch] = self._latest
        return self._latest.weights

    def give_back(self, micro_batch: int) -> None:
        """Its backward has ended: accumulate its gradients into the parameters, with their hooks."""
        version = self._of.pop(micro_batch)
        version.micro_batches.discard(micro_batch)
        for name, p in self.module.named_parameters():
            weight = version.weights[name]
            if weight.grad is not None:
                gradient, weight.grad = weight.grad, None
                torch.autograd.backward([p], [gradient])

    def before_update(self) -> None:
        """The parameters are about to change: leave their memory to the micro-batches that need it."""
        if self._latest is not None and self._latest.micro_batches:
            for p in self.module.parameters():
                p.data = p.data.clone()
        self._latest = None

    def clear(self) -> None:
        self._latest = None
        self._of.clear()
