"""Pipeline parallelism: messages between stages, schedules as data, and one runner."""

from .communicator import PipelineCommunicator

__all__ = ["PipelineCommunicator"]
