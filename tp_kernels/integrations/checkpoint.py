"""Find a checkpoint, turn it into a stock one, and read slices of its tensors.

A stock checkpoint is a directory with `config.json`, tokenizer files and safetensors. GGUF files
are converted once and kept in a cache. Nothing here downloads, and nothing unpickles: checkpoints
with only `pytorch_model.bin` are refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..comm.errors import ShapeError, UnsupportedError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many (0: unknown)."""

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


def resolve_checkpoint(model: str | os.PathLike[str]) -> Path:
    """The checkpoint that `model` names: a stock directory or a GGUF file.

    Args:
        model: A directory with a stock checkpoint or with one GGUF file, a GGUF file, or the name
            of an installed Python package that carries one. The package is not imported.

    Raises:
        UnsupportedError: None of these; the message lists what was tried.
    """
    path = Path(model).expanduser()
    tried: list[str] = []

    if path.is_dir():
        if is_stock(path):
            return path
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _checked_gguf(ggufs[0])
        tried.append(
            f"directory {path}: it has no config.json with safetensors beside it, and "
            f"{_count(ggufs)}{_pickle_hint(path)}"
        )
    elif path.is_file():
        if path.suffix == ".gguf":
            return _checked_gguf(path)
        tried.append(f"file {path}: its name does not end in .gguf")
    else:
        tried.append(f"directory or file {path}: does not exist")

    name = str(model).replace("-", "_")
    if name.isidentifier():
        spec = importlib.util.find_spec(name)
        roots = list(spec.submodule_search_locations or ()) if spec else []
        ggufs = sorted(file for root in roots for file in Path(root).rglob("*.gguf"))
        if len(ggufs) == 1:
            return _checked_gguf(ggufs[0])
        if spec is None:
            tried.append(f"Python package {name}: not installed")
        else:
            tried.append(f"Python package {name}: {_count(ggufs)}")

    raise UnsupportedError(
        f"no checkpoint found for {str(model)!r}. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Give a directory with config.json and safetensors, a .gguf file, or an installed "
        "package that carries one. Nothing is downloaded."
    )


def is_stock(path: Path) -> bool:
    """Whether `path` is a directory with `config.json` and safetensors."""
    return (path / "config.json").is_file() and any(
        (path / name).is_file() for name in (_INDEX, _WEIGHTS)
    )


def stock_checkpoint(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """A directory with the stock checkpoint and tokenizer of `model`.

    A GGUF file is converted to fp32 safetensors in the user's cache unless that was done before.
    Two processes may do so at once. `transformers`, `gguf` and `accelerate` are needed for it.

    Args:
        model: As for `resolve_checkpoint`.
        progress: Told about the conversion.

    Raises:
        UnsupportedError: There is no such checkpoint, or a package for the conversion is missing.
    """
    source = resolve_checkpoint(model)
    if source.is_dir():
        return source
    target = _cache_root() / f"{source.stem}-{_fingerprint(source)}"
    if is_stock(target):
        return target

    missing = [
        name
        for name in ("transformers", "gguf", "accelerate", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UnsupportedError(
            f"converting {source} needs {', '.join(missing)}: "
            "pip install 'tp_kernels[transformers]'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A sibling, so that the rename at the end is atomic: others see all of it or nothing.
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        _convert(source, unfinished, progress or _silent)
        try:
            unfinished.rename(target)
        except OSError:
            if not is_stock(target):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


class SafetensorsReader:
    """Slices of the tensors of a stock checkpoint, read from the mapped file when asked for.

    A rank that asks only for its slices never holds a whole tensor. Files are opened when first
    needed and closed by `close` or at the end of a `with` block; tensors stay valid after that.

    Attributes:
        names: Names of all tensors, sorted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a directory with safetensors (with or without an index), or one file.

        Raises:
            UnsupportedError: There are no safetensors, or the index is not usable.
        """
        path = Path(path)
        self._open: dict[Path, Any] = {}
        if path.is_file():
            self._files = dict.fromkeys(self._handle(path).keys(), path)
        elif (path / _INDEX).is_file():
            self._files = _read_index(path)
        elif (path / _WEIGHTS).is_file():
            file = path / _WEIGHTS
            self._files = dict.fromkeys(self._handle(file).keys(), file)
        else:
            raise UnsupportedError(
                f"{path} has neither {_WEIGHTS} nor {_INDEX}{_pickle_hint(path)}"
            )
        self.names = sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor `name`; nothing of it is read."""
        return tuple(self._lazy(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name`."""
        return self._lazy(name)[...]

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`tensor(name).narrow(dim, start, stop - start)`, reading only that.

        Raises:
            ShapeError: The range is not inside the dimension, or there is no such dimension.
        """
        shape = self.shape(name)
        if not -len(shape) <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
            raise ShapeError(f"slice({name!r}, {dim}, {start}, {stop}): its shape is {list(shape)}")
        if start == stop:
            # The library refuses empty slices; a rank may own none of a dimension.
            whole = self._lazy(name)[tuple(slice(0, 1) for _ in shape)]
            return whole.new_empty([0 if d == dim % len(shape) else n for d, n in enumerate(shape)])
        ranges = [slice(None)] * len(shape)
        ranges[dim] = slice(start, stop)
        return self._lazy(name)[tuple(ranges)]

    def close(self) -> None:
        """Close the files."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lazy(self, name: str) -> Any:
        try:
            file = self._files[name]
        except KeyError:
            raise UnsupportedError(f"the checkpoint has no tensor {name!r}") from None
        return self._handle(file).get_slice(name)

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, FileNotFoundError) as error:
                raise UnsupportedError(
                    f"{file} is not a readable safetensors file: {error}"
                ) from error
        return self._open[file]


def read_slices(path: str | os.PathLike[str]) -> SafetensorsReader:
    """A `SafetensorsReader` for the stock checkpoint directory, or the safetensors file, `path`."""
    return SafetensorsReader(path)


def _read_index(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(f"{index} is not an index of safetensors: {error}") from error
    for name in files.values():
        # An index is data from elsewhere; it must not lead out of its directory.
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedError(f"{index} names a file outside of its directory: {name!r}")
    return {tensor: directory / name for tensor, name in files.items()}


def _checked_gguf(path: Path) -> Path:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UnsupportedError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    return path


def _count(ggufs: list[Path]) -> str:
    if not ggufs:
        return "carries no .gguf file"
    return f"carries {len(ggufs)} .gguf files; name one: " + ", ".join(map(str, ggufs))


def _pickle_hint(path: Path) -> str:
    if path.is_dir() and any(path.glob("*.bin")):
        return " (its .bin files hold pickled objects, which are not loaded: save safetensors)"
    return ""


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tp_kernels"


def _fingerprint(path: Path) -> str:
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _convert(source: Path, target: Path, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    with _reported_bars(progress):
        progress("reading the tokenizer", 0, 0)
        AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(target)
        progress("reading the weights", 0, 0)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
        progress("writing safetensors", 0, 0)
        # The weights are no longer quantised; with these, saving is refused.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)


@contextmanager
def _reported_bars(progress: Progress) -> Iterator[None]:
    """Report the steps of the GGUF reader, and keep the bars of `transformers` off the terminal."""
    import transformers.modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    def steps(items: Any, **_: Any) -> Iterator[Any]:
        for done, item in enumerate(items):
            progress("dequantising the weights", done, len(items))
            yield item
        progress("assembling the model", 0, 0)

    active = logging.is_progress_bar_enabled()
    bar = getattr(gguf_reader, "tqdm", None)
    logging.disable_progress_bar()
    gguf_reader.tqdm = steps
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if active:
            logging.enable_progress_bar()
