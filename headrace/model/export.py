"""From a model back to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from torch import Tensor

from headrace.model.names import hugging_face_names
from headrace.model.transformer import Model


def stored_tensors(model: Model) -> dict[str, Tensor]:
    """Name on disk and value of every weight, experts one by one, contiguous as safetensors wants them."""
    parameters = dict(model.named_parameters())
    return {
        tensor.name: parameters[tensor.parameter].detach()[tensor.region or ...].contiguous()
        for tensor in hugging_face_names(model.config)
    }
