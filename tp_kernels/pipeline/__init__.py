"""Pipeline parallelism: messages between stages, schedules as data, and one runner."""

from .communicator import PipelineCommunicator
from .grid import Grid
from .micro_batches import MicroBatches, Whole
from .runner import Losses, PipelineRunner
from .stage import PipelineError

__all__ = [
    "Grid",
    "Losses",
    "MicroBatches",
    "PipelineCommunicator",
    "PipelineError",
    "PipelineRunner",
    "Whole",
]
