"""What the launcher makes of what the kernel leaves in pinned memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from headrace.kernel.launcher import LONGEST_WAIT, Launcher, with_logprobs
from headrace.kernel.records import LOGPROB_RECORD
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import TokenLogprobs


def record() -> np.ndarray[tuple[int], np.dtype[np.void]]:
    one = np.zeros(1, dtype=LOGPROB_RECORD)
    one["base"], one["raw"] = 10.5, 8.0
    one["top_raw"][0, :3], one["top_token"][0, :3] = [9.0, 8.0, 8.0], [40, 3, 5]
    return one


def test_log_probabilities_are_raw_logits_less_the_base() -> None:
    top = ((40, -1.5), (3, -2.5))
    assert with_logprobs(3, record()[0], 2) == Sampled(3, TokenLogprobs(3, -2.5, top))
    assert with_logprobs(3, record()[0], 0) == Sampled(3, TokenLogprobs(3, -2.5, ()))


def test_a_small_vocabulary_has_fewer_than_asked() -> None:
    one = record()
    one["top_token"][0, 2:] = NO_TOKEN
    result = with_logprobs(3, one[0], 20)
    assert result.logprobs is not None
    assert [token for token, _ in result.logprobs.top] == [40, 3]


@pytest.mark.parametrize("timeout", [0.0, 300.0])
def test_a_wait_that_the_kernel_cannot_count_is_refused(timeout: float) -> None:
    nothing = cast(Any, None)
    with pytest.raises(ValueError, match=f"up to {LONGEST_WAIT} seconds"):
        Launcher(nothing, nothing, nothing, table_blocks=1, timeout=timeout)
