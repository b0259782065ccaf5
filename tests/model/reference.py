"""Small random models made and run by transformers, and our models run over them in every way there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, KVCache, blocks_for, first_visible_block
from headrace.model.transformer import Model

VOCAB = 200
TOLERANCE = 1e-5  # on logits of a standard deviation of about 1

NORTH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 96,
    "prefix_dense_sliding_window_pattern": 1,
    "sliding_window_pattern": 4,
    "sliding_window": 100,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_shared_experts": 0,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "logit_scale": 1.0,
    "rope_theta": 50000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_cohere(seed: int) -> dict[str, Any]:
    """Fields that differ from North's; over a few seeds every option is taken."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 4])
    return {
        "hidden_size": draw.choice([32, 48, 64]),
        "num_hidden_layers": draw.randint(5, 9),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice([1, 2, 4]),
        "head_dim": draw.choice([8, 16, 32]),
        "first_k_dense_replace": seed % 3,
        "prefix_dense_sliding_window_pattern": draw.choice([1, 2]),
        "sliding_window_pattern": draw.choice([2, 3, 4]),
        "sliding_window": [1, 8, 63, 64, 65, 128][seed % 6],
        "num_experts": draw.choice([4, 16]),
        "num_experts_per_tok": draw.choice([1, 2, 4]),
        "num_shared_experts": [0, 1, 2][seed % 3],
        "shared_expert_combination_strategy": ["average", "sum"][seed % 2],
        "norm_topk_prob": seed % 2 == 0,
        "rms_norm_eps": [1e-6, None][seed % 2],
        "logit_scale": draw.choice([1.0, 0.5]),
        "tie_word_embeddings": seed % 4 != 3,
    }


def random_llama(seed: int) -> dict[str, Any]:
    """Fields that differ from LLAMA; over a few seeds every option is taken."""
    draw = random.Random(seed)
    kv_heads, shared = draw.choice([1, 2, 3]), [1, 2, 3][seed % 3]
    heads = kv_heads * shared
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "hidden_size": heads * 8,
        "head_dim": draw.choice([8, 16]),
        "num_hidden_layers": draw.randint(1, 4),
        "tie_word_embeddings": seed % 2 == 0,
        "rope_parameters": LLAMA3_ROPE if seed % 3 else {"rope_type": "default", "rope_theta": 10000.0},
    }


@dataclass
class Reference:
    """A model of transformers, the folder that it saved itself to, token ids and what it says about them."""

    folder: Path
    model: Any
    tokens: Tensor  # [1, time]
    logits: Tensor  # [1, time, vocab]

    def greedy(self, count: int) -> list[int]:
        """The `count` tokens that transformers' own generation puts after the tokens."""
        # With a window of 1 its cache keeps everything (it takes the last window - 1 = 0 keys by [-0:]).
        cached = getattr(self.model.config, "sliding_window", None) != 1
        out = self.model.generate(
            self.tokens,
            use_cache=cached,
            attention_mask=torch.ones_like(self.tokens),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return list(out[0, self.tokens.shape[1] :].tolist())


def make_reference(folder: Path, family: str, fields: dict[str, Any], *, seed: int = 0) -> Reference:
    """Make, save and run a model. `fields` are put over those of NORTH or LLAMA."""
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**LLAMA | fields))
    else:
        model = Cohere2MoeForCausalLM(Cohere2MoeConfig(**NORTH | fields))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        tokens = torch.randint(0, VOCAB, (1, 210))
        logits = model(tokens).logits
    model.save_pretrained(folder)
    return Reference(folder, model, tokens, logits)


def cuts(length: int, draw: random.Random) -> list[int]:
    """Lengths of chunks that make up `length`, single tokens and multiples of a block among them."""
    parts: list[int] = []
    while (left := length - sum(parts)) > 0:
        parts.append(min(left, draw.choice([1, 1, 2, 7, 63, 64, 65, draw.randint(1, 150)])))
    return parts


