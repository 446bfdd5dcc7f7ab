"""Kernels on a GPU: right on virtual ranks, between processes and in graphs, and how fast.

    python -m tests.gpu              everything (`make gpu-check`)
    python -m tests.gpu --only graph --list

Results go to bench/results/<device>/gpu_check.json, outcomes to a report in the form of JUnit. Without a CUDA
device every check is counted as skipped. Needs torch, Triton and this checkout; builds and installs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any
from xml.sax.saxutils import quoteattr

# Before CUDA starts: of 8 streams that share queues, one might wait behind another that waits for it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import triton

from tests.gpu.checks import collect, probe
from tests.gpu.runner import Check, Outcome, Runner, prepare
from tp_kernels.bench.environment import environment

ROOT = Path(__file__).parents[2]
SCHEMA = "tp_kernels.gpu_check/1"
NO_DEVICE = "no CUDA device"
# Each takes half a GiB of the device.
MOST_PROCESSES, PREPARE_SECONDS = 12, 120


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="checks whose name matches this expression")
    parser.add_argument("--list", action="store_true", help="print the names of checks and stop")
    parser.add_argument("--seconds", type=float, default=480, help="for everything (default: 480)")
    parser.add_argument("--junit", type=Path, default=ROOT / "build/gpu-check.xml")
    parser.add_argument("--json", type=Path, help="default: bench/results/<device>/gpu_check.json")
    options = parser.parse_args(arguments)
    checks = [check for check in collect() if re.search(options.only, check.name)]
    if options.list:
        print("\n".join(check.name for check in checks))
        return 0
    if torch.cuda.is_available():
        outcomes = run(checks, options.seconds)
        report = document(outcomes)
        path = options.json or ROOT / "bench/results" / slug() / "gpu_check.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten: {path}")
    else:
        outcomes = [Outcome(check.name, "skipped", message=NO_DEVICE) for check in checks]
        print("\n".join(f"skipped: {outcome.name}" for outcome in outcomes))
    write_junit(options.junit, outcomes)
    print(summary(outcomes))
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def run(checks: Sequence[Check], seconds: float) -> list[Outcome]:
    begin, done = monotonic(), 0
    ahead = [check.name for check in checks if check.prepare is not None]
    processes = min(len(os.sched_getaffinity(0)), len(ahead), MOST_PROCESSES)
    if processes > 1:
        prepare(collect, ahead, processes, PREPARE_SECONDS)
        print(
            f"[{monotonic() - begin:6.1f} s] compiled ahead, in {processes} processes", flush=True
        )

    def progress(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        print(
            f"[{monotonic() - begin:6.1f} s] {done}/{len(checks)} {outcome.status}: {outcome.name} "
            f"({outcome.seconds:.1f} s){short(outcome)}",
            flush=True,
        )

    return Runner(collect, probe, seconds - (monotonic() - begin)).run(checks, progress)


def short(outcome: Outcome) -> str:
    """The last line of an error, or the ratio that was measured."""
    if outcome.status == "failed":
        return f": {outcome.message.strip().splitlines()[-1][:200]}"
    if isinstance(outcome.data, dict) and "ratio" in outcome.data:
        return f": {outcome.data['ratio']:.3f}"
    return ""


def summary(outcomes: Sequence[Outcome]) -> str:
    """Errors in full, a table of times, and counts."""
    lines = [
        f"\n{outcome.name}\n{outcome.message}" for outcome in outcomes if outcome.status == "failed"
    ]
    lines += table([outcome.data for outcome in outcomes if has_times(outcome)])
    counts = Counter(outcome.status for outcome in outcomes)
    reasons = sorted({outcome.message for outcome in outcomes if outcome.status == "skipped"})
    lines.append(
        f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        + (f" ({', '.join(reasons)})" if reasons else "")
    )
    return "\n".join(lines)


def has_times(outcome: Outcome) -> bool:
    return isinstance(outcome.data, dict) and "samples" in outcome.data


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Median microseconds, spread, and the ratio to what the device can do beside its target."""
    lines = (
        ["", f"{'':44}{'us':>10}{'p10':>10}{'p90':>10}{'ratio':>8}{'target':>8}"] if rows else []
    )
    for row in rows:
        for position, (name, sample) in enumerate(row["samples"].items()):
            line = f"{row['name'] + ' ' + name if position == 0 else '  ' + name:44}"
            line += "".join(f"{sample[key]:10.1f}" for key in ("median_us", "p10_us", "p90_us"))
            if position == 0 and "ratio" in row:
                line += f"{row['ratio']:8.3f}{row['target']:8.2f}"
                line += "" if row["ratio"] >= row["target"] else "  below"
            lines.append(line)
    return lines


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    versions = {"triton": triton.__version__, "cuda": torch.version.cuda, "driver": driver()}
    return {
        "schema": SCHEMA,
        "device": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_mib": properties.total_memory >> 20,
            "l2_mib": properties.L2_cache_size >> 20,
        },
        "environment": environment(versions),
        "checks": [
            {
                "name": outcome.name,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 2),
                "message": outcome.message,
                "data": outcome.data,
            }
            for outcome in outcomes
        ],
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def slug() -> str:
    """The name of the device, as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def write_junit(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A report that tests/check_counts.py reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = {"failed": "failure", "skipped": "skipped"}
    lines = ['<testsuite name="gpu-check">']
    for outcome in outcomes:
        tag = tags.get(outcome.status)
        lines.append(
            f'<testcase name={quoteattr(outcome.name)} time="{outcome.seconds:.2f}">'
            + (f"<{tag} message={quoteattr(outcome.message)}/>" if tag else "")
            + "</testcase>"
        )
    path.write_text("\n".join([*lines, "</testsuite>"]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
