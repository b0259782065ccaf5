"""What host and kernel hand each other in a launch: the one description that both read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# One row of a launch. `stop_first` and `stop_count` are its part of the array of stop tokens.
ROW_INPUT = np.dtype(
    [
        ("active", "<i4"),
        ("slot", "<i4"),
        ("token", "<i4"),
        ("position", "<i4"),
        ("max_tokens", "<i4"),
        ("stop_first", "<i4"),
        ("stop_count", "<i4"),
        ("zero", "<i4"),
    ]
)

# Pinned memory that both see while a launch runs. The host writes `stop`, the kernel all else. `experts` counts
# those whose weights the told steps read, over all layers: what a step must read depends on it. The words
# after `aborted` are the watchdog's: which SM, agent and task of its list waited for what, and the values.
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
        ("table_blocks", "<i4"),
        ("steps", "<i4"),
        ("epoch", "<u4"),
        ("timeout", "<u4"),
    ]
)

ABSENT = -2  # a token of the ring: the row had ended
# A token of the ring may also be NO_TOKEN of `headrace.model.sampler`, as in sampling.h.

_TYPES = {"<i4": "int32_t", "<f4": "float", "<f8": "double", "<u8": "uint64_t", "<u4": "uint32_t"}


def struct(name: str, dtype: np.dtype[np.void]) -> Iterator[str]:
    """The lines of a C++ struct with the layout of a record."""
    assert dtype.fields is not None
    yield f"struct {name} {{\n"
    for field, (kind, *_) in dtype.fields.items():
        yield f"  {_TYPES[kind.str]} {field};\n"
    yield "};\n"
    yield f"static_assert(sizeof({name}) == {dtype.itemsize});\n"
