"""The layers without memory: norms, the gated feed-forward and the routed one.

Rounding, where half-precision implementations differ, is chosen once and for all backends:

- a norm is computed in float32 including its weight and rounded once, at the end (as vLLM does);
- router logits are float32 products of the rounded inputs and are not rounded before the choice, so that
  ties, which would be common among 128 values of 8 bits, stay rare;
- the sigmoid is float32, and the experts' outputs are weighed and added in float32, in the order of their
  indices, with one rounding of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.config import DenseMLP, ModelConfig, MoEMLP, Norm
from headrace.model.fused import Fused


def on_gpu(x: Tensor) -> bool:
    """Whether x is one of the half-precision activations of a pass on a GPU that nobody differentiates."""
    return x.is_cuda and x.dtype != torch.float32 and not torch.is_grad_enabled()


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if on_gpu(x):  # one kernel, with the same rounding
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """What is meant."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight, without a bias, over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The model's kind of norm over its hidden size."""
    kind = RMSNorm if config.norm is Norm.RMS else LayerNorm
    return kind(config.hidden_size, config.norm_eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias: no supported model has one."""
    return nn.Linear(inputs, outputs, bias=False)


class Gated(nn.Module):
    """down(silu(gate(h)) * up(h)) (SwiGLU, Shazeer, 2020)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = linear(hidden, width)
        self.up = linear(hidden, width)
        self.down = linear(width, hidden)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


def route(logits: Tensor, mlp: MoEMLP, fused: Fused | None = None) -> tuple[Tensor, Tensor]:
    """Expert ids, ascending for each token, and their weights, float32; both [tokens, top_k].

    `logits` is float32 [tokens, experts]. The choice is made on the raw logits; among equal ones the lowest
    index wins, which torch.topk does not promise and a stable sort does.
    """
    if fused is not None:
        ids, weights = fused.choose(logits, mlp.top_k)
    else:
        chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : mlp.top_k]
        ids = chosen.sort(dim=-1).values
        weights = logits.gather(-1, ids).sigmoid()
    if mlp.normalize:
        # The clamp only keeps 0 / 0 out, where every chosen sigmoid underflows.
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ids, weights


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots `ids` [tokens, top_k] in the order of their experts, and within an expert of the tokens.

    Gives the place of each slot, int32 [tokens, top_k], and the place after each expert's last, int32
    [experts].
    """
    order = by_expert(ids)
    ends = torch.searchsorted(ids.flatten()[order], torch.arange(experts, device=ids.device), right=True)
    places = torch.empty(len(order), dtype=torch.int32, device=ids.device)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    return places.view(ids.shape), ends.int()


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Rows [tokens * top_k, hidden]: those at places[token], [top_k] of all, are x[token]."""
    rows = x.new_empty(places.numel(), x.shape[1])
    rows[places.long()] = x[:, None]
    return rows


def by_expert(ids: Tensor) -> Tensor:
    """The slots, token * top_k + i, sorted by expert."""
    return ids.flatten().short().argsort(stable=True)  # few bits are sorted in fewer passes


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [rows, width], of gate and up side by side, [rows, 2 * width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def weighed_sum(parts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The sum over i, in order, of parts[places[token, i]] * weights[token, i], float32 [tokens, hidden]."""
    out = parts[places[:, 0]].float() * weights[:, :1]
    for slot in range(1, places.shape[1]):
        out = out + parts[places[:, slot]].float() * weights[:, slot, None]
    return out


class Experts(nn.Module):
    """Gated experts, stored together: `gate_up` [experts, 2 * width, hidden], gate rows first, and `down`."""

    def __init__(self, hidden: int, mlp: MoEMLP) -> None:
        super().__init__()
        self.fused: Fused | None = None
        self.gate_up = nn.Parameter(torch.empty(mlp.experts, 2 * mlp.width, hidden))
        self.down = nn.Parameter(torch.empty(mlp.experts, hidden, mlp.width))

    def forward(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighed sum over each token's experts, [tokens, hidden], for h [tokens, hidden].

        `ids` and `weights` are those of `route`. All ways to the sum add in the same order. The sum is
        float32, or rounded already if `fused` made it.
        """
        way = self.grouped if self._can_group(h) else self.one_by_one
        return way(h, ids, weights)

    def one_by_one(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A loop over the experts in use: what is meant. The host waits for the device once."""
        order = by_expert(ids)
        weights = weights.flatten()[order, None]
        out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        tokens, start = order // ids.shape[1], 0
        for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=len(self.down)).tolist()):
            if count:
                rows = tokens[start : start + count]
                inner = swiglu(functional.linear(h[rows], self.gate_up[expert]))
                part = functional.linear(inner, self.down[expert])
                out.index_add_(0, rows, part.float() * weights[start : start + count])
                start += count
        return out

    def grouped(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same by two grouped products, a dozen launches in all, and without a wait: for GPUs."""
        places, ends = (group if self.fused is None else self.fused.group)(ids, len(self.down))
        rows = (spread if self.fused is None else self.fused.spread)(h, places)
        inner = functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        inner = swiglu(inner) if self.fused is None else self.fused.swiglu(inner)
        parts = functional.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        combine = weighed_sum if self.fused is None else self.fused.combine
        return combine(parts, places, weights)

    def _can_group(self, h: Tensor) -> bool:
        # Rows of a multiple of 16 bytes; torch 2.9 has no such product, and older GPUs have no kernel for it.
        return (
            h.is_cuda
            and h.dtype == self.down.dtype == torch.bfloat16
            and self.down.shape[1] % 8 == self.down.shape[2] % 8 == 0
            and hasattr(functional, "grouped_mm")
            and torch.cuda.get_device_capability(h.device) >= (8, 0)
        )


class MoE(nn.Module):
    """The routed feed-forward, with shared experts (as one gated layer of their joint width) where asked."""

    def __init__(self, hidden: int, mlp: MoEMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.router = linear(hidden, mlp.experts)
        self.experts = Experts(hidden, mlp)
        self.shared = Gated(hidden, mlp.shared_experts * mlp.width) if mlp.shared_experts else None

    def router_logits(self, h: Tensor) -> Tensor:
        """Raw logits, float32 [tokens, experts]."""
        if on_gpu(
            h
        ):  # products of half-precision numbers are exact in float32, and the sums are float32, too
            return torch.mm(h, self.router.weight.t(), out_dtype=torch.float32)
        with torch.autocast(h.device.type, enabled=False):
            return functional.linear(h.float(), self.router.weight.float())

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, -2)
        fused = self.experts.fused if on_gpu(flat) else None
        out: Tensor = self.experts(flat, *route(self.router_logits(flat), self.mlp, fused))
        if self.shared is not None:
            out = out + self.shared(flat).float()
            if not self.mlp.shared_sum:
                out = out / 2
        return out.to(h.dtype).view(h.shape)


def make_mlp(hidden: int, mlp: DenseMLP | MoEMLP) -> Gated | MoE:
    """The feed-forward that a layer's description asks for."""
    return MoE(hidden, mlp) if isinstance(mlp, MoEMLP) else Gated(hidden, mlp.width)
