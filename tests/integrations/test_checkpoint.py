"""Finding checkpoints, converting GGUF files, and reading slices."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tp_kernels.comm import ShapeError, UnsupportedError
from tp_kernels.integrations import checkpoint
from tp_kernels.integrations.checkpoint import (
    SafetensorsReader,
    read_slices,
    resolve_checkpoint,
    stock_checkpoint,
)

from .tiny_gguf import FEED_FORWARD, HEADS, HIDDEN, VOCABULARY, write_gguf


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tp_kernels"


@pytest.fixture
def no_network(monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_stock_directory_is_taken_as_it_is(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert stock_checkpoint(str(tmp_path)) == tmp_path


def test_a_gguf_file_alone_and_in_a_directory(tmp_path):
    file = write_gguf(tmp_path / "small.gguf")
    assert resolve_checkpoint(file) == file
    assert resolve_checkpoint(tmp_path) == file
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match=r"2 \.gguf files; name one"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["carries-a-model", "carries_a_model"])
def test_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch, name):
    package = tmp_path / "carries_a_model"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = write_gguf(package / "data" / "small.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(package)
    assert resolve_checkpoint(name) == file
    assert "carries_a_model" not in sys.modules


def test_what_was_tried_is_listed(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        resolve_checkpoint("no-such-model")
    message = str(caught.value)
    assert "no-such-model: does not exist" in message
    assert "package no_such_model: not installed" in message
    assert "Nothing is downloaded" in message
    with pytest.raises(UnsupportedError, match=r"package json: carries no \.gguf file"):
        resolve_checkpoint("json")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UnsupportedError, match=r"does not end in \.gguf"):
        resolve_checkpoint(tmp_path / "notes.txt")


def test_pickled_weights_are_refused(tmp_path, llama):
    llama.config.save_pretrained(tmp_path)
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    for refuse in (resolve_checkpoint, SafetensorsReader):
        with pytest.raises(UnsupportedError, match="pickled objects, which are not loaded"):
            refuse(tmp_path)


def test_a_file_that_only_looks_like_gguf_is_refused(tmp_path):
    file = tmp_path / "fake.gguf"
    file.write_bytes(b"nope")
    with pytest.raises(UnsupportedError, match="not a GGUF file"):
        stock_checkpoint(file)


@pytest.mark.usefixtures("no_network")
def test_a_gguf_is_converted_once_to_a_stock_checkpoint(tmp_path, cache):
    file = write_gguf(tmp_path / "small.gguf")
    stages: list[tuple[str, int, int]] = []
    target = stock_checkpoint(file, lambda *stage: stages.append(stage))
    assert target.parent == cache
    assert ("dequantising the weights", 5, 11) in stages
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "llama" and "quantization_config" not in config

    stock = transformers.AutoModelForCausalLM.from_pretrained(target)
    direct = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    tokens = torch.arange(VOCABULARY)[None]
    assert torch.equal(stock(tokens).logits, direct(tokens).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template is not None
    assert tokenizer.convert_tokens_to_ids("#") == 4

    stages.clear()
    assert stock_checkpoint(file, lambda *stage: stages.append(stage)) == target
    assert not stages
    write_gguf(file, layers=2)
    assert stock_checkpoint(file) != target


def test_an_interrupted_conversion_leaves_nothing(tmp_path, cache, monkeypatch):
    def interrupt(source: Path, target: Path, progress: object) -> None:
        (target / "config.json").touch()
        raise KeyboardInterrupt

    file = write_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr(checkpoint, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stock_checkpoint(file)
    assert not list(cache.iterdir())


def test_two_conversions_at_once_agree(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "small.gguf")
    started = []

    def convert(source: Path, target: Path, progress: object) -> None:
        started.append(target)
        while len(started) < 2:
            pass
        for name in ("config.json", "model.safetensors"):
            (target / name).touch()

    monkeypatch.setattr(checkpoint, "_convert", convert)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(stock_checkpoint, [file, file])
    assert first == second
    assert list(cache.iterdir()) == [first]


@pytest.mark.parametrize("shard", ["50GB", "10KB"])
def test_slices_are_those_of_the_whole_tensor(tmp_path, llama, shard):
    llama.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "50GB")
    with read_slices(tmp_path) as reader:
        assert reader.names == sorted(llama.state_dict())
        for name, expected in llama.state_dict().items():
            assert name in reader
            assert reader.shape(name) == tuple(expected.shape)
            assert torch.equal(reader.tensor(name), expected)
            for dim in range(expected.ndim):
                size = expected.shape[dim]
                for start, stop in ((0, size), (1, size - 1), (3, 3), (size, size)):
                    piece = reader.slice(name, dim, start, stop)
                    assert torch.equal(piece, expected.narrow(dim, start, stop - start))
                    assert piece.dtype == expected.dtype
            assert torch.equal(reader.slice(name, -1, 0, 2), expected[..., :2])


def test_a_tensor_outlives_its_reader(tmp_path):
    save_file({"w": torch.arange(6.0)}, tmp_path / "one.safetensors")
    with SafetensorsReader(tmp_path / "one.safetensors") as reader:
        piece = reader.slice("w", 0, 2, 4)
    assert piece.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("bad", [(0, -1, 2), (0, 2, 1), (0, 0, 7), (1, 0, 1), (-2, 0, 1)])
def test_bad_ranges_are_refused(tmp_path, bad):
    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    with pytest.raises(ShapeError, match=r"its shape is \[6\]"):
        read_slices(tmp_path).slice("w", *bad)


def test_bad_files_are_refused(tmp_path):
    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="no tensor 'v'"):
        read_slices(tmp_path).tensor("v")
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(UnsupportedError, match="not a readable safetensors file"):
        read_slices(tmp_path / "bad.safetensors")
    with pytest.raises(UnsupportedError, match="has neither"):
        read_slices(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_lead_out_of_its_directory(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UnsupportedError, match="outside of its directory"):
        read_slices(tmp_path)
    index.write_text("{}")
    with pytest.raises(UnsupportedError, match="not an index"):
        read_slices(tmp_path)
