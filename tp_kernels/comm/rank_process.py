"""What runs in a rank that `Ranks` started: receive a call, run it, send the outcome."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.process import current_process
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankSpec:
    """What a rank process needs before its first call."""

    rank: int
    size: int
    threads: int
    timeout: float
    backend: str
    port: int
    environment: dict[str, str]
    main: dict[str, str]


def serve(pipe: Connection, spec: RankSpec) -> None:
    """Body of a rank process: receive a call, run it, send the outcome, until the pipe closes."""
    # The launching process decides what Ctrl-C means; it reaches every process of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_die_with_parent, name="watch parent", daemon=True).start()
    # The fork server has the environment of its own start, which may be long ago.
    os.environ.clear()
    os.environ.update(spec.environment)
    os.environ.update(
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.size),
        LOCAL_RANK=str(spec.rank),
        LOCAL_WORLD_SIZE=str(spec.size),
        OMP_NUM_THREADS=str(spec.threads),
    )
    # All ranks are on this machine; without this, gloo asks a resolver for the name of the host.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(spec.threads)

    generation = None
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        failed = False
        try:
            wanted, call = pickle.loads(request)
            if wanted != generation:
                _join_group(spec, wanted)
                generation = wanted
            fn, args, kwargs = _CallUnpickler(call, spec.main).load()
            reply = pickle.dumps((True, pickle.dumps(fn(*args, **kwargs))))
            del fn, args, kwargs
        except BaseException as error:
            reply = pickle.dumps((False, _dump_error(error)))
            failed = True
        try:
            pipe.send_bytes(reply)
        except OSError:
            break
        if failed:
            # Reference cycles through the traceback keep groups and their segments.
            gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """Ends this process when the launching one has ended, also in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _CallUnpickler(pickle.Unpickler):
    """Imports the main module of the launching process when a call first names something in it."""

    def __init__(self, call: bytes, main: dict[str, str]) -> None:
        super().__init__(io.BytesIO(call))
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and sys.modules["__main__"].__name__ != "__mp_main__":
            # Makes `multiprocessing` refuse to start processes, with an explanation: a script
            # without the guard would start ranks that start ranks.
            current_process()._inheriting = True  # type: ignore[attr-defined]
            try:
                spawn.prepare(self._main)
            finally:
                del current_process()._inheriting  # type: ignore[attr-defined]
        return super().find_class(module, name)


def _join_group(spec: RankSpec, generation: int) -> None:
    """(Re)make the default group: after a failed call the old one may be out of step."""
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=spec.timeout)
    store = dist.TCPStore("127.0.0.1", spec.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        spec.backend,
        store=dist.PrefixStore(str(generation), store),
        rank=spec.rank,
        world_size=spec.size,
        timeout=timeout,
    )


def _dump_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    return pickle.dumps((pickled, summary(error), trace))


def ready() -> None:
    """First call: it returns once the rank has joined the group."""


def summary(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
