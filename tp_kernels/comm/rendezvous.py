"""Small exchanges over a process group's key-value store, used once when a group is made.

Values are JSON or plain text: nothing read from the store is ever unpickled.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from .errors import CollectiveTimeoutError


class Rendezvous:
    """A private corner of `store` shared by the `size` ranks of one group."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._corners: Counter[str] = Counter()

    def corner(self, name: str) -> Rendezvous:
        """A new rendezvous of the same ranks, which all ask for it in the same order."""
        self._corners[name] += 1
        prefix = f"{self._prefix}/{name}{self._corners[name]}"
        return Rendezvous(self._store, prefix, self.rank, self.size, self.timeout)

    def store(self, name: str) -> Store:
        """A store of its own, such as a backend wants."""
        return PrefixStore(f"{self._prefix}/{name}", self._store)

    def next_index(self) -> int:
        """A number that nothing else made over this store by these ranks has."""
        return construction_index(self._store, self.rank)

    def put(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def has(self, key: str) -> bool:
        """Whether anybody has put `key`; never waits."""
        return self._store.check([f"{self._prefix}/{key}"])

    def get(self, key: str, owner: int) -> str:
        """Value of `key`, which rank `owner` puts; waits for it up to the group's timeout."""
        full = f"{self._prefix}/{key}"
        try:
            self._store.wait([full], timedelta(seconds=self.timeout))
        except Exception as error:  # DistStoreError or RuntimeError, depending on the store
            raise CollectiveTimeoutError(
                f"rank {self.rank}: rank {owner} did not reach '{full}' within {self.timeout:g} s "
                "while the group was being made; every rank of the group must construct it, "
                "in the same order"
            ) from error
        return self._store.get(full).decode()

    def exchange(self, key: str, value: str) -> list[str]:
        """Every rank puts `value`; returns the values of all ranks, in rank order."""
        self.put(f"{key}/{self.rank}", value)
        return [
            value if peer == self.rank else self.get(f"{key}/{peer}", peer)
            for peer in range(self.size)
        ]


def construction_index(store: Store, rank: int) -> int:
    """How many groups and the like this rank has made over `store`: equal on all ranks by contract."""
    return store.add(f"tp_kernels/constructed/{rank}", 1)
