"""Which ranks share this host, decided from facts of the kernel, never from an environment variable.

Two ranks can map one segment only if they run on one boot of one kernel (boot id), see the same mount
tree and the same /dev/shm, and can watch each other's process (PID namespace).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SHM_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class HostIdentity:
    """What a rank tells its peers about where it runs."""

    boot_id: str
    mount_namespace: str
    pid_namespace: str
    shm_device: int
    uid: int
    pid: int

    @classmethod
    def current(cls) -> HostIdentity:
        return cls(
            boot_id=_read("/proc/sys/kernel/random/boot_id"),
            mount_namespace=_link("/proc/self/ns/mnt"),
            pid_namespace=_link("/proc/self/ns/pid"),
            shm_device=os.stat(SHM_DIR).st_dev if SHM_DIR.is_dir() else -1,
            uid=os.geteuid(),
            pid=os.getpid(),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> HostIdentity:
        return cls(**json.loads(text))

    def obstacle(self, other: HostIdentity) -> str | None:
        """Why these two ranks cannot share memory, or None when they can."""
        if not self.boot_id or self.boot_id != other.boot_id:
            return "different hosts (boot id)"
        if not self.mount_namespace or self.mount_namespace != other.mount_namespace:
            return "different mount namespaces (containers)"
        if self.pid_namespace != other.pid_namespace:
            return "different PID namespaces (containers)"
        if self.shm_device < 0 or self.shm_device != other.shm_device:
            return f"no common {SHM_DIR}"
        if self.uid != other.uid:
            return "different users"
        return None

    def same_processes(self, other: HostIdentity) -> bool:
        """True if `other.pid` means something to this process."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


def process_state(pid: int) -> str | None:
    """State letter of a process from /proc ('R', 'S', 'T', 'Z', ...), or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
