"""`tp-kernels pipeline`: commands for models that are cut into stages, each in a file of its own."""

from __future__ import annotations

import typer

from .pipeline_plan import plan
from .pipeline_run import run
from .pipeline_simulate import simulate
from .pipeline_train import train

pipeline_app = typer.Typer(
    help="Cut a model into stages, choose a schedule, see where time goes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

pipeline_app.command()(plan)
pipeline_app.command()(simulate)
pipeline_app.command()(run)
pipeline_app.command()(train)
