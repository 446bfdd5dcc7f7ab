"""Prints what a build without isolation needs beside `requires` of pyproject.toml; one a line."""

from .backend import cuda_requirements

print(*cuda_requirements(), sep="\n", end="")
