"""A module `_host` that was built from other sources than the Python beside it is refused, and said to be."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from types import ModuleType
from unittest import mock

import pytest

from tp_kernels import ParallelGroup, _host
from tp_kernels.comm import group as group_module
from tp_kernels.comm.symmetric_memory import INTERFACE, load_host

# The interface of this number. Where the digest is another, raise kInterface in csrc/host/bindings.h and
# INTERFACE in symmetric_memory.py, and write down the new pair; better words need a new digest only.
RECORDED = 1, "ef8a9d6e2e88f23a"


def test_number_is_raised_with_the_bindings():
    found = hashlib.sha256("\n".join(interface()).encode()).hexdigest()[:16]
    assert (INTERFACE, found) == RECORDED, "\n".join(interface())


def interface() -> list[str]:
    """Every function of the module: names and defaults of its arguments, and its docstring.

    Without types, which versions of pybind11 write in their own ways; a wrong one raises where it is passed.
    """
    lines = []
    for owner in (_host, *(x for _, x in sorted(vars(_host).items()) if inspect.isclass(x))):
        for name in ("__init__", *(name for name in sorted(vars(owner)) if name[0] != "_")):
            item = getattr(owner, name)
            if isinstance(item, int):
                continue  # the number itself
            lines.append(f"{owner.__name__}.{name}")
            for line in (item.__doc__ or "").split("\n"):
                if re.match(rf"(\d+\. )?{name}\(", line):  # a signature; one of several
                    line = " ".join(re.findall(r"\w+(?=: )|= [^,)]+|\*(?=,)", line))
                if line:
                    lines.append(f"    {line}")
    return lines


@pytest.mark.parametrize("number", [None, INTERFACE + 1])
def test_module_of_another_interface(monkeypatch, number):
    monkeypatch.setitem(sys.modules, "tp_kernels._host", stand_in(number))
    module, why = load_host()
    assert module is None
    assert why == (
        f"tp_kernels._host was built with interface {number or 0}, this package needs {INTERFACE}: build it "
        "again (`make venv`, or `python setup.py build_ext --inplace`)"
    )


def test_module_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "tp_kernels._host", None)
    assert load_host() == (None, "tp_kernels._host is not built")


def test_module_of_this_interface():
    assert load_host() == (_host, None)


def stand_in(number: int | None) -> ModuleType:
    module = ModuleType("tp_kernels._host")
    if number is not None:
        module.INTERFACE = number
    return module


def test_everything_goes_on_without_it(tmp_path):
    """In a process and its ranks that find such a module."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\nsys.modules['tp_kernels._host'] = types.ModuleType('tp_kernels._host')\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tp_kernels.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    why = f"tp_kernels._host was built with interface 0, this package needs {INTERFACE}: build it again"
    assert not found["built"]["_host"]["built"]
    assert found["built"]["_host"]["detail"].startswith(why)
    assert found["isa"]["why"].startswith(why)
    # As explain() and `group.provider_reason` have it, of ranks of their own.
    assert found["implementations"]["host"]["why"].startswith(why)
    assert found["implementations"]["chunked"]["available"], found["implementations"]


def test_ranks_agree(world):
    """One rank without a module: both say so, and neither waits for the other's segment."""
    assert set(world(2).run(without_on_rank_1)) == {"rank 1: too old"}


def without_on_rank_1() -> str:
    mine = "too old" if os.environ["RANK"] == "1" else None
    with mock.patch.object(group_module, "HOST_OBSTACLE", mine), ParallelGroup() as group:
        assert group.provider == "none"
        return group.provider_reason
