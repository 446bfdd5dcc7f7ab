"""Files that commands write: refused before long work, not after it."""

from __future__ import annotations

from pathlib import Path

from tp_kernels.comm.errors import UnsupportedError

PICTURES = (".png", ".svg", ".pdf")


def check_outputs(picture: Path | None = None, **others: Path | None) -> None:
    """UnsupportedError, which names the option, for a file that cannot be written or a format nobody draws.

    Args:
        picture, others: paths by the name of their option.
    """
    for name, path in {"picture": picture, **others}.items():
        if path is None:
            continue
        option = f"--{name.replace('_', '-')} {path}"
        if path.is_dir():
            raise UnsupportedError(f"{option}: is a directory; name a file")
        if not path.absolute().parent.is_dir():
            raise UnsupportedError(f"{option}: there is no directory {path.parent}; make it first")
    if picture is not None and picture.suffix not in PICTURES:
        raise UnsupportedError(
            f"--picture {picture}: use a name that ends in {', '.join(PICTURES)}"
        )
