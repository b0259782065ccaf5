"""The model as everyone else sees it, and the way through it that both families share.

A family adds its blocks: `cohere2_moe.Cohere2Moe` and `llama.Llama`. `build.build_model` picks one.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.attention import Attention, AttentionPass, WholeSequences
from headrace.model.batch import Span
from headrace.model.config import ModelConfig
from headrace.model.fused import Fused
from headrace.model.kv import KVCache
from headrace.model.layers import MoE, make_norm
from headrace.model.paging import PagedSpans
from headrace.model.rope import Rotation, frequencies, rotation


class Block(nn.Module, abc.ABC):
    """One layer of a transformer: x [..., tokens, hidden] in, the same shape out.

    If `ends`, K and V are written for later passes, and nothing else is done: x comes back.
    """

    fused: Fused | None = None

    @abc.abstractmethod
    def forward(self, x: Tensor, tokens: AttentionPass, *, ends: bool = False) -> Tensor: ...


class Model(nn.Module):
    """A decoder-only transformer.

    Parameters are left uninitialised by `build_model`; `checkpoint.load_model` and
    `synthetic.synthetic_model` fill them.
    """

    def __init__(self, config: ModelConfig, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(blocks)
        self.norm = make_norm(config)
        # A tied head is the embedding itself and no parameter of its own.
        self.head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._frequencies: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and activations."""
        return self.norm.weight.dtype

    def use(self, fused: Fused | None) -> None:
        """Have layers take the fused steps wherever these are right for what they are given."""
        for module in self.modules():
            if isinstance(module, (Attention, Block)):
                module.fused = fused
            elif isinstance(module, MoE) and module.shared is None:  # shared experts join before the rounding
                module.experts.fused = fused

    @torch.no_grad()
    def forward(self, spans: Sequence[Span], cache: KVCache) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden], of the tokens of `spans` laid end to end.

        Writes K and V of these tokens into the cache and reads the visible past from it. Positions of visible
        blocks that no token has written yet are masked; a block is cleared when its first token is written.

        Raises ValueError if a span's tables miss a block that it needs.
        """
        return self._run(*self._enter(spans, cache))

    @torch.no_grad()
    def fill(self, spans: Sequence[Span], cache: KVCache) -> Iterator[None]:
        """`forward` for the sake of what it writes into the cache, a layer for each item.

        Nobody reads what the last layer makes of it, so that is left out; what it writes takes so little that
        it comes with the layer before. Other passes may run in between, over other sequences.
        """
        x, paged = self._enter(spans, cache)
        last = len(self.blocks)
        for number, block in enumerate(self.blocks, 1):
            x = block(x, paged, ends=number == last)
            if number != last - 1:
                yield

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, float32 [..., vocab], for hidden states [..., hidden].

        With half-precision weights the products are added in float32; the sum is rounded to the weights'
        type only on a CPU, which has no such product.
        """
        weight = self.embed.weight if self.head is None else self.head.weight
        trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if hidden.is_cuda and hidden.dtype != torch.float32 and not trained:
            flat = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
            scores = flat.view(*hidden.shape[:-1], -1)
        else:
            scores = functional.linear(hidden, weight).float()
        if self.config.logit_scale != 1.0:
            scores = scores * self.config.logit_scale
        return scores

    def full(self, tokens: Tensor) -> Tensor:
        """Logits, float32 [batch, time, vocab], of token ids [batch, time], without a cache.

        Differentiable: training uses it, and tests compare the cached passes with it.
        """
        turned = self._rotation(torch.arange(tokens.shape[1], device=self.device))
        whole = WholeSequences(self.config, tokens.shape[1], turned)
        return self.logits(self._run(self.embed(tokens), whole))

    def _enter(self, spans: Sequence[Span], cache: KVCache) -> tuple[Tensor, PagedSpans]:
        count = sum(len(span.tokens) for span in spans)
        ids = np.fromiter(chain.from_iterable(span.tokens for span in spans), dtype=np.int64, count=count)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        tokens = torch.from_numpy(np.stack([ids, positions])).to(self.device)
        paged = PagedSpans(self.config, spans, cache, self._rotation(tokens[1]))
        return self.embed(tokens[0]), paged

    def _run(self, x: Tensor, tokens: AttentionPass) -> Tensor:
        for block in self.blocks:
            x = block(x, tokens)
        hidden: Tensor = self.norm(x)
        return hidden

    def _rotation(self, positions: Tensor) -> Rotation:
        # Kept outside the module's state: not part of a checkpoint, and float32 whatever the weights are.
        if self._frequencies is None or self._frequencies.device != self.device:
            self._frequencies = frequencies(self.config, self.device)
        return rotation(positions, self._frequencies)
