"""Fails when fewer tests ran than agreed, or one was skipped for a reason nobody agreed to.

Usage: python tests/check_counts.py tests/expected_counts.toml NAME=JUNIT_XML ...

A suite that is silently not collected passes otherwise.
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def main(expected_path: str, *reports: str) -> int:
    expected = tomllib.loads(Path(expected_path).read_text())
    problems: list[str] = []
    total: Counter[str] = Counter()
    for report in reports:
        name, _, path = report.partition("=")
        if not Path(path).is_file():
            problems.append(f"{name}: there is no report {path}")
            continue
        counts, reasons = read(Path(path))
        total += counts
        floor = expected[name]["passed_at_least"]
        if counts["passed"] < floor:
            problems.append(f"{name}: {counts['passed']} passed, expected at least {floor}")
        cases = counts["passed"] + counts["skipped"]
        if cases < expected[name].get("cases_at_least", 0):
            problems.append(f"{name}: only {cases} passed or were skipped")
        allowed = expected[name]["allowed_skips"]
        problems += [
            f"{name}: {count} skipped for a reason that is not allowed: {reason}"
            for reason, count in reasons.items()
            if not any(text in reason for text in allowed)
        ]
        print(f"{name}: {counts['passed']} passed (at least {floor} expected)")
        for reason, count in sorted(reasons.items()):
            print(f"{name}: {count} skipped: {reason}")
    for problem in problems:
        print(f"error: {problem}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if problems or total["failed"] else 0


def read(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Outcomes in a JUnit file, and the reasons of the skipped ones."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is not None or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
            reasons[(skipped.get("message") if skipped is not None else "") or "no reason"] += 1
        else:
            counts["passed"] += 1
    return counts, reasons


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
