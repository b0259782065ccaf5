"""Which tokens a draw may take: top_k, top_p and min_p, as `headrace.model.sampling` defines them.

No full sort: top_k selects, and top_p sorts only the tokens near the top if those suffice. A backend without
a sort finds the same border by bisection, since weights are integers and their sums have no rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.model.sampling import SamplingParams

_WEIGHT_ONE = 2.0**44  # the weight of the most likely token; 2^18 tokens still sum below 2^63
_NUCLEUS_DEPTHS = (3.0, 6.0, 10.0)  # how far below the largest score to look for the border, in turn


def kept(scores: Tensor, params: SamplingParams) -> Tensor:
    """The ids, ascending, of the tokens that top_k, top_p and min_p leave: int64 [n], n at least 1.

    `scores` are float32 [vocab], 0 for the most likely token and negative (or minus infinity) for the others.
    """
    ids = None
    if 0 < params.top_k < len(scores):
        ids = largest(scores, params.top_k).sort().values
    if params.top_p < 1.0:
        left = scores if ids is None else scores[ids]
        inside = _nucleus(left, params.top_p)
        ids = inside if ids is None else ids[inside]
    if params.min_p > 0.0:
        left = scores if ids is None else scores[ids]
        inside = (left >= left.new_tensor(math.log(params.min_p))).nonzero().squeeze(1)
        ids = inside if ids is None else ids[inside]
    return torch.arange(len(scores), device=scores.device) if ids is None else ids


def largest(scores: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of `scores` [n], the largest first (ties: lowest id): int64 [count].

    Fewer if there are not as many. torch.topk alone promises nothing about which of equal scores it takes.
    """
    count = min(count, len(scores))
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    border = scores.topk(count).values[-1]
    above = (scores > border).nonzero().squeeze(1)
    at_border = (scores == border).nonzero().squeeze(1)
    order = scores[above].sort(descending=True, stable=True).indices
    return torch.cat((above[order], at_border[: count - len(above)]))


def _nucleus(scores: Tensor, share: float) -> Tensor:
    """Indices, ascending, of the shortest run of the largest `scores` whose weight reaches `share` of all."""
    weights = (scores.to(torch.float64).exp() * _WEIGHT_ONE).to(torch.int64)
    numerator, denominator = share.as_integer_ratio()
    needed = -(-int(weights.sum()) * numerator // denominator)  # rounded up
    near = torch.arange(len(scores), device=scores.device)
    for depth in _NUCLEUS_DEPTHS:
        top = (scores >= -depth).nonzero().squeeze(1)
        if int(weights[top].sum()) >= needed:
            near = top
            break
    order = scores[near].sort(descending=True, stable=True).indices
    sums = weights[near[order]].cumsum(0)
    run = int(torch.searchsorted(sums, needed)) + 1
    return near[order[:run]].sort().values
