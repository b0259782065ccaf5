"""Loading Hugging Face folders: all layouts, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.model import checkpoint
from headrace.model.checkpoint import CheckpointError, load_model, read_config
from headrace.model.config import DenseMLP, MoEMLP, Norm
from headrace.model.hf_config import parse_config
from headrace.model.presets import NORTH_MINI_CODE
from tests.model.conftest import MakeReference
from tests.model.reference import LLAMA3_ROPE, Reference, assert_same_logits

WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def split(folder: Path, shards: int) -> None:
    """Spread the tensors over several files with an index, as large checkpoints are."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    where = {name: files[index % shards] for index, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def fuse(tensors: Tensors) -> None:
    """One tensor for all experts of a layer, gate rows before up rows."""
    for router in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        experts = router.replace("gate.weight", "experts")
        parts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
        for expert in range(len(tensors[router])):
            for part, found in parts.items():
                found.append(tensors.pop(f"{experts}.{expert}.{part}_proj.weight"))
        gate_up = torch.cat((torch.stack(parts["gate"]), torch.stack(parts["up"])), dim=1)
        tensors[f"{experts}.gate_up_proj"] = gate_up.contiguous()
        tensors[f"{experts}.down_proj"] = torch.stack(parts["down"])


def load(folder: Path) -> Any:
    return load_model(folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def north(reference: MakeReference) -> Reference:
    return reference("cohere2_moe")


def test_many_files_with_an_index(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    split(folder, 3)
    assert_same_logits(load(folder).full(north.tokens), north.logits)


def test_many_files_without_an_index(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    split(folder, 3)
    (folder / "model.safetensors.index.json").unlink()
    assert_same_logits(load(folder).full(north.tokens), north.logits)


def test_fused_experts(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    change_weights(folder, fuse)
    assert_same_logits(load(folder).full(north.tokens), north.logits)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_logits(load(folder).full(north.tokens), north.logits)
    change_weights(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: lm_head\.weight differs"):
        load(folder)


def test_the_published_spelling_of_the_config(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for field in ("mlp_layer_types", "layer_types", "rope_parameters"):
        del config[field]
    config |= {"first_k_dense_replace": 1, "rope_theta": 50000.0, "tie_word_embeddings": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_config(folder) == read_config(north.folder)


def test_norths_published_config() -> None:
    """The fields of the published config.json give the preset, which has the published size."""
    fields = {
        "model_type": "cohere2_moe",
        "vocab_size": 262144,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 0,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 3072,
        "prefix_dense_sliding_window_pattern": 1,
        "layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(49)],
        "sliding_window": 4096,
        "rope_theta": 50000,
        "max_position_embeddings": 500000,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "use_parallel_block": True,
        "use_qk_norm": False,
        "rms_norm_eps": 1e-6,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "attention_bias": False,
        "tie_word_embeddings": None,
        "eos_token_id": 255001,
    }
    assert parse_config(fields) == NORTH_MINI_CODE
    del fields["layer_types"]
    assert parse_config(fields | {"sliding_window_pattern": 4}) == NORTH_MINI_CODE


def test_layer_norm_is_chosen_by_a_missing_rms_eps(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    change_config(folder, rms_norm_eps=None, layer_norm_eps=1e-3)
    config = read_config(folder)
    assert (config.norm, config.norm_eps) == (Norm.LAYER, 1e-3)


def test_end_tokens_come_from_both_files(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    change_config(folder, eos_token_id=[5, 7])
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(folder).eos_token_ids == (5, 7, 9)


def test_old_spelling_of_the_rope_scaling(reference: MakeReference) -> None:
    new = json.loads((reference("llama", rope_parameters=LLAMA3_ROPE).folder / "config.json").read_text())
    rope = dict(new["rope_parameters"])
    old = {field: value for field, value in new.items() if field != "rope_parameters"}
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    assert parse_config(old | {"rope_scaling": rope}) == parse_config(new)


def test_layers_are_described_one_by_one(north: Reference) -> None:
    config = read_config(north.folder)
    assert isinstance(config.layers[0].mlp, DenseMLP)
    assert all(isinstance(layer.mlp, MoEMLP) for layer in config.layers[1:])
    assert [layer.window for layer in config.layers] == [None, *[100] * 3, None, *[100] * 3, None]


Q3 = "model.layers.3.self_attn.q_proj.weight"
WRONG_WEIGHTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda t: (t.pop(Q3), t.pop("model.norm.weight")),
        rf"missing tensors: {Q3}, model\.norm\.weight",
    ),
    "missing expert": (
        lambda t: t.pop("model.layers.2.mlp.experts.7.up_proj.weight"),
        r"missing tensors: model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.3.self_attn.q_norm.weight": torch.ones(16)}),
        r"unexpected tensors: model\.layers\.3\.self_attn\.q_norm\.weight",
    ),
    "wrong shape": (
        lambda t: t.update({Q3: torch.ones(64, 64)}),
        rf"{Q3} in .*model\.safetensors has shape \[64, 64\], but the config asks for \[128, 64\]",
    ),
    "quantised": (
        lambda t: t.update({Q3: torch.ones(128, 64, dtype=torch.int8)}),
        rf"model\.safetensors: {Q3} is stored as I8; only F64, F32, F16, BF16",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_wrong_weights_are_refused_before_memory_is_spent(
    change: Callable[[Tensors], object],
    message: str,
    north: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copy(north.folder, tmp_path)
    change_weights(folder, change)
    monkeypatch.setattr(checkpoint, "build_model", lambda *_, **__: pytest.fail("memory was allocated"))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def cut_off_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(bytes(content))


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


WRONG_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut_off, r"model\.safetensors: model\.\S+ should end at byte \d+ of the data"),
    "cut off in the header": (
        cut_off_in_the_header,
        r"model\.safetensors: its header ends beyond its 200 bytes",
    ),
    "empty": (empty, r"model\.safetensors: its header ends beyond its 0 bytes"),
    "garbled header": (garble_header, r"model\.safetensors: its header is no JSON object"),
    "entry without offsets": (
        lambda file: edit_header(file, lambda header: header[Q3].pop("data_offsets")),
        rf"model\.safetensors: the header's entry of {Q3} is not readable",
    ),
    "range that does not fit": (
        lambda file: edit_header(file, lambda header: header[Q3].update(shape=[64, 64])),
        rf"model\.safetensors: the byte range of {Q3} does not fit its shape \(64, 64\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_damaged_files_name_file_and_tensor(
    damage: Callable[[Path], object], message: str, north: Reference, tmp_path: Path
) -> None:
    folder = copy(north.folder, tmp_path)
    damage(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_shard_that_is_not_there(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    split(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names files that are not there: model-00002-of-00003\.saf"):
        load(folder)


def test_a_tensor_in_two_files(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    save_file({Q3: torch.ones(2)}, folder / "model-extra.safetensors")
    with pytest.raises(CheckpointError, match=rf"{Q3} is both in"):
        load(folder)


def test_a_broken_index(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is no index of a checkpoint"):
        load(folder)


def test_a_folder_without_weights(north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        load(folder)


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "qwen3"}, "model_type is 'qwen3'; supported are cohere2_moe and llama"),
    "attention bias": ({"attention_bias": True}, "attention_bias is True, which is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "query norm": ({"use_qk_norm": True}, "use_qk_norm is True"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "softmax router": ({"expert_selection_fn": "softmax"}, "expert_selection_fn is 'softmax'"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    "no size": ({"hidden_size": None}, "the field hidden_size is missing"),
    "odd heads": ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types must name one of"),
    "unknown layer type": ({"layer_types": ["chunked"] * 9}, "layer_types must name one of"),
    "sharing": (
        {"num_shared_experts": 1, "shared_expert_combination_strategy": "max"},
        "only average and sum exist",
    ),
    "a part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "a part, where rope is described": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    "rope by kind of layer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        "differ by kind of layer",
    ),
    "a number as text": ({"num_hidden_layers": "9"}, "num_hidden_layers is '9': it must be a whole number"),
    "a size of 0": ({"vocab_size": 0}, "vocab_size is 0: it must be a whole number from 1 up"),
    "yes for true": ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes': it must be true or false"),
    "no number": ({"rms_norm_eps": [1e-6]}, "it must be a number above 0"),
    "layer types by count": ({"layer_types": 9}, "layer_types is 9: it must be a list of names"),
    "scaling by number": ({"rope_scaling": 8.0}, "rope_scaling is 8.0: it must be an object"),
    "end token as text": ({"eos_token_id": "3"}, "eos_token_id is '3': it must be a token id"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_unsupported_configs(fields: dict[str, Any], message: str, north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        load(folder)


def test_null_counts_as_absent(reference: MakeReference) -> None:
    for family, field in (("llama", "rms_norm_eps"), ("cohere2_moe", "logit_scale")):
        fields = json.loads((reference(family).folder / "config.json").read_text())
        without = {name: value for name, value in fields.items() if name != field}
        assert parse_config(fields | {field: None}) == parse_config(without)


def test_llama_with_a_window(reference: MakeReference, tmp_path: Path) -> None:
    folder = copy(reference("llama").folder, tmp_path)
    change_config(folder, sliding_window=128)
    with pytest.raises(CheckpointError, match="sliding_window is set"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_unreadable_config(content: str, north: Reference, tmp_path: Path) -> None:
    folder = copy(north.folder, tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json .*fetch it again"):
        load(folder)


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not exist: give a Hugging Face folder or a \.gguf"):
        load(tmp_path / "nothing")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "weights.bin")


class Recorder:
    """A progress display that remembers what it was told."""

    def __init__(self) -> None:
        self.total = self.done = self.finished = 0

    def start(self, what: str, total: int) -> None:
        self.total += total

    def advance(self, amount: int) -> None:
        self.done += amount

    def finish(self) -> None:
        self.finished += 1


def test_progress_counts_every_byte(north: Reference) -> None:
    recorder = Recorder()
    load_model(north.folder, device="cpu", dtype=torch.bfloat16, progress=recorder)
    stored = sum(tensor.nbytes for tensor in load_file(north.folder / WEIGHTS).values())
    assert (recorder.total, recorder.done, recorder.finished) == (stored, stored, 1)
