"""Runs checks in a process of their own, with a time limit each: a hang costs its check, not the run.

A device that has failed stays failed in its process, and a kernel that never ends cannot be interrupted: then
the process is replaced.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

# To start, import torch and initialise the device.
START_SECONDS = 120.0
# Of an error, in the report.
MESSAGE = 4000


@dataclass(frozen=True)
class Check:
    """Something to run.

    Args:
        name: unique.
        run: returns what is to be kept; raises what went wrong.
        seconds: limit.
        prepare: what of it can be done ahead and beside that of other checks, as compiling is.
    """

    name: str
    run: Callable[[], Any]
    seconds: float = 60.0
    prepare: Callable[[], object] | None = None


class Skipped(Exception):
    """Raised by a check that this machine has not what it needs for."""


@dataclass(frozen=True)
class Outcome:
    """What became of a check: status is "passed", "failed" or "skipped"."""

    name: str
    status: str
    seconds: float = 0.0
    message: str = ""
    data: Any = None


def prepare(
    collect: Callable[[], Sequence[Check]], names: Sequence[str], processes: int, seconds: float
) -> None:
    """Prepare the checks of these names, in `processes` processes; what is not done in time is left."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map_async(partial(_prepare, collect), names, chunksize=1).wait(seconds)


def _prepare(collect: Callable[[], Sequence[Check]], name: str) -> None:
    for check in collect():
        if check.name == name and check.prepare is not None:
            with suppress(Exception):  # the check will say it
                check.prepare()


@dataclass
class Runner:
    """Runs checks, one after the other.

    Args:
        collect: a function at the top of a module that returns the checks, in any process.
        probe: likewise; raises if no check can go on in this process, after one has failed.
        budget: seconds for all; checks that have not begun by then fail.
    """

    collect: Callable[[], Sequence[Check]]
    probe: Callable[[], None]
    budget: float = float("inf")
    _worker: _Worker | None = field(default=None, init=False)

    def run(self, checks: Sequence[Check], progress: Callable[[Outcome], None]) -> list[Outcome]:
        """The outcome of every check, each also given to `progress` as soon as it is known."""
        deadline = monotonic() + self.budget
        outcomes = []
        try:
            for check in checks:
                left = deadline - monotonic()
                if left <= 0:
                    outcome = Outcome(check.name, "failed", message="not run: the time is up")
                else:
                    outcome = self._run(check, min(check.seconds, left))
                outcomes.append(outcome)
                progress(outcome)
        finally:
            self._replace()
        return outcomes

    def _run(self, check: Check, limit: float) -> Outcome:
        begin = monotonic()
        status, message, data, healthy = "failed", "", None, False
        try:
            if self._worker is None:
                self._worker = _Worker(self.collect, self.probe)
                begin = monotonic()
            answer = self._worker.ask(check.name, limit)
            if answer is None:
                message = f"no end after {limit:.0f} s"
            else:
                status, message, data, healthy = answer
        except (EOFError, OSError) as error:
            message = f"the process ended: {error!r}"
        if not healthy:
            self._replace()
        return Outcome(check.name, status, monotonic() - begin, message[-MESSAGE:], data)

    def _replace(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None


class _Worker:
    """A process that runs checks by name."""

    def __init__(self, collect: Callable[[], Sequence[Check]], probe: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")  # a device does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, collect, probe))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_SECONDS):
            self.end()
            raise OSError(f"it did not start within {START_SECONDS:.0f} s")
        self._pipe.recv()

    def ask(self, name: str, limit: float) -> tuple[str, str, Any, bool] | None:
        """(status, message, data, whether the process can go on), or None when time is up."""
        self._pipe.send(name)
        return self._pipe.recv() if self._pipe.poll(limit) else None

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(
    pipe: Connection, collect: Callable[[], Sequence[Check]], probe: Callable[[], None]
) -> None:
    checks = {check.name: check for check in collect()}
    pipe.send("ready")
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("passed", "", checks[name].run(), True)
        except Skipped as reason:
            answer = ("skipped", str(reason), None, True)
        except Exception:
            answer = ("failed", traceback.format_exc(), None, _works(probe))
        pipe.send(answer)


def _works(probe: Callable[[], None]) -> bool:
    try:
        probe()
    except Exception:
        return False
    return True
