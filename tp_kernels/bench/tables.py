"""The tables of a report on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from . import p2p
from .report import Row, geometric_mean, grouped, microseconds, new_table, size, spread


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Everything a reader wants to see first."""
    show_environment(console, report)
    tables = {
        "collectives": show_collectives,
        "linear": show_linear,
        "block": show_block,
        "p2p": p2p.show,
    }
    tables[report["kind"]](console, report)
    show_not_run(console, report)


def show_environment(console: Console, report: Mapping[str, Any]) -> None:
    """One paragraph: where, with what."""
    facts, versions = report["environment"], report["environment"]["versions"]
    caches = ", ".join(f"{level} {amount}" for level, amount in facts["caches"].items())
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {caches}; {facts['isa']}; {facts['kernel']}; "
        f"load {facts['load_average'][0]}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        style="dim",
        highlight=False,
        markup=False,
    )


def show_not_run(console: Console, report: Mapping[str, Any]) -> None:
    """Contestants that are missing, and why."""
    for entry in report["not_run"]:
        where = f" ({entry['world']} ranks)" if "world" in entry else ""
        console.print(f"[yellow]not run:[/] {entry['contestant']}{where}: {escape(entry['why'])}")


def show_collectives(console: Console, report: Mapping[str, Any]) -> None:
    """One row per op, dtype, world size and number of bytes."""
    console.print(
        "Microseconds per call on the slowest rank, median; host with p10..p90.\n"
        "host: tp_kernels; raw: its engine without Python; ratio: best peer / host.",
        highlight=False,
    )
    peers = ("gloo", "deepspeed", "openmpi")
    for (op, dtype, world), rows in grouped(report, "op", "dtype", "world").items():
        console.print(f"\n[bold]{op} {dtype}, {world} ranks[/]", highlight=False)
        table = new_table("bytes", "host", "raw", *peers, "ratio", "GB/s")
        for row in rows:
            found, ratio = row["contestants"], row["derived"]["best_peer_over_host"]
            table.add_row(
                size(row["case"]["bytes"]),
                spread(found["host"]),
                *(
                    microseconds(found[name]["median_us"]) if name in found else "-"
                    for name in ("raw", *peers)
                ),
                "-" if ratio is None else _verdict(f"{ratio:.2f}", ratio >= 1),
                f"{row['derived']['gigabytes_per_second']:.2f}",
            )
        console.print(table)
    for line in collectives_summary(report["results"]):
        console.print(line, highlight=False)


