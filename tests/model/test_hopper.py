"""What counts as a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from headrace.model.hopper import has_hopper, on_hopper


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_its_compute_capability_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert on_hopper(torch.device("cuda")) is expected
    assert has_hopper() is expected


def test_a_cpu_is_none_and_no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.cuda, "get_device_capability")
    assert not on_hopper(torch.device("cpu"))
    assert not has_hopper()