class Paged:
    """A model with a small cache, fed span by span as an engine would.

    Each sequence takes blocks in random order as it grows, and gives those back that fall out of the window;
    blocks are filled with a large number before use, which shows in the logits if it is ever seen.
    """

    POISON = 1e4

    def __init__(self, model: Model, *, blocks: int = 24) -> None:
        self.model = model
        self.groups = [group for group in KVGroup if model.config.layers_in(group)]
        sizes = dict.fromkeys(self.groups, blocks)
        self.cache = KVCache(model.config, sizes, dtype=model.dtype, device=model.device)
        for pages in self.cache.pages:
            pages.fill_(self.POISON)
        draw = random.Random(blocks)
        self.free = {group: draw.sample(range(blocks), blocks) for group in self.groups}
        self.tables: dict[int, dict[KVGroup, list[int]]] = {}
        self.lengths: dict[int, int] = {}

    def span(self, sequence: int, tokens: Sequence[int]) -> Span:
        """The next tokens of a sequence."""
        start = self.lengths.setdefault(sequence, 0)
        tables = self.tables.setdefault(sequence, {group: [] for group in self.groups})
        self.lengths[sequence] = start + len(tokens)
        for group, table in tables.items():
            window = self.model.config.window if group is KVGroup.SLIDING else None
            for index in range(min(first_visible_block(start, window), len(table))):
                if table[index] != NO_BLOCK:
                    self._give_back(group, table[index])
                    table[index] = NO_BLOCK
            while len(table) < blocks_for(start + len(tokens)):
                table.append(self.free[group].pop())
        return Span(list(tokens), start, {group: list(table) for group, table in tables.items()})

    def run(self, *parts: tuple[int, Sequence[int]]) -> list[Tensor]:
        """Logits [tokens, vocab] of each part: the next tokens of a sequence."""
        spans = [self.span(sequence, tokens) for sequence, tokens in parts]
        logits = self.model.logits(self.model(spans, self.cache))
        return list(torch.split(logits, [len(span.tokens) for span in spans]))

    def sequence(self, tokens: Sequence[int], parts: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab] of a whole new sequence, fed in parts of the given lengths."""
        ends = torch.tensor(parts).cumsum(0).tolist()
        key = len(self.tables)
        return torch.cat(
            [self.run((key, tokens[end - part : end]))[0] for part, end in zip(parts, ends, strict=True)]
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens after the prompt, each the most likely one."""
        key = len(self.tables)
        out = [int(self.run((key, prompt))[0][-1].argmax())]
        while len(out) < count:
            out.append(int(self.run((key, out[-1:]))[0][-1].argmax()))
        return out

    def _give_back(self, group: KVGroup, block: int) -> None:
        for layer in self.model.config.layers_in(group):
            self.cache.pages[layer][block] = self.POISON
        self.free[group].insert(0, block)


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """The gate that every comparison goes through."""
    difference = (ours - theirs).abs().max().item()
    assert difference <= TOLERANCE, f"logits differ by {difference}"


def assert_ragged_batches(model: Model, tokens: list[int], seed: int, counts: Sequence[int]) -> None:
    """Four sequences share passes, a part of one of `counts` tokens each, and do not notice each other."""
    draw = random.Random(seed)
    sequences = [tokens[draw.randrange(50) :] for _ in range(4)]
    expected = [model.full(torch.tensor([sequence]))[0] for sequence in sequences]
    paged, done = Paged(model, blocks=40), [0] * 4
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        parts = []
        for index in draw.sample(range(4), draw.randint(1, 4)):
            if part := sequences[index][done[index] : done[index] + draw.choice(counts)]:
                parts.append((index, part))
        if not parts:
            continue
        for (index, part), logits in zip(parts, paged.run(*parts), strict=True):
            assert_same_logits(logits, expected[index][done[index] : done[index] + len(part)])
            done[index] += len(part)
