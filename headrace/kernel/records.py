"""What host and kernel hand each other in a launch: the one description that both read."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag

import numpy as np

from headrace.step.isa import TOP_LOGPROBS


class RowFlag(IntFlag):
    """What sampling a row takes besides its largest logit: FLAGS of a row."""

    CHANGED = 1  # penalties, a bias or a mask: adjusted logits are made
    DRAWN = 2  # has a temperature
    TOP_K = 4  # top_k removes tokens
    TOP_P = 8
    LOGPROBS = 16
    COUNTED = 32  # has a penalty
    MASKED = 64
    UNCOUNTED = 128  # the token fed in the first step is not yet in the history
    SEARCHED = TOP_K | TOP_P  # for the borders of either: SAMPLE_SELECT


# One row of a launch. `stop_first` and `stop_count` are its part of the array of stop tokens, and those of
# the bias likewise. top_p is top_p_numerator / 2^top_p_shift; min_score is ln(min_p).
ROW_INPUT = np.dtype(
    [
        ("active", "<i4"),
        ("slot", "<i4"),
        ("token", "<i4"),
        ("position", "<i4"),
        ("max_tokens", "<i4"),
        ("stop_first", "<i4"),
        ("stop_count", "<i4"),
        ("flags", "<i4"),
        ("seed", "<u8"),
        ("top_p_numerator", "<u8"),
        ("top_p_shift", "<i4"),
        ("top_k", "<i4"),
        ("temperature", "<f4"),
        ("min_score", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("bias_first", "<i4"),
        ("bias_count", "<i4"),
        ("logprobs", "<i4"),
    ]
)

# An entry of `logit_bias`.
BIAS = np.dtype([("token", "<i4"), ("value", "<f4")])

# What a row's log-probabilities are made of: a raw logit minus `base` is one. `top` has as many tokens as
# the row asks for, the largest first.
LOGPROB_RECORD = np.dtype(
    [
        ("base", "<f8"),
        ("raw", "<f4"),
        ("zero", "<i4"),
        ("top_raw", "<f4", (TOP_LOGPROBS,)),
        ("top_token", "<i4", (TOP_LOGPROBS,)),
    ]
)

# Pinned memory that both see while a launch runs. The host writes `stop`, the kernel all else. `experts`
# counts those whose weights the told steps read, over all layers: what a step must read depends on it. The
# words after `aborted` are the watchdog's: which SM, agent and task of its list waited for what, and the
# values.
HOST_LINK = np.dtype(
    [
        ("stop", "<i4"),
        ("steps", "<i4"),
        ("experts", "<i4"),
        ("aborted", "<i4"),
        ("sm", "<i4"),
        ("agent", "<i4"),
        ("task", "<i4"),
        ("waited", "<i4"),
        ("index", "<i4"),
        ("want", "<i4"),
        ("have", "<i4"),
    ]
)

# The kernel's argument: struct Params of state.h. u8 are addresses.
PARAMS = np.dtype(
    [
        ("descriptors", "<u8"),
        ("weights", "<u8"),
        ("norms", "<u8"),
        ("frequencies", "<u8"),
        ("buffers", "<u8"),
        ("counters", "<u8"),
        ("kv_pages", "<u8"),
        ("tables", "<u8"),
        ("rows", "<u8"),
        ("stop_tokens", "<u8"),
        ("abort_flag", "<u8"),
        ("host", "<u8"),
        ("tokens", "<u8"),
        ("logprobs", "<u8"),
        ("biases", "<u8"),
        ("masks", "<u8"),
        ("history", "<u8"),
        ("adjusted", "<u8"),
        ("trace", "<u8"),
        ("table_blocks", "<i4"),
        ("steps", "<i4"),
        ("epoch", "<u4"),
        ("timeout", "<u4"),
        ("searched", "<u4"),
        ("zero", "<u4"),
    ]
)

# What one thread of an SM did with one task, where the kernel records it (trace.h). Times are cycles of the
# SM's clock, modulo 2^32: `ready` for a task, `taken` it, `seen` its last counter, the task's `end`; `inputs`
# are the cycles spent waiting for counters. `task` is its number in the SM's list; on the publisher's lines,
# which have no step, the counter that was signalled.
TRACE_LINE = np.dtype(
    [
        ("ready", "<u4"),
        ("taken", "<u4"),
        ("seen", "<u4"),
        ("end", "<u4"),
        ("inputs", "<u4"),
        ("step", "<u4"),
        ("task", "<u4"),
        ("zero", "<u4"),  # so that a line goes out in two stores
    ]
)
TRACE_LINE_ALIGNMENT = 16
# The same moment on the clock that all SMs share, and on the SM's own.
TRACE_ANCHOR = np.dtype([("nanoseconds", "<u8"), ("cycles", "<u4"), ("zero", "<u4")])
TRACE_LANES = 5  # copier, consumers, publisher, loader, helper

ABSENT = -2  # a token of the ring: the row had ended
# A token of the ring may also be NO_TOKEN of `headrace.model.sampler`, as in sampling.h.

_TYPES = {"<i4": "int32_t", "<f4": "float", "<f8": "double", "<u8": "uint64_t", "<u4": "uint32_t"}


def struct(name: str, dtype: np.dtype[np.void], *, alignment: int = 0) -> Iterator[str]:
    """The lines of a C++ struct with the layout of a record, aligned to more than its members are."""
    assert dtype.fields is not None
    yield f"struct {f'alignas({alignment}) ' if alignment else ''}{name} {{\n"
    for field, (kind, *_) in dtype.fields.items():
        extent = f"[{kind.shape[0]}]" if kind.shape else ""
        yield f"  {_TYPES[kind.base.str]} {field}{extent};\n"
    yield "};\n"
    yield f"static_assert(sizeof({name}) == {dtype.itemsize});\n"


def flags(name: str, kind: type[IntFlag]) -> Iterator[str]:
    """The lines of a C++ namespace with a constant for each flag."""
    yield f"namespace {name} {{\n"
    for member in kind.__members__.values():  # those of several bits, too
        yield f"constexpr int32_t {member.name} = {member.value};\n"
    yield f"}}  // namespace {name}\n"
