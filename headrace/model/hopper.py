"""The GPU that the kernels, and some ways through the model, are made for."""

from __future__ import annotations

import torch

HOPPER = (9, 0)  # the compute capability of H100 and H200: code for sm_90a runs on no other


def on_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


def has_hopper() -> bool:
    """Whether the current GPU is one."""
    return torch.cuda.is_available() and on_hopper(torch.device("cuda"))
