"""Pipeline parallelism: messages between stages, schedules as data, a runner, and the cut into stages.

Stages of Hugging Face models and pipelined generation, which need transformers, are in
`tp_kernels.pipeline.causal_lm` and `tp_kernels.pipeline.decode`.
"""

from .communicator import PipelineCommunicator
from .generators import SCHEDULES
from .grid import Grid
from .micro_batches import MicroBatches, Whole
from .partition import partition
from .plan import LayerCost, Plan
from .profile import profile_layers
from .runner import PipelineRunner
from .scaling import Losses
from .schedule import Action, Kind, Schedule, ScheduleError
from .search import search
from .simulate import Costs
from .stage import PipelineError
from .timeline import Recorder, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Grid",
    "Kind",
    "LayerCost",
    "Losses",
    "MicroBatches",
    "PipelineCommunicator",
    "PipelineError",
    "PipelineRunner",
    "Plan",
    "Recorder",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Whole",
    "partition",
    "profile_layers",
    "search",
]
