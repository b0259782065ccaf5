"""Tools that time a GPU, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tools import time_prefill, time_start


@pytest.mark.parametrize("main", [time_prefill.main, time_start.main])
def test_a_gpu_that_is_not_there_is_told_in_a_sentence(
    main: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tool"])
    with pytest.raises(SystemExit, match="PyTorch sees no"):
        main()
