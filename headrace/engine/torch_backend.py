"""The PyTorch model as prefiller and decode backend: for any device, and what the kernel is compared with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.rehearsal import rehearse
from headrace.model.batch import Span
from headrace.model.kv import KVCache
from headrace.model.sampler import Sampled, SampleRow, sample, token_logprobs
from headrace.model.sampling import TokenLogprobs
from headrace.model.transformer import Model

logger = logging.getLogger(__name__)

_SCORED = 64  # prompt tokens whose logits are in memory at once


class TorchBackend:
    """Runs `model` over `cache`. One forward pass a step, each synchronised by reading its tokens back."""

    name = "torch"
    takes_constraints = True
    takes_several_rows = True

    def __init__(
        self, model: Model, cache: KVCache, *, max_rows: int, max_steps: int = 16, ahead: bool = True
    ) -> None:
        """`ahead`: on a GPU, prompts go before what else it does, such as unpacking the next weights."""
        self.max_rows = max_rows
        self.max_steps = max_steps
        layers = model.config.layers[:-1] or model.config.layers  # as `Model.fill` counts them
        self.full = [layer.window is None for layer in layers]
        self.layers = len(self.full)
        self._model = model
        self._cache = cache
        self._retries = 0  # of the allocator
        self._stream: torch.cuda.Stream | None = None
        if ahead and model.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.device, priority=-1)  # type: ignore[no-untyped-call]

    def prepare(self) -> None:
        """Nothing to compile: PyTorch builds its kernels when first used."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        self.begin(chunks)(self.layers)

    def begin(self, chunks: Sequence[Span]) -> Callable[[int], None]:
        filled = self._model.fill(chunks, self._cache)

        def advance(layers: int) -> None:
            with torch.inference_mode(), self._ahead():
                for _ in islice(filled, layers):
                    pass
            if self._model.device.type == "cuda":  # this call is timed
                torch.cuda.synchronize(self._model.device)
                self._note_retries(self._model.device)

        return advance

    def rehearse(self, *, tokens: int, context: int) -> list[tuple[int, float]]:
        """As `headrace.engine.backend.Rehearsing` says; elsewhere than on a GPU there is nothing to do."""
        if self._model.device.type != "cuda":
            return []
        with torch.inference_mode(), self._ahead():  # memory is kept by stream
            return rehearse(
                self._model.config,
                self._cache,
                lambda span, layers: self.begin([span])(layers),
                tokens=tokens,
                context=context,
            )

    def _note_retries(self, device: torch.device) -> None:
        """Say in the log if memory ran short: what PyTorch keeps is then given back, and asked for anew."""
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        retries = stats["num_alloc_retries"]
        if retries > self._retries:
            logger.warning(
                "GPU memory ran short while a prompt was computed (%d times so far), and all had to wait: "
                "%.1f GiB are in use and %.1f GiB reserved; give the KV cache less by --kv-memory",
                retries,
                stats["allocated_bytes"]["all"]["current"] / 2**30,
                stats["reserved_bytes"]["all"]["current"] / 2**30,
            )
        self._retries = retries

    def score(self, chunk: Span, following: Sequence[int], count: int) -> list[TokenLogprobs]:
        """As `headrace.engine.scoring.Scorer` says; logits are made of a few tokens at a time."""
        scores: list[TokenLogprobs] = []
        with torch.inference_mode(), self._ahead():
            hidden = self._model([chunk], self._cache)[: len(following)]
            for start in range(0, len(following), _SCORED):
                part = following[start : start + _SCORED]
                logits = self._model.logits(hidden[start : start + len(part)])
                scores += [token_logprobs(raw, token, count) for raw, token in zip(logits, part, strict=True)]
        return scores

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Work on the stream of high priority, between what is before and after on the current one."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        last: dict[int, int] = {index: row.token for index, row in enumerate(rows)}
        for step in range(steps):
            sampled = self._step(rows, last, step)
            last = {
                index: item.token
                for index, item in sampled.items()
                if not rows[index].ends(item.token, step + 1)
            }
            yield [sampled.get(index) for index in range(len(rows))]
            if not last or interrupt.is_set():
                return

    def _step(self, rows: Sequence[DecodeRow], last: dict[int, int], step: int) -> dict[int, Sampled]:
        """Feed every live row its last token; what each made, by the row's index."""
        live = [rows[index] for index in last]
        spans = [
            Span([token], row.position + step, row.tables)
            for token, row in zip(last.values(), live, strict=True)
        ]
        with torch.inference_mode():
            logits = self._model.logits(self._model(spans, self._cache))
            sampled = sample(
                logits,
                [
                    SampleRow(
                        params=row.params,
                        seed=row.seed,
                        position=row.position + step + 1,
                        prompt=row.prompt,
                        output=row.output,
                        mask=None if row.constraint is None else row.constraint.mask(),
                    )
                    for row in live
                ],
            )
        return dict(zip(last, sampled, strict=True))
