"""A model that is loaded for the kernel has its weights packed, and only once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import load as loading
from headrace.engine.options import EngineOptions
from headrace.load import SourceError, load, resolve

SOURCES: list[dict[str, Any]] = [
    {"source": "north-micro"},
    {"source": "smollm2"},
    {"source": None, "synthetic": "north-micro-shape"},
]


@pytest.mark.parametrize("source", SOURCES, ids=["checkpoint", "gguf", "synthetic"])
def test_packed_and_plain_models_agree(
    source: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions()
    plain = load(**source, device="cpu", dtype="bfloat16", options=options)
    assert plain.weights is None
    monkeypatch.setattr(loading, "choose_decode", lambda *parts, **named: "kernel")
    packed = load(**source, device="cpu", dtype="bfloat16", options=options)
    assert packed.weights is not None
    tokens = torch.arange(100)[None]
    assert torch.equal(packed.model.full(tokens), plain.model.full(tokens))
    assert load(**source, device="cpu", dtype="bfloat16").weights is None, "nobody said what for"
    kept = list((tmp_path / "headrace" / "weights").glob("*"))
    assert len(kept) == (source["source"] is not None), "synthetic weights are not kept"


@pytest.mark.parametrize("where", ["here", "none"])
def test_packed_weights_are_kept_where_one_says(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "choose_decode", lambda *parts, **named: "kernel")
    folder = tmp_path / where
    options = EngineOptions()
    for _ in range(2):
        chosen = "none" if where == "none" else str(folder)
        loaded = load("north-micro", device="cpu", dtype="bfloat16", options=options, weights_cache=chosen)
        assert loaded.weights is not None
    assert not (tmp_path / "cache").exists()
    assert folder.exists() == (where == "here")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A folder in the place of a file: unlike permissions, it stops root too."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("north-micro"), folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(SourceError, match=r"model\.safetensors cannot be opened: Is a directory"):
        load(str(folder), device="cpu")


def test_a_model_has_the_name_under_which_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a cache of downloads, whose files are links to others that are called by their hash."""
    (tmp_path / "by-hash" / "inner").mkdir(parents=True)
    (tmp_path / "by-hash" / "0f3a").touch()
    (tmp_path / "small.Q8_0.gguf").symlink_to(tmp_path / "by-hash" / "0f3a")
    (tmp_path / "small").symlink_to(tmp_path / "by-hash", target_is_directory=True)
    monkeypatch.chdir(tmp_path / "by-hash")
    for source, name in (
        (str(tmp_path / "small.Q8_0.gguf"), "small.Q8_0"),
        (str(tmp_path / "small"), "small"),
        (str(tmp_path / "small") + "/", "small"),
        (".", "by-hash"),
        ("inner/..", "by-hash"),
        ("smollm2", "smollm2"),
    ):
        assert loading._served_name(source, Path(source)) == name
