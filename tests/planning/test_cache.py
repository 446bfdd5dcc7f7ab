"""The file of measured tilings: what is read is what was written, whatever else happened to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.body import write_many
from tp_kernels import UnsupportedError
from tp_kernels.planning import Entry, Hardware, ShapeClass, cache

GPU = Hardware("NVIDIA H200", 90, "3.7.1", "0.1.0")
SHAPE = ShapeClass("linear_all_reduce", 1, 2, 8, 16, 4096, 8192)
TILING = {"block_m": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 4}
ENTRY = Entry(TILING, 12.5, 12.0, 13.25, 100, 15.0, "16 x 4096 x 7168", "2026-01-02T03:04:05+00:00")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "of" / "a user" / "tilings.json"


def test_round_trip(path):
    others = {SHAPE: ENTRY, replace(SHAPE, rows=1): replace(ENTRY, median_us=1.0)}
    assert cache.read(path) == ({}, "")
    assert cache.add(path, GPU, others) == ""
    assert cache.read(path) == ({GPU: others}, "")


def test_entries_are_added_and_replaced(path):
    older, later = replace(GPU, triton="3.6.0"), replace(ENTRY, median_us=11.0)
    cache.add(path, GPU, {SHAPE: ENTRY, replace(SHAPE, world=2): ENTRY})
    cache.add(path, older, {SHAPE: ENTRY})
    cache.add(path, GPU, {SHAPE: later})
    tables = cache.read(path)[0]
    assert tables == {GPU: {SHAPE: later, replace(SHAPE, world=2): ENTRY}, older: {SHAPE: ENTRY}}


def test_people_can_read_it(path):
    """The same text in whatever order it was measured, a field a line."""
    shapes = [SHAPE, replace(SHAPE, rows=64), replace(SHAPE, operation="linear_reduce_scatter")]
    for hardware in (GPU, replace(GPU, device="NVIDIA A100")):
        cache.add(path, hardware, dict.fromkeys(shapes, ENTRY))
    text = path.read_text()
    path.unlink()
    for hardware in (replace(GPU, device="NVIDIA A100"), GPU):
        for shape in reversed(shapes):
            cache.add(path, hardware, {shape: ENTRY})
    assert path.read_text() == text
    assert '     "median_us": 12.5,\n' in text and '"schema": "tp_kernels.tilings/1"' in text


def document(**changes) -> str:
    entry = {"shape": vars(SHAPE), **vars(ENTRY)} | changes.pop("entry", {})
    table = {"hardware": vars(GPU), "entries": [entry]} | changes.pop("table", {})
    return json.dumps({"schema": cache.SCHEMA, "tables": [table]} | changes)


DAMAGED = {
    "empty": "",
    "cut off": document()[:-20],
    "no JSON": "tilings",
    "no document": "[]",
    "no schema": "{}",
    "later version": document(schema="tp_kernels.tilings/2"),
    "no tables": document(tables=None),
    "a number as table": document(tables=[1]),
    "no hardware": document(table={"hardware": None}),
    "part of hardware": document(table={"hardware": {"device": "NVIDIA H200"}}),
    "no entries": document(table={"entries": {}}),
    "no shape": document(entry={"shape": None}),
    "text as size": document(entry={"shape": {**vars(SHAPE), "rows": "16"}}),
    "truth as size": document(entry={"tiling": {**TILING, "stages": True}}),
    "list as tiling": document(entry={"tiling": [64, 64]}),
    "more fields": document(entry={"colour": "red"}),
    "not a number": document(entry={"median_us": float("nan")}),
    "infinite": document(entry={"median_us": float("inf")}),
    "too deep": "[" * 100_000,
}


def test_document_is_one_that_is_read(path):
    path.parent.mkdir(parents=True)
    path.write_text(document())
    assert cache.read(path) == ({GPU: {SHAPE: ENTRY}}, "")
    path.write_text(document(entry={"median_us": 12}))  # whoever edits it need not write 12.0
    assert cache.read(path)[0][GPU][SHAPE].median_us == 12


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_file_is_ignored_and_kept(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tables, problem = cache.read(path)
    assert tables == {} and problem.startswith(f"{path} is ignored: ") and len(problem) < 1000
    note = cache.add(path, GPU, {SHAPE: ENTRY})
    aside = path.with_name("tilings.json.ignored")
    assert note == f"{problem}; moved to {aside}" and aside.read_text() == text
    assert cache.read(path) == ({GPU: {SHAPE: ENTRY}}, "")


def test_file_that_is_not_text_or_no_file(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    assert "is ignored" in cache.read(path)[1]
    assert "is ignored" in cache.read(path.parent)[1]


def test_another_version_is_named(path):
    path.parent.mkdir(parents=True)
    path.write_text(document(schema="tp_kernels.tilings/2"))
    assert "schema 'tp_kernels.tilings/2', this version has" in cache.read(path)[1]


def test_two_processes_write_at_once(world, path):
    problems = world(2).run(write_many, path, GPU, ENTRY, 6)
    assert problems == [[], []]
    tables, problem = cache.read(path)
    assert not problem and len(tables[GPU]) == 12
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_whoever_reads_meanwhile_has_the_old_file(path):
    cache.add(path, GPU, {SHAPE: ENTRY})
    text = path.read_text()
    with open(path) as old:
        cache.add(path, GPU, {replace(SHAPE, rows=1): ENTRY})
        assert old.read() == text


def test_failed_write_changes_nothing(path):
    cache.add(path, GPU, {SHAPE: ENTRY})
    with pytest.raises(ValueError):  # NaN is no JSON
        cache.add(path, GPU, {SHAPE: replace(ENTRY, median_us=float("nan"))})
    assert cache.read(path) == ({GPU: {SHAPE: ENTRY}}, "")
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_no_place_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedError, match="cannot be written"):
        cache.add(tmp_path / "file" / "tilings.json", GPU, {SHAPE: ENTRY})


def test_default_path(monkeypatch, tmp_path):
    monkeypatch.delenv("TP_KERNELS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_path() == tmp_path / ".cache/tp_kernels/tilings.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_path() == tmp_path / "xdg/tp_kernels/tilings.json"
    monkeypatch.setenv("TP_KERNELS_CACHE", str(tmp_path / "own"))
    assert cache.default_path() == tmp_path / "own/tilings.json"
