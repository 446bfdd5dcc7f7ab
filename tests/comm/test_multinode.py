"""torchrun on several hosts: ranks that cannot share memory go through the process group.

Each agent gets a network namespace of its own, and with it (`ip netns exec`) a mount namespace: TCP
between two interfaces and no common view of /dev/shm, which is as far apart as one machine allows.

This module is also the script that torchrun starts: it prints one line of JSON for each rank.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.oracle import OPERATIONS, Case, check, compute, digest
from tp_kernels import ParallelGroup, UnsupportedError
from tp_kernels.comm import all_gather, all_reduce, barrier, reduce_scatter

ROOT = Path(__file__).parents[2]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces joined by a cable: (namespace, interface, address) of each."""
    tag = secrets.token_hex(3)
    names, addresses = [f"tpk-{tag}-{i}" for i in range(2)], ["10.213.7.1", "10.213.7.2"]
    links = [f"tpk{tag}{i}" for i in range(2)]
    made: list[str] = []
    try:
        try:
            for name in names:
                run(f"ip netns add {name}")
                made.append(name)
            ends = [f"{link} netns {name}" for link, name in zip(links, names, strict=True)]
            run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
            for name, link, address in zip(names, links, addresses, strict=True):
                run(f"ip -n {name} addr add {address}/24 dev {link}")
                for device in (link, "lo"):
                    run(f"ip -n {name} link set {device} up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not available: {error}")
        yield list(zip(names, links, addresses, strict=True))
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def torchrun(
    prefixes: list[list[str]], interfaces: list[str], ranks: list[int], address: str, port: int
) -> list[dict[str, Any]]:
    """Start an agent for each number of ranks; returns what every rank printed, in rank order."""
    agents: list[subprocess.Popen[str]] = []
    lines: list[dict[str, Any]] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TRITON_INTERPRET"] = "1"  # for the kernels of "cuda", which only then run here
    try:
        for node, prefix in enumerate(prefixes):
            command = [
                *(*prefix, sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(ranks)}", f"--node-rank={node}"),
                *(f"--nproc-per-node={ranks[node]}",),
                *(f"--master-addr={address}", f"--master-port={port}", "-m", __name__),
            ]
            agents.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment | {"GLOO_SOCKET_IFNAME": interfaces[node]},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for agent in agents:
            out, err = agent.communicate(timeout=100)
            assert agent.returncode == 0, err[-3000:]
            lines += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return sorted(lines, key=lambda report: report["rank"])


@pytest.mark.parametrize("ranks", [[1, 1], [2, 1]])
def test_two_hosts(hosts, ranks):
    names, interfaces, addresses = map(list, zip(*hosts, strict=True))
    prefixes = [["ip", "netns", "exec", name] for name in names]
    found = torchrun(prefixes, interfaces, ranks, addresses[0], 29517)
    assert [report["rank"] for report in found] == list(range(sum(ranks)))
    reason = f"ranks 0 and {ranks[0]}: different mount namespaces (containers)"
    for report in found:
        assert (report["provider"], report["reason"]) == ("none", reason)
        assert reason in report["refused"], "provider='host' says why it is impossible"
        assert report["bits"] == found[0]["bits"]
        # the ranks of one host still share its memory
        together = report["rank"] < ranks[0] and ranks[0] > 1
        assert report["neighbours"] == ("host" if together else "none")


def test_two_agents_on_one_host():
    """The host is found out from the kernel, not from who started whom."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = torchrun([[], []], ["lo", "lo"], [1, 1], "127.0.0.1", port)
    assert [report["rank"] for report in found] == [0, 1]
    for report in found:
        assert (report["provider"], report["refused"]) == ("host", "")
        assert report["bits"] == found[0]["bits"]


def main() -> None:
    """Every op and collective against the oracle; the report of this rank on standard output."""
    dist.init_process_group("gloo")
    with ParallelGroup(timeout=30) as group:
        report = {"rank": group.rank, "provider": group.provider, "reason": group.provider_reason}
        bits = []
        for op in OPERATIONS:
            for rows, dtype in ((5, torch.float32), (300, torch.bfloat16), (7, torch.float64)):
                case = Case(op, (rows,), 24, (10,), dtype=dtype, implementation="auto", seed=rows)
                bits.append(check(case, compute(case, group), group))
            overlapped = Case(op, (70,), 24, (10,), implementation="cuda")
            bits.append(check(overlapped, compute(overlapped, group), group))
            ran = f"{op}.backward" if op == "copy_linear" else op
            assert group.stats()["calls"][ran]["cuda"] == 1
        x = torch.arange(10.0).view(5, 2) + 1
        assert torch.equal(all_reduce(x, group), x * group.size)
        mine = (x * group.size).tensor_split(group.size)[group.rank]
        assert torch.equal(reduce_scatter(x, group), mine)
        gathered = all_gather(mine, group, rows=5)
        assert torch.equal(gathered, x * group.size)
        barrier(group)
        report["bits"] = [*bits, digest(gathered)]
        report["refused"] = ""
        try:
            ParallelGroup(provider="host", timeout=30).close()
        except UnsupportedError as error:
            report["refused"] = str(error)
        local = ranks_of_this_host(group)
        with ParallelGroup(local, timeout=30) as neighbours:
            assert all_reduce(x, neighbours).equal(x * neighbours.size)
            report["neighbours"] = neighbours.provider
    os.write(1, f"{json.dumps(report)}\n".encode())  # at once: ranks share the pipe
    dist.destroy_process_group()


def ranks_of_this_host(group: ParallelGroup) -> dist.ProcessGroup:
    """Every process makes the groups of all hosts, and takes its own."""
    hosts: list[int] = all_gather(torch.tensor([int(os.environ["GROUP_RANK"])]), group).tolist()
    made = [
        dist.new_group([rank for rank, other in enumerate(hosts) if other == host])
        for host in sorted(set(hosts))
    ]
    return made[hosts[group.rank]]


if __name__ == "__main__":
    main()
