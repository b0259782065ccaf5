"""The kernel over long texts: what it makes of prompts, and how well it foretells what it is fed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernel.check.against_model import ModelBench


@dataclass(frozen=True)
class Followed:
    """Greedy tokens of the kernel, held against what PyTorch would take at the same places.

    PyTorch's noise is the largest distance of any logit in bfloat16 from float32's, anywhere in a row's text:
    at most places it is a tenth of that, but a token that goes to another expert gets a different answer, and
    not at the same places in two implementations.
    """

    tokens: int
    near: int  # places whose two largest logits in float32 are nearer than the noise: there roundings decide
    margin: float  # the largest by which float32 would rather have another token than the kernel's, in noise
    partings: int  # the kernel's tokens that are not float32's
    usual: int  # places where PyTorch in bfloat16 would not take float32's token

    @property
    def near_share(self) -> float:
        return self.near / self.tokens

    @property
    def most_partings(self) -> int:
        """As many as may be: the few that roundings make are not the same in two implementations."""
        return 2 * self.usual + 10

    def __add__(self, other: Followed) -> Followed:
        return Followed(
            self.tokens + other.tokens,
            self.near + other.near,
            max(self.margin, other.margin),
            self.partings + other.partings,
            self.usual + other.usual,
        )


def follow(bench: ModelBench, launches: int, steps: int = 16) -> Followed:
    """Have the kernel go on with the bench's prompts, and PyTorch read prompts and tokens.

    Raises ValueError if a step or a row is missing.
    """
    made: list[list[int]] = [[] for _ in bench.prompts]
    for _ in range(launches):
        for tokens in bench.launched(steps):
            if len(tokens) != len(made):
                raise ValueError(f"a step made {len(tokens)} tokens, not {len(made)}")
            for row, token in zip(made, tokens, strict=True):
                row.append(token)
            bench.advance(tokens)
    if any(len(row) != launches * steps for row in made):
        raise ValueError(f"{len(made[0])} steps were made, not {launches * steps}")
    rows = [_followed(bench, *row) for row in zip(bench.prompts, made, strict=True)]
    return sum(rows[1:], rows[0])


@torch.no_grad()
def _followed(bench: ModelBench, prompt: list[int], made: list[int]) -> Followed:
    text = torch.tensor([[*prompt, *made[:-1]]], device=bench.model.device)
    exact, rounded = (model.full(text)[0, len(prompt) - 1 :] for model in (bench.exact, bench.model))
    taken = torch.tensor(made, device=exact.device)[:, None]
    first, second = exact.topk(2).values.unbind(1)
    noise = (rounded - exact).abs().max()
    margins = first - exact.gather(1, taken)[:, 0]
    return Followed(
        tokens=len(made),
        near=int((first - second < noise).sum()),
        margin=float(margins.max() / noise),
        partings=int((margins > 0).sum()),
        usual=int((rounded.argmax(1) != exact.argmax(1)).sum()),
    )


def nats(bench: ModelBench, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Cross-entropy a token of texts of one length, in nats: by the kernel's logits, and by float32's.

    The bench's prompts are the first tokens of the texts; the kernel is fed the others one a launch.
    """
    tokens = torch.tensor(texts, device=bench.model.device)
    ours = []
    for column in tokens[:, 1:].t():
        ours.append(_nats(bench.kernel_logits(), column))
        bench.advance(column.tolist())
    with torch.no_grad():
        right = [_nats(bench.exact.full(text[None, :-1])[0], text[1:]) for text in tokens]
    return float(torch.stack(ours).mean()), float(torch.stack(right).mean())


def perplexity_error(kernel: float, right: float) -> float:
    """How far the perplexity of `kernel` nats a token is from that of `right`, in proportion."""
    return abs(math.expm1(kernel - right))


def _nats(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.double(), tokens)
