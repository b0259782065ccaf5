"""What every weight is called on disk, and which part of which parameter of ours it is.

The maps are explicit, so that loading can say which tensors are missing and which nobody asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headrace.model.config import DenseMLP, ModelConfig, MoEMLP

HEAD = "lm_head.weight"
GGUF_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its name and shape there, and the `region` of our `parameter` that it fills.

    `paired_heads` is not 0 where the rows of that many heads are stored with the two rows of each rotary pair
    next to each other, though the model pairs rows half a head apart (GGUF files of Llama models).
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    region: tuple[int | slice, ...] = ()
    paired_heads: int = 0


def hugging_face_names(config: ModelConfig, stored: Collection[str] = ()) -> list[StoredTensor]:
    """The tensors of a Hugging Face checkpoint of this model.

    Experts come one by one or fused, layer by layer: fused where `stored`, the names in the checkpoint,
    contains a fused name.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    names = [StoredTensor("model.embed_tokens.weight", (vocab, hidden), "embed.weight")]
    for layer in range(config.num_layers):
        names += _layer(config, layer, stored)
    names.append(StoredTensor("model.norm.weight", (hidden,), "norm.weight"))
    if not config.tied_head:
        names.append(StoredTensor(HEAD, (vocab, hidden), "head.weight"))
    return names


def _layer(config: ModelConfig, layer: int, stored: Collection[str]) -> Iterator[StoredTensor]:
    theirs, ours, hidden = f"model.layers.{layer}", f"blocks.{layer}", config.hidden_size
    norms = {"input_layernorm": "norm"}
    if not config.parallel_block:
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    for stored_norm, norm in norms.items():
        yield StoredTensor(f"{theirs}.{stored_norm}.weight", (hidden,), f"{ours}.{norm}.weight")
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for part, shape in (
        ("q", (queries, hidden)),
        ("k", (keys, hidden)),
        ("v", (keys, hidden)),
        ("o", (hidden, queries)),
    ):
        yield StoredTensor(f"{theirs}.self_attn.{part}_proj.weight", shape, f"{ours}.attention.{part}.weight")
    mlp = config.layers[layer].mlp
    if isinstance(mlp, DenseMLP):
        yield from _gated(f"{theirs}.mlp", f"{ours}.mlp", hidden, mlp.width)
    else:
        yield from _routed(f"{theirs}.mlp", f"{ours}.mlp", hidden, mlp, stored)


def _gated(theirs: str, ours: str, hidden: int, width: int) -> Iterator[StoredTensor]:
    for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield StoredTensor(f"{theirs}.{part}_proj.weight", shape, f"{ours}.{part}.weight")


def _routed(
    theirs: str, ours: str, hidden: int, mlp: MoEMLP, stored: Collection[str]
) -> Iterator[StoredTensor]:
    yield StoredTensor(f"{theirs}.gate.weight", (mlp.experts, hidden), f"{ours}.router.weight")
    gate_up, down = f"{ours}.experts.gate_up", f"{ours}.experts.down"
    if f"{theirs}.experts.gate_up_proj" in stored:
        shape = (mlp.experts, 2 * mlp.width, hidden)
        yield StoredTensor(f"{theirs}.experts.gate_up_proj", shape, gate_up)
        yield StoredTensor(f"{theirs}.experts.down_proj", (mlp.experts, hidden, mlp.width), down)
    else:
        for expert in range(mlp.experts):
            one = f"{theirs}.experts.{expert}"
            first, second = slice(0, mlp.width), slice(mlp.width, 2 * mlp.width)
            yield StoredTensor(f"{one}.gate_proj.weight", (mlp.width, hidden), gate_up, (expert, first))
            yield StoredTensor(f"{one}.up_proj.weight", (mlp.width, hidden), gate_up, (expert, second))
            yield StoredTensor(f"{one}.down_proj.weight", (hidden, mlp.width), down, (expert,))
    if mlp.shared_experts:
        yield from _gated(
            f"{theirs}.shared_experts", f"{ours}.shared", hidden, mlp.shared_experts * mlp.width
        )


# GGUF's names of the parts of a Llama model (the gguf library's MODEL_ARCH.LLAMA).
_GGUF_PARTS = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_GGUF_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}


def gguf_names(config: ModelConfig) -> list[StoredTensor]:
    """The tensors of a GGUF file of a Llama model: the same tensors under other names."""
    names = []
    for tensor in hugging_face_names(config):
        path = tensor.parameter.removesuffix(".weight")
        paired = 0
        if path in _GGUF_TOP:
            name = _GGUF_TOP[path]
        else:
            _, layer, part = path.split(".", 2)
            name = f"blk.{layer}.{_GGUF_PARTS[part]}"
            paired = {"attention.q": config.num_heads, "attention.k": config.num_kv_heads}.get(part, 0)
        names.append(StoredTensor(f"{name}.weight", tensor.shape, tensor.parameter, paired_heads=paired))
    return names
