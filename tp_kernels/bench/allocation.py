"""How much memory a step takes at its peak, as torch's allocator counts."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes of CPU tensors that `step` has alive at a time, beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