def collectives_summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of the ratios, and the worst one."""
    lines = []
    ratios = [row for row in rows if row["derived"]["best_peer_over_host"] is not None]
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in ratios:
        case = row["case"]
        key = case["op"], case["dtype"], case["world"]
        groups.setdefault(key, []).append(row["derived"]["best_peer_over_host"])
    for (op, dtype, world), values in groups.items():
        lines.append(
            f"{op} {dtype}, {world} ranks: best peer / host {geometric_mean(values):.2f} in the "
            f"geometric mean, lowest {min(values):.2f}"
        )
    if ratios:
        values = [row["derived"]["best_peer_over_host"] for row in ratios]
        lines.append(f"all: best peer / host {geometric_mean(values):.2f} in the geometric mean")
    small = [
        row["contestants"]["gloo"]["median_us"] / row["contestants"]["host"]["median_us"]
        for row in rows
        if "gloo" in row["contestants"] and row["case"]["bytes"] <= 64 << 10
    ]
    if small:
        lines.append(f"up to 64 KiB: gloo / host {geometric_mean(small):.0f} in the geometric mean")
    return lines


def show_linear(console: Console, report: Mapping[str, Any]) -> None:
    """One row per op, pass, world size, hidden size and number of rows."""
    console.print(
        "Microseconds per call on the slowest rank, median; fused (what auto runs) with p10..p90.\n"
        "gemm: fastest unsplit product of the shard; comm: the collective alone; serial: one after the "
        "other.\nE: share of the communication that is hidden; ideal: max(gemm, comm) / fused, aimed at "
        "0.95 from 128 rows and 0.85 up to 16; serial/f: serial / fused, aimed at 0.98.",
        highlight=False,
    )
    groups = grouped(report, "op", "pass", "dtype", "world")
    for (op, way, dtype, world), rows in groups.items():
        nothing = "" if rows[0]["derived"]["communicates"] else ", communicates nothing"
        console.print(f"\n[bold]{op} {way} {dtype}, {world} ranks{nothing}[/]", highlight=False)
        others = [
            name
            for name in ("host", "chunked", "reference", "deepspeed", "openmpi")
            if any(name in row["contestants"] for row in rows)
            and any(name != row["derived"]["fused"] for row in rows)  # else shown as fused
        ]
        columns = ("gemm", "comm", "serial", "fused", *others, "E", "ideal", "serial/f", "target")
        table = new_table("hidden", "rows", *columns, left=0)
        for row in rows:
            found, facts = row["contestants"], row["derived"]
            times = [
                microseconds(found[name]["median_us"]) if name in found else "-"
                for name in (facts["best_gemm"], "comm", "serial", *others)
            ]
            fused = f"{spread(found[facts['fused']])} {facts['fused']}"
            table.add_row(
                str(row["case"]["hidden"]),
                str(row["case"]["rows"]),
                *(*times[:3], fused, *times[3:]),
                "-" if facts["efficiency"] is None else f"{facts['efficiency']:.2f}",
                _verdict(f"{facts['ideal_over_fused']:.2f}", facts["targets"]["ideal_over_fused"]),
                _verdict(
                    f"{facts['serial_over_fused']:.2f}", facts["targets"]["serial_over_fused"]
                ),
                _pass(facts["targets"]),
            )
        console.print(table)
    single = [row for row in report["results"] if row["derived"]["overhead_us"] is not None]
    if single:
        console.print(
            "\n[bold]overhead at one row[/]: fused - gemm (of torch's layer in a backward) - engine "
            "collective, aimed at 15 us"
        )
        table = new_table("op", "hidden", "us", "target")
        for row in single:
            case, facts = row["case"], row["derived"]
            met = facts["targets"]["overhead"]
            value = _verdict(f"{facts['overhead_us']:.1f}", met)
            what = f"{case['op']} {case['pass']}, {case['world']} ranks"
            table.add_row(
                what, str(case["hidden"]), value, _verdict("pass" if met else "miss", met)
            )
        console.print(table)
    for line in linear_summary(report["results"]):
        console.print(line, highlight=False)


def linear_summary(rows: Sequence[Row]) -> list[str]:
    """How many rows meet each target."""
    lines = []
    for target, text in (
        ("ideal_over_fused", "ideal / fused"),
        ("serial_over_fused", "serial / fused"),
        ("overhead", "overhead at one row"),
    ):
        met = [row["derived"]["targets"][target] for row in rows]
        counted = [one for one in met if one is not None]
        if counted:
            lines.append(f"{text}: {sum(counted)} of {len(counted)} rows meet the target")
    against = [
        row["derived"]["best_peer_over_fused"]
        for row in rows
        if row["derived"]["best_peer_over_fused"] is not None
    ]
    if against:
        lines.append(
            f"torch.mm and the best peer's all-reduce / fused: {geometric_mean(against):.2f} in the "
            f"geometric mean, lowest {min(against):.2f}"
        )
    return lines


def show_block(console: Console, report: Mapping[str, Any]) -> None:
    """One row per part, pass and number of rows; times of every contestant."""
    console.print(
        "Microseconds per step on the slowest rank: median (p10..p90), and the ratio to host.\n"
        "One row is one decoding step with a KV cache.",
        highlight=False,
    )
    for (hidden, world), rows in grouped(report, "hidden", "world").items():
        console.print(f"\n[bold]hidden size {hidden}, {world} ranks[/]", highlight=False)
        table = new_table("part, pass, rows", "contestant", "time", "/ host", left=2)
        for row in rows:
            case = row["case"]
            name = f"{case['part']} {case['pass']} {case['rows']}"
            for contestant, sample in row["contestants"].items():
                ratio = row["derived"]["over_host"].get(contestant)
                table.add_row(
                    name,
                    contestant,
                    spread(sample),
                    "" if ratio is None else _verdict(f"{ratio:.2f}", ratio >= 1),
                )
                name = ""
            table.add_section()
        console.print(table)


def _verdict(text: str, met: bool | None) -> str:
    return text if met is None else f"[{'green' if met else 'red'}]{text}[/]"


def _pass(targets: Mapping[str, bool | None]) -> str:
    met = targets["ideal_over_fused"] is not False and targets["serial_over_fused"] is not False
    return _verdict("pass" if met else "miss", met)
