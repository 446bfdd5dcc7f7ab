"""The interpreted ranks of tests/kernels."""

from tests.kernels.conftest import interpreted

__all__ = ["interpreted"]
