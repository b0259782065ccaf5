"""north-micro through the kernel over long texts: 512 greedy tokens of real prompts, and held-out text.

The comparisons are tried without a GPU in `tests.kernel.check.test_texts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headrace.kernel.check.against_model import ModelBench
from headrace.kernel.check.texts import Followed, follow, nats, perplexity_error
from headrace.model.checkpoint import load_model
from headrace.model.tokenizer import Tokenizer
from tests.kernel.prompts import PROMPTS
from tests.recording import RecordCheck
from tools.micro.text import library_folder, read_library

MICRO = Path(__file__).parents[2] / "models" / "north-micro"
ROWS, TOKENS = 16, 512  # of a round of texts


def bench(prompts: Sequence[Sequence[int]]) -> ModelBench:
    model = load_model(MICRO, device="cuda", dtype=torch.bfloat16, progress=None)
    return ModelBench(model, prompts, ROWS, room=TOKENS)


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_pretrained(MICRO)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def held_out() -> list[list[int]]:
    """Texts that north-micro was not trained on, up to three of a file, as many as make three rounds."""
    tokenizer = Tokenizer.from_pretrained(MICRO)
    texts = []
    for file in read_library(library_folder()):
        if file.held_out:
            tokens = tokenizer.encode(file.text[:20_000])
            texts += [tokens[first : first + TOKENS] for first in range(0, 3 * TOKENS, TOKENS)]
    return [text for text in texts if len(text) == TOKENS][: 3 * ROWS]


def test_there_are_texts_enough() -> None:
    given = prompts()
    assert len(given) == len(set(PROMPTS)) == 2 * ROWS
    assert len({len(prompt) for prompt in given}) > ROWS
    assert len(held_out()) == 3 * ROWS


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_512_tokens_of_32_prompts(record_check: RecordCheck) -> None:
    """Where float32 is not in doubt the kernel takes its token, and elsewhere as often as PyTorch does."""
    given, followed = prompts(), Followed(0, 0, 0.0, 0, 0)
    for first in range(0, len(given), ROWS):
        followed += follow(bench(given[first : first + ROWS]), launches=TOKENS // 16)
    what = f"{followed.tokens} tokens of north-micro"
    record_check(f"{what}, margin where they part from float32, in PyTorch's own noise", followed.margin, 1)
    record_check(f"{what}, how many part", followed.partings, followed.most_partings)
    record_check(f"{what}, share at which roundings decide", followed.near_share, 0.5)


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_perplexity_of_held_out_text(record_check: RecordCheck) -> None:
    """The kernel is fed text by text, a token a launch, from an empty cache on."""
    texts = held_out()
    rounds = [texts[first : first + ROWS] for first in range(0, len(texts), ROWS)]
    found = [nats(bench([text[:1] for text in some]), some) for some in rounds]
    ours, right = (sum(each) / len(found) for each in zip(*found, strict=True))
    record_check(
        "perplexity of north-micro on held-out text, off float32's by", perplexity_error(ours, right), 0.001
    )
