"""Whatever chunks a scheduler makes of prompts, cuDNN is asked for nothing that was not planned before.

A stub stands in cuDNN's place and keeps the shapes that it is asked for; cutting, pairing and scheduling are
the real ones, at North's sizes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from headrace.engine import rehearsal
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.null_backend import NullBackend
from headrace.engine.options import GPU_CHUNK
from headrace.engine.pace import FEWEST, Pace
from headrace.engine.scheduler import Scheduler
from headrace.model import tiled, varlen
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.sampling import SamplingParams
from headrace.model.tiled import TILE, Shape
from headrace.model.tokenizer import Tokenizer

NOWHERE = torch.device("meta")  # shapes are all that counts
CHUNK, CONTEXT, WINDOW = GPU_CHUNK, 262_144, 4096
WINDOWS = {KVGroup.FULL: None, KVGroup.SLIDING: WINDOW}
NO_TABLES: dict[KVGroup, list[int]] = dict.fromkeys(KVGroup, [0] * (CONTEXT // 64))


@dataclass
class Asked:
    """In the place of cuDNN, and of all that computes beside it."""

    shapes: set[Shape] = field(default_factory=set)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, joined: bool, count: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        assert len(q) % count == len(k) % count == 0
        self.shapes.add(Shape(len(q) // count, len(k) // count, causal, joined, count))
        return q, q.new_zeros(count, q.shape[1], len(q) // count) if joined else None

    def fill(self, spans: Sequence[Span]) -> None:
        """A pass over the spans: one layer of each kind."""
        tokens = sum(len(span.tokens) for span in spans)
        q = k = torch.zeros(tokens, 1, 1, device=NOWHERE)
        for group, window in WINDOWS.items():
            plan = varlen.plan_varlen(spans, group, window, NOWHERE, TILE)
            varlen.attend_varlen(q, k, k, q, plan)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(tiled, "plain", made.attend)  # cuDNN's twin, where there is no GPU
    monkeypatch.setattr(tiled, "join", lambda *_: None)
    monkeypatch.setattr(varlen, "one_by_one", lambda q, *_: q)
    monkeypatch.setattr(varlen, "with_past", lambda k, v, pages, keys, *_: 2 * (k.new_zeros(keys, 1, 1),))
    return made


def planned_for(monkeypatch: pytest.MonkeyPatch, chunk: int, context: int) -> set[Shape]:
    """What a rehearsal has cuDNN plan for a server with North on a Hopper GPU."""
    made = Asked()
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "tile_for", lambda *_: TILE)
        patch.setattr(tiled, "cudnn", made.attend)
        for name in ("synchronize", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, lambda _: None)
        count = rehearsal.plan_attention(
            NORTH_MINI_CODE, NOWHERE, torch.bfloat16, tokens=chunk, context=context
        )
    assert count == len(made.shapes), "one was planned twice"
    return made.shapes


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    return planned_for(monkeypatch, CHUNK, CONTEXT)


def span(start: int, end: int) -> Span:
    return Span([0] * (end - start), start, NO_TABLES)


def a_border(dice: random.Random, least: int, most: int) -> int:
    """A position between two, often at the end of a tile or a window, or beside it."""
    position = dice.randint(least, most)
    to = dice.choice([1, 1, 64, TILE, WINDOW, CHUNK])
    return min(max(position // to * to + dice.choice([0, 0, 0, -1, 1]), least), most)


def some_spans(dice: random.Random, chunk: int, context: int) -> list[Span]:
    """Chunks of up to four prompts, wherever these are, of up to `chunk` tokens together."""
    spans: list[Span] = []
    left, many = chunk, dice.choice([1, 1, 2, 2, 3, 4])
    while left and len(spans) < many:
        start = 0 if dice.random() < 0.3 else a_border(dice, 0, context - 1)
        most = min(left, context - start)
        end = start + dice.choice([most, min(most, WINDOW), a_border(dice, 1, most), a_border(dice, 1, most)])
        spans.append(span(start, end))
        left -= end - start
    return spans


def test_north_is_what_this_speaks_of() -> None:
    config = NORTH_MINI_CODE
    assert {layer.group: layer.window for layer in config.layers} == WINDOWS
    assert config.max_positions >= CONTEXT


def test_chunks_of_any_size_at_any_place(asked: Asked, planned: set[Shape]) -> None:
    dice = random.Random(1)
    for _ in range(500):
        asked.fill(some_spans(dice, CHUNK, CONTEXT))
    assert asked.shapes == planned, "one was not planned, or one was that does not come"


@pytest.mark.parametrize(
    ("chunk", "context"), [(8192, 6000), (8192, 8191), (2048, 9000), (5000, 70_000), (20_000, 40_000)]
)
def test_of_other_servers(asked: Asked, monkeypatch: pytest.MonkeyPatch, chunk: int, context: int) -> None:
    planned, dice = planned_for(monkeypatch, chunk, context), random.Random(3)
    for _ in range(150):
        asked.fill(some_spans(dice, chunk, context))
    assert asked.shapes <= planned
    assert len(asked.shapes) > len(planned) / 3


def test_two_prompts_that_begin_together_are_a_shape_of_their_own(asked: Asked, planned: set[Shape]) -> None:
    """What an idle server makes of two long prompts: the first window of each, which see nothing else."""
    asked.fill([span(0, WINDOW), span(0, WINDOW)])
    pair = Shape(WINDOW, WINDOW, causal=True, joined=False, count=2)
    assert pair in asked.shapes
    assert asked.shapes <= planned


def test_every_shape_that_is_left_out_is_missed(asked: Asked, planned: set[Shape]) -> None:
    """Every one of these passes brings a shape that no other has: who forgets one is found."""
    only = {
        Shape(WINDOW, WINDOW, True, False, 2): [span(0, WINDOW), span(0, WINDOW)],
        Shape(WINDOW, WINDOW, True, True, 2): [span(0, 2 * WINDOW)],
        Shape(WINDOW - 1, WINDOW - 1, True, True): [span(2 * WINDOW, 3 * WINDOW)],
        Shape(CHUNK, 32 * TILE, False, True): [span(CONTEXT - CHUNK, CONTEXT)],
        Shape(2 * TILE, 2 * TILE, True, False): [span(0, 2 * TILE)],
        Shape(TILE, TILE, False, True): [span(TILE, 4 * TILE)],
    }
    for shape, spans in only.items():
        asked.shapes.clear()
        asked.fill(spans)
        assert asked.shapes - (planned - {shape}) == {shape}


class Whim(Pace):
    """Chunks as large as the dice say, whoever waits."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(most=CHUNK, gap=1e9)
        self._dice = dice

    def tokens(self, *, streams: int, prompts: int = 1) -> int:
        return self.most if self._dice.random() < 0.4 else a_border(self._dice, FEWEST, self.most)


