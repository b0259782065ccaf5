"""The kernel's sampling against the reference's: from the same logits, exactly the same tokens."""

from __future__ import annotations

from dataclasses import replace

from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.check.kernels import logits_of
from headrace.model.sampler import SampleRow, sample
from headrace.model.sampling import SamplingParams
from headrace.step.oracle.world import VOCABULARY

# One of everything, alone and together; flat enough that the draw, not the largest logit, decides.
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=3.0),
    SamplingParams(temperature=3.0, top_k=7),
    SamplingParams(temperature=20.0, top_k=VOCABULARY - 1),
    SamplingParams(temperature=3.0, top_p=0.8),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=2.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=2.0, logit_bias={5: 100.0, 299: 99.5, 17: -100.0}),
)


def wrong_draws(bench: Bench, rounds: int = len(KINDS), steps: int = 1) -> int:
    """How many tokens are not those that the reference draws from the logits that the kernel left. To be 0.

    In every round each row has the next of KINDS and another seed. A launch has `steps` steps, and the tokens
    of the last one are compared. Raises RuntimeError if a launch has fewer.
    """
    kernel = bench.kernel()
    wrong = 0
    for number in range(rounds):
        rows = [
            None if row is None else replace(row, params=KINDS[(number + index) % len(KINDS)], seed=number)
            for index, row in enumerate(bench.rows)
        ]
        made = list(kernel.launch(rows, steps))
        if len(made) != steps:
            raise RuntimeError(f"a launch of {steps} steps made {len(made)}")
        live = [(row, tokens) for row, *tokens in zip(rows, *made, strict=True) if row is not None]
        drawn = sample(
            logits_of(kernel, bench.plan)[bench.live].cpu(),
            [
                SampleRow(
                    params=row.params,
                    seed=row.seed,
                    position=row.position + steps,
                    prompt=row.prompt,
                    output=[*row.output, *(token for token in tokens[:-1] if token is not None)],
                )
                for row, tokens in live
            ],
        )
        wrong += sum(tokens[-1] != right.token for (_, tokens), right in zip(live, drawn, strict=True))
    return wrong
