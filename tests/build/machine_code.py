"""What nvcc made of the kernels: read back from the module, and judged.

    python -m tests.build.machine_code    write resources.json: what every kernel takes, for review

The order of instructions is taken as they stand in the file, without following branches: the compiler keeps
a signal next to what orders it, and where it does not, somebody should look.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

TABLE = Path(__file__).with_name("resources.json")

# Data that other threads read or wrote. Words of 32 bits are also counters and records of their own thread.
_STORE = re.compile(r"^(STG?\.E\.(U8|U16|64|128)|REDG?\.|UTMASTG|UTMAREDG|UBLKCP)")
_LOAD = re.compile(r"^(LDG?\.E\.(.*\.)?(U8|U16|64|128)\b(?!\.CONSTANT)|LDGMC|UTMALDG)")
# Through a cache that no acquire empties. Addresses, of 64 bits, never change.
_UNCHANGING = re.compile(r"^LDG\.E\.(U8|U16|128)\.CONSTANT")
_SIGNAL = re.compile(r"^STG?\.E\.STRONG\.SYS$")
# Counters that only this device reads.
_COUNTED = re.compile(r"^(ATOMG|REDG)\.E\.ADD.*\.STRONG\.GPU$")
_OBSERVED = re.compile(r"^LDG?\.E\.STRONG\.SYS$")


@dataclass(frozen=True)
class Function:
    """A kernel in one image: what a block of it takes, and its instructions without operands."""

    image: str
    name: str
    registers: int
    shared: int
    local: int  # bytes of a thread's stack and local memory
    code: tuple[str, ...]

    @property
    def resources(self) -> dict[str, int]:
        return {
            "registers": self.registers,
            "shared": self.shared,
            "signals": sum(bool(_SIGNAL.match(one)) for one in self.code),
            "counted": sum(bool(_COUNTED.match(one)) for one in self.code),
            "observed": sum(bool(_OBSERVED.match(one)) for one in self.code),
        }


def cuobjdump(*arguments: str | Path) -> str:
    """Triton carries the tool, so that it is here wherever the tests are."""
    triton = find_spec("triton")
    assert triton is not None and triton.origin is not None
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def images(file: Path) -> Counter[str]:
    """How many there are of each, "sm_80" for machine code and "compute_120" for PTX."""
    listed = cuobjdump("--list-elf", "--list-ptx", file)
    found = re.findall(r"^(?:ELF|PTX) file.*\.(\w+)\.(cubin|ptx)$", listed, re.MULTILINE)
    return Counter(name.replace("sm_", "compute_") if k == "ptx" else name for name, k in found)


@cache
def functions(file: Path) -> list[Function]:
    """Every kernel in every image of machine code."""
    usage: dict[tuple[str, str], dict[str, int]] = {}
    for image, name, line in _by_function(cuobjdump("--dump-resource-usage", file)):
        if "REG:" in line:
            usage[image, name] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
    code: dict[tuple[str, str], list[str]] = {key: [] for key in usage}
    for image, name, line in _by_function(cuobjdump("-sass", file)):
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z][\w.]*)", line)
        if match:
            code[image, name].append(match[1])
    names = dict(zip(usage, demangled([name for _, name in usage]), strict=True))
    return [
        Function(
            key[0],
            names[key],
            used["REG"],
            used["SHARED"],
            used["STACK"] + used["LOCAL"],
            tuple(code[key]),
        )
        for key, used in usage.items()
    ]


def _by_function(text: str) -> list[tuple[str, str, str]]:
    """(image, function, line) of each line inside a function."""
    image = name = ""
    found = []
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            image, name = match[1], ""
        elif match := re.match(r"\s*Function\s*:?\s+(\S+?):?$", line):
            name = match[1]
        elif name:
            found.append((image, name, line))
    return found


def demangled(names: list[str]) -> list[str]:
    """Like all_reduce.one_shot<Bfloat16>: kernels are named by file, whose namespace has no name."""
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, check=True, capture_output=True, text=True)
    readable = []
    for mangled, plain in zip(names, done.stdout.splitlines(), strict=True):
        file = re.search(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}", mangled)
        name = re.sub(r"\(anonymous namespace\)::|tpk::|device::|^void ", "", plain)
        name = re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)$", "", name)
        name = re.sub(r"(\w+)<Config<[^<>]*> > >$", r"\1>", name)  # written twice
        readable.append(f"{file[1]}.{name}" if file else name)
    return readable


def read_table(toolkit: str) -> dict[str, dict[str, dict[str, int]]]:
    """Recorded resources by image and kernel; empty if they are of another toolkit."""
    content = json.loads(TABLE.read_text())
    return content["resources"] if content["cuda"] == toolkit else {}


def table(file: Path) -> dict[str, dict[str, dict[str, int]]]:
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for one in sorted(functions(file), key=lambda one: (one.image, one.name)):
        of_image = rows.setdefault(one.image, {})
        assert one.name not in of_image, f"two kernels are called {one.name}"
        of_image[one.name] = one.resources
    return rows


def problems(function: Function) -> list[str]:
    """What must not be in the machine code of a kernel."""
    found = []
    if function.local:
        found.append(f"{function.local} bytes of registers are spilled")
    found += [
        f"{one}: a store at a scope that other devices do not see"
        for one in function.code
        if re.search(r"^STG?\..*STRONG\.(GPU|SM|CTA)", one)
    ]
    if function.resources["observed"]:
        found += [f"{one}: data of others read as if it never changed"
                  for one in function.code if _UNCHANGING.match(one)]
    for place, one in enumerate(function.code):
        if _SIGNAL.match(one):
            found += _before(function.code[:place], "SYS")
        elif _COUNTED.match(one):
            found += _before(function.code[:place], "SYS", "GPU")
        elif _OBSERVED.match(one):
            found += _after(function.code[place + 1 :])
    return found


def _before(code: tuple[str, ...], *scopes: str) -> list[str]:
    """Of a signal: the data, a barrier, a fence of one of these scopes, then nothing but the signal."""
    fenced = False
    for one in reversed(code):
        if one.startswith("MEMBAR") and one.endswith(scopes):
            fenced = True
        elif not fenced and (one.startswith("BAR.") or _SIGNAL.match(one) or _COUNTED.match(one)):
            break
        elif one.startswith("BAR."):
            return []
        elif _STORE.match(one) and not _COUNTED.match(one):
            missing = "a barrier" if fenced else "a fence"
            return [f"a signal after {one} without {missing} between"]
    return [] if fenced else ["a signal without a fence before it"]


def _after(code: tuple[str, ...]) -> list[str]:
    """Of a flag that was read: the cache is emptied, then a barrier, then data.

    A thread that loads by the tensor memory accelerator does so itself, behind a fence between proxies.
    """
    emptied = False
    for one in code:
        if one.startswith("CCTL.IVALL"):
            emptied = True
        elif emptied and one.startswith(("BAR.", "FENCE.VIEW.ASYNC.G")):
            return []
        elif _LOAD.match(one) or _STORE.match(one):
            missing = "a barrier" if emptied else "emptying the cache"
            return [f"{one} after a flag was read without {missing} between"]
    return [] if emptied else ["a flag is read and the cache not emptied"]


def main() -> None:
    module = importlib.import_module("tp_kernels._cuda")
    toolkit = ".".join(module.build_info()["cuda"].split(".")[:2])
    content = {"cuda": toolkit, "resources": table(Path(module.__file__ or ""))}
    TABLE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