class Filled(NullBackend):
    """Shows every pass to the stub."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(vocab_size=512, max_rows=16, max_steps=16)
        self.asked, self.passes, self.several = asked, 0, 0

    def prefill(self, chunks: Sequence[Span]) -> None:
        self.passes += 1
        self.several += len(chunks) > 1
        self.asked.fill(chunks)


def an_engine(backend: Filled, pace: Pace) -> Engine:
    sizes = {KVGroup.FULL: 2 * CONTEXT // 64, KVGroup.SLIDING: 2048}
    return Engine(
        backend=backend,
        prefiller=backend,
        scheduler=Scheduler(
            BlockManager(sizes, window=WINDOW, prefix_cache=True),
            pace=pace,
            max_sequences=16,
            max_steps=16,
            riding_rows=16,
        ),
        tokenizer=Tokenizer.synthetic(512),
        vocab_size=512,
        max_context=CONTEXT,
        queue=64,
    )


@pytest.mark.parametrize("whim", [False, True])
def test_whatever_a_scheduler_chooses(asked: Asked, planned: set[Shape], whim: bool) -> None:
    """Prompts come and go, alone and together, one of them as long as can be; some begin as others did."""
    dice = random.Random(2)
    backend = Filled(asked)
    engine = an_engine(backend, Whim(dice) if whim else Pace(most=CHUNK, gap=0.04))
    ended: list[object] = []
    lengths = [CONTEXT - 1, *(a_border(dice, 2, dice.choice([CHUNK, 5 * WINDOW])) for _ in range(60))]
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=dice.choice([1, 1, min(30, CONTEXT - length)]))
        prompt = [dice.choice([1, 1, number])] * min(length, 6000) + [number] * max(length - 6000, 0)
        engine.submit(prompt, params, lambda output: ended.append(output) if output.finish_reason else None)
        for _ in range(dice.choice([0, 0, 1, 3, 40])):
            engine.step()
    while engine.step():
        pass
    assert len(ended) == len(lengths)
    assert backend.several > 5
    assert asked.shapes <= planned
    assert len(asked.shapes) > 2 / 3 * len(planned)
