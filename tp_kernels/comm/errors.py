"""Errors a caller can act on. Every message names what was asked, on which rank, and the way out."""

from __future__ import annotations


class TpKernelsError(RuntimeError):
    """Base of every error this package raises on purpose."""


class ShapeError(TpKernelsError, ValueError):
    """A size, rank count or layout that the operation cannot accept; raised before anything is sent."""


class UnsupportedError(TpKernelsError, NotImplementedError):
    """A request that cannot be served here at all: dtype, device, architecture, group."""


class GroupMismatchError(TpKernelsError):
    """Ranks of one group disagree about what they are doing: op, dtype or shape."""


class PeerLostError(TpKernelsError):
    """A rank of the group died, failed or left while others still needed it."""


class CollectiveTimeoutError(TpKernelsError, TimeoutError):
    """A rank did not arrive within the deadline of the group."""


class BuildError(TpKernelsError):
    """A compiled part of the package is missing or cannot be loaded."""
