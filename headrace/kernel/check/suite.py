"""The checks that users run on their own machine: about a minute, each with a name that says what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from headrace.kernel.build import build_all
from headrace.kernel.check.against_model import (
    MICRO_SETTINGS,
    NOISE,
    NORTHS_WIDTHS,
    WIDE_SETTINGS,
    ModelBench,
    noise_ratio,
    parting_ratio,
    random_prompts,
)
from headrace.kernel.check.against_oracle import (
    BOUND,
    MARGIN,
    SETTINGS,
    Bench,
    changed_by_capacity,
    changed_by_launches,
    changed_by_others,
    parting_margin,
    step_errors,
    worst,
)
from headrace.kernel.check.decided import OWN, decided_bench
from headrace.kernel.check.kernels import MakeKernel, on_gpu
from headrace.kernel.check.sampling import wrong_draws
from headrace.kernel.check.verdict import Check, failed
from headrace.kernel.variant import variant_of
from headrace.model.checkpoint import load_model, read_config
from headrace.model.config import ModelConfig
from headrace.model.transformer import Model
from headrace.step.oracle.world import north
from headrace.step.planner import build_plan

CAPACITIES = (1, 4, 16)  # that must give the same bits
Setting = tuple[list[int], int, int | None]  # lengths of sequences, capacity, which place stays empty


@dataclass(frozen=True)
class Planned:
    """A check before it is made: what its figure may be at most, and how to come by the figure."""

    name: str
    bound: float
    figure: Callable[[], float]

    def run(self) -> Check:
        """Whatever goes wrong is the check's failure: the others are still worth to know."""
        try:
            return Check(self.name, self.figure(), self.bound)
        except Exception as error:
            return failed(self.name, self.bound, f"{type(error).__name__}: {error}")


@dataclass
class Suite:
    """What is checked, and with which kernel. `micro` is the folder of north-micro's weights, if it is there.

    `wide` is the model with random weights that is compared with PyTorch, at these lengths and capacities.
    """

    micro: Path | None
    make: MakeKernel = on_gpu
    device: str = "cuda"
    sms: int = 132
    wide: ModelConfig = NORTHS_WIDTHS
    wide_settings: Sequence[tuple[list[int], int]] = field(default_factory=lambda: WIDE_SETTINGS)

    def checks(self) -> list[Planned]:
        return [*self._against_oracle(), *self._draws(), *self._bits(), *self._wide(), *self._micro()]

    def compile(self, tell: Callable[[str], None]) -> None:
        """All kernels that the checks need, side by side; each check would compile its own."""
        plans = [build_plan(north(), rows=rows, sms=self.sms) for _, rows, _ in SETTINGS]
        variants = [variant_of(plan, strict=strict) for plan in plans for strict in (False, True)]
        for config, settings in self._models():
            plans = [build_plan(config, rows=rows, sms=self.sms) for _, rows in settings]
            variants += [variant_of(plan) for plan in plans]
        build_all(variants, progress=tell)

    def _models(self) -> Iterator[tuple[ModelConfig, Sequence[tuple[list[int], int]]]]:
        yield self.wide, self.wide_settings
        if self.micro is not None:
            yield read_config(self.micro), MICRO_SETTINGS

    def _bench(self, setting: Setting) -> Bench:
        return Bench(*setting, make=self.make, device=self.device, sms=self.sms)

    def _against_oracle(self) -> Iterator[Planned]:
        for setting in SETTINGS:
            for strict in (False, True):
                name = f"buffers after a step{', by the book' if strict else ''}: {_rows(setting)}"
                yield Planned(name, BOUND, partial(self._worst_buffer, setting, strict))
            name = f"tokens of six steps, margin where they part: {_rows(setting)}"
            yield Planned(name, MARGIN, partial(self._margin, setting))

    def _worst_buffer(self, setting: Setting, strict: bool) -> float:
        return worst(step_errors(self._bench(setting), strict=strict))

    def _margin(self, setting: Setting) -> float:
        return parting_margin(self._bench(setting))

    def _draws(self) -> Iterator[Planned]:
        for setting in SETTINGS:
            name = f"tokens drawn otherwise than by PyTorch from the same logits: {_rows(setting)}"
            yield Planned(name, 0, partial(self._changed, wrong_draws, setting))

    def _bits(self) -> Iterator[Planned]:
        for setting in SETTINGS[2:]:
            name = f"what changes between one launch, many, and by the book: {_rows(setting)}"
            yield Planned(name, 0, partial(self._changed, changed_by_launches, setting))
            name = f"what changes when a row is alone: {_rows(setting)}"
            yield Planned(name, 0, partial(self._changed, changed_by_others, setting))
        name = f"what changes between capacities of {', '.join(map(str, CAPACITIES))} rows"
        yield Planned(name, 0, self._changed_by_capacity)

    def _changed(self, count: Callable[[Bench], int], setting: Setting) -> float:
        return count(self._bench(setting))

    def _changed_by_capacity(self) -> float:
        return changed_by_capacity([self._bench(([130], rows, None)) for rows in CAPACITIES])

    def _wide(self) -> Iterator[Planned]:
        for lengths, rows in self.wide_settings:
            which = f"{len(lengths)} of {rows} rows"
            name = f"logits at {self.wide.hidden_size} columns, in PyTorch's own error: {which}"
            yield Planned(name, OWN, partial(self._wide_noise, lengths, rows))

    def _micro(self) -> Iterator[Planned]:
        if self.micro is None:
            return
        for lengths, rows in MICRO_SETTINGS:
            which = f"{len(lengths)} of {rows} rows"
            name = f"logits of north-micro, in PyTorch's own error: {which}"
            yield Planned(name, NOISE, partial(self._noise, lengths, rows))
            name = f"32 tokens of north-micro, margin in PyTorch's own noise: {which}"
            yield Planned(name, 1, partial(self._parting, lengths, rows))

    def _wide_noise(self, lengths: list[int], rows: int) -> float:
        bench = decided_bench(self.wide, lengths, rows, device=self.device, make=self.make, sms=self.sms)
        return noise_ratio(bench)

    def _noise(self, lengths: list[int], rows: int) -> float:
        return noise_ratio(self._micro_bench(lengths, rows))

    def _parting(self, lengths: list[int], rows: int) -> float:
        return parting_ratio(self._micro_bench(lengths, rows))

    def _micro_bench(self, lengths: list[int], rows: int) -> ModelBench:
        model = self._micro_model()
        prompts = random_prompts(model.config, lengths)
        return ModelBench(model, prompts, rows, make=self.make, sms=self.sms)

    def _micro_model(self) -> Model:
        assert self.micro is not None
        return load_model(self.micro, device=self.device, dtype=torch.bfloat16, progress=None)


def _rows(setting: Setting) -> str:
    lengths, rows, _ = setting
    return f"{len(lengths)} of {rows} rows"


def verdict(checks: Sequence[Check]) -> str:
    """One sentence."""
    wrong = sum(not check.passed for check in checks)
    if not checks or wrong:
        return f"{wrong} of {len(checks)} checks failed: the decode kernel is NOT right on this machine."
    return f"All {len(checks)} checks passed: the decode kernel is right on this machine."
