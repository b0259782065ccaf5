"""Steps of a layer that a GPU can do in one pass over memory, where PyTorch takes several.

The plain ways stand where these are used, and say what is meant: every result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headrace.model.rope import Rotation


class Fused(Protocol):
    """For half-precision activations that nobody differentiates; `kernel.prompt.passes.Passes` is one."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [rows, width], of gate and up side by side, [rows, 2 * width]."""

    def add(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """x + y + z, each sum rounded; all of one shape."""

    def combine(self, parts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """For each token the sum of parts[places[token, i]] * weights[token, i] in the order of i.

        Products and sums are float32, `weights` [tokens, top_k] too, and the result, [tokens, hidden], is
        rounded once. `places` is int32.
        """

    def rotate(self, x: Tensor, by: Rotation) -> Tensor:
        """x [tokens, heads, head_dim] with each pair of neighbours turned."""

    def write_blocks(self, pages: Tensor, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill the pages of `blocks` [n] with k and v, [n * BLOCK_TOKENS, KV heads, head_dim]."""

    def read_blocks(
        self, pages: Tensor, blocks: Tensor, rows: Tensor, counts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Copy the first counts[i] tokens of page blocks[i] to rows[i] .. of k and v, for every i.

        k and v are [keys, KV heads, head_dim]; the three index tensors [n] are int64.
        """

    def join(
        self, values: Sequence[Tensor], sums: Sequence[Tensor], turned: Sequence[bool], out: Tensor
    ) -> None:
        """Fill out [tokens, heads, head_dim] with the mean of parts of an attention, weighed by their sums.

        It may be the first of the parts, if that is not turned.
        Part i is values[i] [n, heads, head_dim], of the first n <= tokens queries, in reverse order if
        turned[i]; sums[i], float32 [heads, n], are the logarithms of its sums of exponentials. All is added
        in float32, in the order of the parts, and rounded once.
        """

    def choose(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The top_k experts of each token, int64, ascending, and the sigmoids of their logits, float32.

        Both are [tokens, top_k], `logits` float32 [tokens, experts]; of equal ones the first are chosen.
        """

    def group(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """As `layers.group`."""

    def spread(self, x: Tensor, places: Tensor) -> Tensor:
        """As `layers.spread`."""

    def unpack(self, stored: Tensor, out: Tensor, *, paired: bool) -> None:
        """Copy matrices packed as `headrace.step.layout` says to out [matrices, rows, columns].

        8 divides the rows, and 32 the columns. `paired`: gate and up rows lie in turn in `stored`, and one
        after the other in `out`.
        """
