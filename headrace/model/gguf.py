"""Llama models in GGUF files: their config, and their tensors, dequantised.

Reading and dequantisation are the gguf library's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from headrace.model.config import ConfigError, DenseMLP, LayerConfig, ModelConfig, Norm, Rope, RopeScaling
from headrace.model.errors import CheckpointError
from headrace.model.names import GGUF_ROPE_FACTORS
from headrace.model.rope import stretch


class GGUFFile:
    """An open GGUF file. Raises CheckpointError, naming the file and, where one is at fault, the tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = _Reader(path)
        except CheckpointError:
            raise
        except Exception as error:  # the library checks little, and fails in many ways on a damaged file
            raise CheckpointError(
                f"{path} is no readable GGUF file ({error}): it is damaged or incomplete; fetch it again"
            ) from error
        self.stored = {tensor.name: tensor for tensor in self.reader.tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes in PyTorch's order, which is the reverse of the file's. The rope factors are no weights."""
        return {
            name: tuple(int(extent) for extent in reversed(tensor.shape))
            for name, tensor in self.stored.items()
            if name != GGUF_ROPE_FACTORS
        }

    def location(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self.path)

    def size(self, name: str) -> int:
        """Bytes that a tensor takes on disk."""
        return int(self.stored[name].n_bytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in float32, in the order of the file."""
        for name in self.shapes:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        stored = self.stored[name]
        try:
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {name}: {error}; use a file quantised in another way"
            ) from error
        # A copy, as the file's own memory is not writable.
        return torch.tensor(values).view([int(extent) for extent in reversed(stored.shape)])

    def config(self) -> ModelConfig:
        """The model's config, from the metadata. Raises CheckpointError for a model that is not Llama."""
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"{self.path}: the architecture is {architecture!r}; of GGUF files only llama is supported"
            )
        try:
            return self._llama()
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _llama(self) -> ModelConfig:
        scaling = self.value("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(f"{self.path}: rope scaling of type {scaling!r} is not supported")
        if self.value("llama.expert_count", 0):
            raise CheckpointError(f"{self.path}: llama models with experts are not supported")
        hidden = self._whole("llama.embedding_length")
        heads = self._whole("llama.attention.head_count")
        head_dim = self._whole("llama.attention.key_length", hidden // heads)
        if self.value("llama.rope.dimension_count", head_dim) != head_dim:
            raise CheckpointError(f"{self.path}: rotary embedding of a part of each head is not supported")
        theta = self._positive("llama.rope.freq_base", 10000.0)
        mlp = DenseMLP(width=self._whole("llama.feed_forward_length"))
        layer = LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=mlp)
        ends = [  # of a text, of a turn, of a message after which a tool's result comes
            self._whole(f"tokenizer.ggml.{name}_token_id", -1, least=-1) for name in ("eos", "eot", "eom")
        ]
        return ModelConfig(
            family="llama",
            vocab_size=int(self.stored["token_embd.weight"].shape[1])
            if "token_embd.weight" in self.stored
            else self._whole("llama.vocab_size"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._whole("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            layers=(layer,) * self._whole("llama.block_count"),
            parallel_block=False,
            norm=Norm.RMS,
            norm_eps=self._positive("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, head_dim),
            max_positions=self._whole("llama.context_length"),
            tied_head="output.weight" not in self.stored,
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token >= 0)),
        )

    def _rope_scaling(self, theta: float, head_dim: int) -> RopeScaling | None:
        """Llama 3's scaling, which a GGUF file holds as one divisor for each frequency and not as parameters.

        The largest divisor is `factor`; the others are the same in all Llama 3.x models, and are checked.
        """
        if GGUF_ROPE_FACTORS not in self.stored:
            return None
        divisors = self.tensor(GGUF_ROPE_FACTORS)
        scaling = RopeScaling(
            factor=float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        )
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        if divisors.shape != plain.shape or not torch.allclose(
            plain / stretch(plain, scaling), divisors, rtol=1e-3
        ):
            raise CheckpointError(
                f"{self.path}: {GGUF_ROPE_FACTORS} is not Llama 3's scaling of the rotary frequencies, "
                "the only one supported"
            )
        return scaling

    def value(self, key: str, default: Any = None) -> Any:
        """An entry of the metadata. Raises CheckpointError if it is absent and there is no default."""
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise CheckpointError(f"{self.path}: the metadata lack {key}: the file is not complete")
        return default

    def _whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """As `value`; a list, as of layers that differ, is refused as well."""
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(
                f"{self.path}: {key} is {value!r:.60}; only one whole number from {least} up is supported"
            )
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{self.path}: {key} is {value!r:.60}; it must be a number above 0")
        return value


class _Reader(gguf.GGUFReader):  # type: ignore[misc]  # the library has no types
    """The library's reader, which on a file that is too short says so, and which tensor is cut off."""

    tensors: list[Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
        # The library slices its memory map: 3 s for the 100,000 strings of a vocabulary, and at the end of
        # the file less than was asked for. This takes a quarter of that, and raises ValueError there.
        order = override_order or self.byte_order
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        tensors: list[Any] = []
        for field in fields:
            try:
                super()._build_tensors(start_offs, [field])
            except ValueError as error:
                name = bytes(field.parts[1]).decode(errors="replace")
                raise CheckpointError(
                    f"{self.path}: {name} is cut off: the file is damaged or incomplete; fetch it again"
                ) from error
            tensors += self.tensors
        self.tensors = tensors
