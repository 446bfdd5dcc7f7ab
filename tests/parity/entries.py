"""All layers of the suite, by name."""

from __future__ import annotations

from . import attention, block, linear, pointwise, vocabulary
from .case import Entry

ENTRIES: dict[str, Entry] = {
    **linear.ENTRIES,
    **attention.ENTRIES,
    **vocabulary.ENTRIES,
    **pointwise.ENTRIES,
    **block.ENTRIES,
}
