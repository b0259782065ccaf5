"""The training loop: batches, schedule, measurements, and a clock that it obeys."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headrace.model.layers import MoE, route
from headrace.model.transformer import Model
from tools.micro.data import Corpus, TokenArray
from tools.micro.network import Trainee, TrainingPass

# Windows of the stream start anywhere; this share of them moves on to the start of the next document, if that
# is near, since every prompt that is served starts with one.
ALIGNED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train: the schedule follows `steps`, or the clock where that is ahead of them.

    `balance` weighs the mean balance loss of the layers against the mean nats a token.
    """

    minutes: float = 8.7
    steps: int = 3800
    batch: int = 32
    time: int = 2048
    learning_rate: float = 3e-3
    weight_decay: float = 0.2
    dropout: float = 0.15
    balance: float = 0.1
    warm_up: float = 0.02
    clip: float = 1.0
    seed: int = 20
    compile: bool = False


@dataclass(slots=True)
class Measured:
    """One line of the loss curve; nats a token. `held_out` is filled at a few steps only."""

    step: int
    seconds: float
    tokens: int
    loss: float
    balance: float
    held_out: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a run gives besides the weights. `usage`: by layer, each expert's share of held-out choices."""

    recipe: Recipe
    steps: int
    tokens: int
    seconds: float
    held_out_loss: float
    usage: dict[int, list[float]]
    curve: list[Measured] = field(default_factory=list)

    def facts(self) -> dict[str, object]:
        return asdict(self)


def windows(corpus: Corpus, recipe: Recipe, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for ever: tokens [batch, time + 1], and whether each of the last `time` is to be predicted.

    Raises ValueError for a corpus that has not enough for one.
    """
    tokens = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)
    learn = torch.from_numpy(corpus.learn).to(device)
    dice = np.random.default_rng(recipe.seed)
    span = recipe.time + 1
    reach = torch.arange(span, device=device)
    while True:
        first = np.arange(dice.integers(recipe.time), len(corpus.tokens) - span, recipe.time)
        dice.shuffle(first)
        if len(first) < recipe.batch:
            raise ValueError(
                f"{len(corpus.tokens)} tokens have {len(first)} windows of {recipe.time}, fewer than the "
                f"{recipe.batch} of a batch: take smaller batches, or more text"
            )
        following = corpus.starts[np.minimum(np.searchsorted(corpus.starts, first), len(corpus.starts) - 1)]
        near = (following - first < recipe.time // 2) & (following + span < len(corpus.tokens))
        first = np.where(near & (dice.random(len(first)) < ALIGNED_SHARE), following, first)
        for at in range(0, len(first) - recipe.batch + 1, recipe.batch):
            index = torch.from_numpy(first[at : at + recipe.batch]).to(device)[:, None] + reach
            yield tokens[index].long(), learn[index][:, 1:]


def rate(recipe: Recipe, progress: float) -> float:
    """The learning rate at `progress` 0..1: a linear warm-up, then a cosine down to nothing."""
    if progress < recipe.warm_up:
        return recipe.learning_rate * max(progress / recipe.warm_up, 0.01)
    past = (progress - recipe.warm_up) / (1 - recipe.warm_up)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(past, 1.0)))


def optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; norms and the embedding do not decay."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.startswith("embed")]
    kept = [p for n, p in model.named_parameters() if p.dim() == 1 or n.startswith("embed")]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=model.device.type == "cuda"
    )


def train(model: Model, corpus: Corpus, held_out: Corpus, recipe: Recipe) -> Outcome:
    """Train `model` (float32 weights, in place) and round it to bfloat16's values at the end."""
    start = time.monotonic()
    limit = recipe.minutes * 60
    model.requires_grad_(True)
    trainee = Trainee(model, recipe.time, recipe.dropout).train()
    objective = torch.compile(losses) if recipe.compile else losses
    steps = optimizer(model, recipe)
    batches = windows(corpus, recipe, model.device)
    curve: list[Measured] = []
    step, every, checks = 0, max(1, recipe.steps // 100), max(1, recipe.steps // 8)
    while step < recipe.steps and time.monotonic() - start < limit:
        progress = max(step / recipe.steps, (time.monotonic() - start) / limit)
        for group in steps.param_groups:
            group["lr"] = rate(recipe, progress)
        tokens, learn = next(batches)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            loss, balance = objective(trainee, tokens, learn)
        torch.autograd.backward(loss + recipe.balance * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        steps.step()
        steps.zero_grad(set_to_none=True)
        step += 1
        if step % every == 0 or step in (1, recipe.steps):
            seconds = time.monotonic() - start
            line = Measured(step, seconds, step * learn.numel(), loss.item(), balance.item())
            if step % checks == 0 or step == recipe.steps:
                line.held_out = held_out_loss(trainee, held_out, recipe)
            curve.append(line)
            print(f"step {step} {seconds:.0f} s loss {line.loss:.4f} held out {line.held_out}", flush=True)
    seconds = time.monotonic() - start
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    final = held_out_loss(trainee, held_out, recipe)
    usage = expert_usage(model, held_out, recipe.time)
    return Outcome(recipe, step, step * recipe.batch * recipe.time, seconds, final, usage, curve)


def held_out_windows(stream: TokenArray | NDArray[np.bool_], time: int, device: torch.device) -> Tensor:
    """[windows, time + 1]: the stream in order; a window begins with the last entry of the one before."""
    count = (len(stream) - 1) // time
    return torch.from_numpy(stream.astype(np.int64)).to(device).unfold(0, time + 1, time)[:count]


def losses(trainee: Trainee, tokens: Tensor, learn: Tensor) -> tuple[Tensor, Tensor]:
    """Mean nats over the tokens to be learned, and the balance loss, of one batch of `windows`."""
    out: TrainingPass = trainee(tokens[:, :-1])
    each = functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (each * learn.flatten()).sum() / learn.sum().clamp_min(1), out.balance


@torch.no_grad()
def held_out_loss(trainee: Trainee, corpus: Corpus, recipe: Recipe) -> float:
    """Mean nats a token over the held-out text; beginnings of documents are not predicted."""
    device = trainee.model.device
    trainee.eval()
    rows = held_out_windows(corpus.tokens, recipe.time, device)
    learn = held_out_windows(corpus.learn, recipe.time, device)[:, 1:].bool()
    total, count = 0.0, 0
    for at in range(0, len(rows), recipe.batch):
        counted = learn[at : at + recipe.batch]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mean, _ = losses(trainee, rows[at : at + recipe.batch], counted)
        total += mean.item() * int(counted.sum())
        count += int(counted.sum())
    trainee.train()
    return total / count


@torch.no_grad()
def expert_usage(model: Model, corpus: Corpus, time: int) -> dict[int, list[float]]:
    """For each routed layer, the share of the held-out text's choices that each expert has."""
    counts: dict[int, Tensor] = {}

    def watch(layer: int, moe: MoE, h: Tensor) -> None:
        ids, _ = route(moe.router_logits(h.flatten(0, -2)), moe.mlp)
        counts[layer] = counts.get(layer, 0) + torch.bincount(ids.flatten(), minlength=moe.mlp.experts)

    hooks = []
    for layer, block in enumerate(model.blocks):
        if isinstance(block.mlp, MoE):
            hooks.append(
                block.mlp.register_forward_pre_hook(lambda moe, args, at=layer: watch(at, moe, args[0]))
            )
    for row in held_out_windows(corpus.tokens, time, model.device)[:32]:
        model.full(row[None, :-1])
    for hook in hooks:
        hook.remove()
    return {layer: (count / count.sum()).tolist() for layer, count in counts.items()}
