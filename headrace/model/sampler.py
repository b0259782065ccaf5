"""Sampling in PyTorch, on any device: the semantics are those written down in `headrace.model.sampling`.

A row's result is the same to the bit whatever rows are beside it, and the same token on every device for the
same logits. Vectorised logarithms differ between devices, and even between places in one tensor; so a first
pass in float32 only finds the contenders of a draw, the tokens within a safe margin of the best, and scalar
float64 settles it among them. There is nearly always just one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.model import philox
from headrace.model.constraint import Mask, forbidden
from headrace.model.filters import kept, largest
from headrace.model.sampling import SamplingParams, TokenLogprobs

NO_TOKEN = -1

# Float32 scores near the winner and float32 noise are each right to within 1e-5.
_CONTENDER_MARGIN = 1e-4
# A token this far below the most likely one cannot win even with the best noise against the worst.
_OUT_OF_REACH = (
    philox.gumbel_exact(philox.UNIFORM_MAX) - philox.gumbel_exact(philox.UNIFORM_MIN) - _CONTENDER_MARGIN
)
# Rows with less than 1 / 4 of the vocabulary left get noise token by token; one call of Philox serves four.
_SPARSE = 4
# Elements that one dense pass works on: keeps its temporaries inside a CPU's second-level cache.
_CPU_ELEMENTS = 1 << 16
_DEVICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What sampling one row depends on besides its logits.

    `position` is that of the token being sampled. `prompt` and `output` are the tokens before it; only the
    penalties read them. `mask` holds the tokens that a grammar allows (None: all): the logits of the others
    become minus infinity after step 2.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token taken, and its log-probabilities where `params.logprobs` asks for them.

    The token is NO_TOKEN if the row's largest logit is not a finite number: then there is nothing to choose
    from, and the row is over.
    """

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Contender:
    row: int
    token: int
    score: float
    uniform: float


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token for every row of `logits`, float32 [rows, vocab], which stay as they are.

    A row whose largest logit is not a finite number gets NO_TOKEN, and the others theirs as if it was not
    there. Raises ValueError if the logits do not fit the rows or the sampler.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or len(logits) != len(rows):
        raise ValueError(
            f"sampling {len(rows)} rows needs float32 logits [{len(rows)}, vocab], "
            f"not {logits.dtype} {list(logits.shape)}"
        )
    if not rows:
        return []
    adjusted = _adjusted(logits, rows)
    best, tokens = _best(adjusted)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy and tokens[i] != NO_TOKEN]
    if drawn:
        subset = slice(None) if len(drawn) == len(rows) else drawn
        winners = _draw(adjusted[subset], best[subset], [rows[index] for index in drawn])
        for index, token in zip(drawn, winners, strict=True):
            tokens[index] = token
    return [
        Sampled(token)
        if row.params.logprobs is None or token == NO_TOKEN
        else Sampled(token, token_logprobs(raw, token, row.params.logprobs))
        for raw, token, row in zip(logits, tokens, rows, strict=True)
    ]


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits after penalties, bias and mask; the very same tensor if no row has any."""
    changed = [i for i, row in enumerate(rows) if row.params.changes_logits or row.mask is not None]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _penalise(logits[index], rows[index])
        bias = rows[index].params.logit_bias
        if bias:
            logits[index, torch.tensor(list(bias), device=logits.device)] += logits.new_tensor(
                list(bias.values())
            )
        mask = rows[index].mask
        if mask is not None:
            banned = forbidden(mask, logits.shape[1]).to(logits.device)
            logits[index].masked_fill_(banned, -math.inf)
    return logits


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Apply the row's penalties to its logits [vocab], in place."""
    params = row.params
    if not params.needs_history:
        return
    # Tensors, not Python numbers: CUDA divides by a number through its reciprocal, which rounds differently.
    if params.repetition_penalty != 1.0:
        penalty = logits.new_tensor(params.repetition_penalty)
        # A token that comes twice is written twice, with the same value.
        seen = torch.cat([_ids(row.prompt), _ids(row.output)]).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = np.unique(_ids(row.output).numpy(), return_counts=True)
        ids = torch.from_numpy(tokens).to(logits.device)
        times = torch.from_numpy(counts).to(logits.device, torch.float32)
        values = logits[ids] - times * logits.new_tensor(params.frequency_penalty)
        logits[ids] = values - logits.new_tensor(params.presence_penalty)


def _ids(tokens: Sequence[int]) -> Tensor:
    return (
        torch.frombuffer(array("q", tokens), dtype=torch.int64)
        if tokens
        else torch.empty(0, dtype=torch.int64)
    )


def _best(logits: Tensor) -> tuple[Tensor, list[int]]:
    """The largest logit of every row, [rows], and its lowest id; NO_TOKEN if that logit is not finite."""
    if logits.device.type == "cpu":
        ids = torch.from_numpy(logits.detach().numpy().argmax(1))  # NumPy's takes the first of equals
    else:
        ids = _lowest_argmax(logits)
    best = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    pairs = zip(best.tolist(), ids.tolist(), strict=True)
    return best, [token if math.isfinite(value) else NO_TOKEN for value, token in pairs]


