"""The command `tp-kernels`: see `tp-kernels --help`."""

from .app import main

__all__ = ["main"]
