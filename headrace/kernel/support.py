"""Whether the decode kernel can run a model on a device, found out before weights are loaded."""

from __future__ import annotations

import torch

from headrace.kernel.build import has_compiler
from headrace.kernel.variant import VariantError, variant_of
from headrace.model.config import ModelConfig
from headrace.model.hopper import on_hopper
from headrace.step.errors import PlanError
from headrace.step.isa import MAX_ROWS
from headrace.step.planner import build_plan


def obstacle(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot decode this model there, as a sentence's end; None: it can."""
    return _device_obstacle(device) or _model_obstacle(config, dtype)


def _device_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it runs on a Hopper GPU only"
    if not on_hopper(device):
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        return f"it runs on a Hopper GPU only (compute capability 9.0), and {name} has {major}.{minor}"
    if not has_compiler():
        return "it needs cuda.core and NVRTC: pip install 'headrace[gpu]'"
    return None


def _model_obstacle(config: ModelConfig, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return "it computes in bfloat16 only: leave out --dtype, or say bfloat16"
    try:
        for rows in (1, MAX_ROWS):  # each has its way to share columns out; on SMs nothing depends
            variant_of(build_plan(config, rows=rows, sms=2))
    except (PlanError, VariantError) as error:
        return str(error)
    return None