def _lowest_argmax(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit in every row, or of a NaN; torch.argmax promises nothing on ties."""
    best = logits.amax(1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ids.where((logits == best) | logits.isnan(), logits.shape[1] - 1).amin(1)


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The tokens of rows that have a temperature, from their logits [rows, vocab] and the largest of each."""
    temperatures = logits.new_tensor([row.params.temperature for row in rows])
    scores = (logits - best.unsqueeze(1)) / temperatures.unsqueeze(1)
    # Where work is free and waiting is not, nobody counts the tokens that may win.
    counts = (scores >= _OUT_OF_REACH).sum(1).tolist() if scores.device.type == "cpu" else None
    dense: list[int] = []
    sparse: dict[int, Tensor] = {}
    for index, row in enumerate(rows):
        few = counts is not None and counts[index] * _SPARSE < scores.shape[1]
        if not few and not row.params.is_filtered:
            dense.append(index)
            continue
        score = scores[index]
        if row.params.is_filtered:
            ids = kept(score, row.params)
            ids = ids[score[ids] >= _OUT_OF_REACH]
        else:
            ids = (score >= _OUT_OF_REACH).nonzero().squeeze(1)
        if len(ids) * _SPARSE < len(score):
            sparse[index] = ids
        else:
            left = score[ids]
            score.fill_(-math.inf).index_copy_(0, ids, left)
            dense.append(index)
    winners = _settle([*_dense_contenders(scores, dense, rows), *_sparse_contenders(scores, sparse, rows)])
    return [winners[index] for index in range(len(rows))]


def _dense_contenders(
    scores: Tensor, indices: Sequence[int], rows: Sequence[SampleRow]
) -> Iterable[_Contender]:
    """Contenders of the rows `indices` of `scores` [rows, vocab], in which most tokens take part."""
    vocab_size = scores.shape[1]
    chunk = max(1, (_CPU_ELEMENTS if scores.device.type == "cpu" else _DEVICE_ELEMENTS) // vocab_size)
    for start in range(0, len(indices), chunk):
        part = indices[start : start + chunk]
        score = scores[part]
        uniforms = philox.uniform_vocabulary(*_streams(part, rows), vocab_size, scores.device)
        noisy = score + philox.gumbel(uniforms)
        near = noisy >= noisy.amax(1, keepdim=True) - _CONTENDER_MARGIN
        owner, token = near.nonzero().unbind(1)
        yield from _contenders(part, owner, token, score[owner, token], uniforms[owner, token])


def _sparse_contenders(
    scores: Tensor, ids: dict[int, Tensor], rows: Sequence[SampleRow]
) -> Iterable[_Contender]:
    """Contenders of rows left with few tokens, `ids` [n] by row, worked on end to end."""
    if not ids:
        return
    indices, token = list(ids), torch.cat(list(ids.values()))
    score = torch.cat([scores[index, row_ids] for index, row_ids in ids.items()])
    lengths = torch.tensor([len(row_ids) for row_ids in ids.values()], device=token.device)
    owner = torch.arange(len(ids), device=token.device).repeat_interleave(lengths)
    uniforms = philox.uniform(*_streams(indices, rows), owner, token)
    noisy = score + philox.gumbel(uniforms)
    best = noisy.new_full((len(ids),), -math.inf).scatter_reduce_(0, owner, noisy, "amax")
    near = noisy >= best[owner] - _CONTENDER_MARGIN
    yield from _contenders(indices, owner[near], token[near], score[near], uniforms[near])


def _streams(indices: Sequence[int], rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
    """Seeds and positions of the rows `indices`."""
    return [rows[index].seed for index in indices], [rows[index].position for index in indices]


def _contenders(
    indices: Sequence[int], owner: Tensor, token: Tensor, score: Tensor, uniforms: Tensor
) -> Iterable[_Contender]:
    values = zip(owner.tolist(), token.tolist(), score.tolist(), uniforms.tolist(), strict=True)
    for number, token_id, token_score, uniform in values:
        yield _Contender(indices[number], token_id, token_score, uniform)


def _settle(contenders: Iterable[_Contender]) -> dict[int, int]:
    """The winner of every row, in float64 (ties: lowest id)."""
    winners: dict[int, tuple[float, int]] = {}
    for item in contenders:
        candidate = (item.score + philox.gumbel_exact(item.uniform), -item.token)
        winners[item.row] = max(candidate, winners.get(item.row, candidate))
    return {row: -negated for row, (_, negated) in winners.items()}


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `count` most likely, of raw `logits` [vocab], in float64."""
    total = float(logits.to(torch.float64).logsumexp(0))
    ids = torch.cat((logits.new_tensor([token], dtype=torch.int64), largest(logits, count)))
    values = (logits[ids].to(torch.float64) - total).tolist()
    return TokenLogprobs(token, values[0], tuple(zip(ids[1:].tolist(), values[1:], strict=True)))
