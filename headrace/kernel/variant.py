"""One kernel for one plan: the header of what is fixed when it is compiled, beside `isa.h` and `sizes.h`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.kernel.records import (
    BIAS,
    HOST_LINK,
    LOGPROB_RECORD,
    PARAMS,
    ROW_INPUT,
    TRACE_ANCHOR,
    TRACE_LANES,
    TRACE_LINE,
    TRACE_LINE_ALIGNMENT,
    RowFlag,
    flags,
    struct,
)
from headrace.model.constraint import mask_words
from headrace.step.buffers import arena, buffer_specs
from headrace.step.isa import Buffer, Field, Opcode, Pairing
from headrace.step.isa_header import sizes_header
from headrace.step.machine import CONSUMER_REGISTERS, WORKING_REGISTERS, activation_registers
from headrace.step.plan import Plan
from headrace.step.weights import pages_per_tile

KV_HEADS = 8  # at most: of each, and each row, a lane keeps a share of attention (items.h)
_OWNERS = (Opcode.EMBED, Opcode.O_PROJ, Opcode.FFN_DOWN, Opcode.EXPERT_DOWN)


class VariantError(ValueError):
    """A plan that the kernel cannot run; the message says why."""


@dataclass(frozen=True)
class Variant:
    """The generated headers by name: the whole input of a compilation besides the fixed headers."""

    headers: dict[str, str]

    def replaced(self, headers: Mapping[str, str]) -> Variant:
        """With these in place of the fixed headers of the same names, or beside them."""
        return Variant({**headers, **self.headers})


def variant_of(plan: Plan, *, strict: bool = False, trace: bool = False) -> Variant:
    """The headers for a plan. `strict` orders memory by release and acquire everywhere.

    `trace` records what every SM does when.

    Raises VariantError for a plan with operations that the kernel does not have.
    """
    words = plan.descriptors
    shares = words[..., Field.SHARES]
    if ((shares != 0) & (shares != plan.sizes.sms)).any():
        raise VariantError(f"the kernel divides work into a share for each SM, {plan.sizes.sms} of them")
    if plan.sizes.group > 8 or plan.sizes.head_dim % 32:
        raise VariantError(
            f"the kernel takes up to 8 query heads a KV head and heads of a multiple of 32, "
            f"not {plan.sizes.group} and {plan.sizes.head_dim}: decode with 'torch'"
        )
    if plan.sizes.kv_heads > KV_HEADS:
        raise VariantError(
            f"the kernel takes up to {KV_HEADS} KV heads, not {plan.sizes.kv_heads}: decode with 'torch'"
        )
    for field, what in ((Field.EXPERTS, "number of experts"), (Field.TOP_K, "number of a row's experts")):
        numbers = sorted(set(words[..., field].ravel().tolist()) - {0})
        if len(numbers) > 1:  # it has those of sizes.h
            raise VariantError(f"the kernel takes one {what}, not {numbers}: decode with 'torch'")
    hidden = plan.sizes.hidden
    held = activation_registers(hidden, plan.sizes.rows, pages_per_tile(hidden))  # while its scales are found
    if held + WORKING_REGISTERS > CONSUMER_REGISTERS:
        raise VariantError(f"the kernel has no registers for a hidden_size of {hidden}: decode with 'torch'")
    return Variant({"sizes.h": sizes_header(plan), "variant.h": _variant_header(plan, strict, trace)})


def _variant_header(plan: Plan, strict: bool, trace: bool) -> str:
    lines = [
        "// Generated for one plan.\n#pragma once\n\n#include <cstdint>\n\n",
        '#include "sizes.h"\n\nnamespace variant {\n\n',
        f"constexpr bool STRICT = {str(strict).lower()};\n",
        f"constexpr bool TRACE = {str(trace).lower()};\n",
        f"constexpr bool HALF_SPLIT = {str(_half_split(plan)).lower()};  // rotary pairs of all layers\n",
        f"constexpr int RESIDUAL_TILES = {_owned_tiles(plan)};  // the most that one SM owns\n",
        f"constexpr int WINDOW = {plan.config.window or 0};  // of all layers that have one\n",
        "template <int... WIDTHS>\nstruct Widths {};\n",
        f"using FfnDown = Widths<{_widths(plan, Opcode.FFN_DOWN)}>;\n",
        f"using ExpertDown = Widths<{_widths(plan, Opcode.EXPERT_DOWN)}>;\n",
        f"constexpr int TRACE_LANES = {TRACE_LANES};\n",
        f"constexpr int PARAMS_BYTES = {PARAMS.itemsize};\n",
        f"constexpr int MASK_WORDS = {mask_words(plan.sizes.vocabulary)};\n",
        *flags("row_flag", RowFlag),
        *struct("RowInput", ROW_INPUT),
        *struct("Bias", BIAS),
        *struct("LogprobRecord", LOGPROB_RECORD),
        *struct("HostLink", HOST_LINK),
        *struct("TraceLine", TRACE_LINE, alignment=TRACE_LINE_ALIGNMENT),
        *struct("TraceAnchor", TRACE_ANCHOR),
        *_offsets(plan),
        "\n}  // namespace variant\n",
    ]
    return "".join(lines)


def _owned_tiles(plan: Plan) -> int:
    words = plan.descriptors
    owns = (words[..., Field.OPCODE, None] == [int(opcode) for opcode in _OWNERS]).any(axis=-1)
    return max(int(words[owns][:, Field.TILE_COUNT].max(initial=1)), 1)


def _half_split(plan: Plan) -> bool:
    """Whether the rotary pairs of all layers that have any are half a head apart."""
    pairings = set(plan.descriptors[..., Field.ROPE].ravel().tolist()) - {Pairing.NONE}
    if len(pairings) > 1:
        raise VariantError("the kernel takes one kind of rotary pairs, not two: decode with 'torch'")
    return Pairing.HALF_SPLIT in pairings


def _widths(plan: Plan, opcode: Opcode) -> str:
    """The different K of an operation, in order."""
    words = plan.descriptors
    return ", ".join(
        str(k) for k in sorted({int(k) for k in words[words[..., Field.OPCODE] == opcode][:, Field.K]})
    )


def _offsets(plan: Plan) -> list[str]:
    """Where each Buffer begins in the arena, by its number; 0 for those outside."""
    offsets, _ = arena(buffer_specs(plan.sizes))
    numbers = ", ".join(str(offsets.get(buffer, 0)) for buffer in Buffer)
    router = offsets.get(Buffer.ROUTER_LOGITS, 0)
    return [
        f"__constant__ const int64_t OFFSETS[] = {{{numbers}}};\n",
        f"constexpr int64_t ROUTER_LOGITS_OFFSET = {router};\n",
    ]
