"""Submission, ends, cancellation, several steps a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.null_backend import NullBackend
from headrace.engine.pace import Pace
from headrace.engine.request import (
    ContextLengthError,
    EngineDeadError,
    FinishReason,
    Output,
    PromptError,
    QueueFullError,
)
from headrace.engine.scheduler import Scheduler
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.sampler import Sampled
from headrace.model.sampling import ParameterError, SamplingParams, TokenLogprobs
from headrace.model.tokenizer import Tokenizer
from tests.engine.ledger import Client, LedgerBackend, ledger_engine, prompt_of

FULL = KVGroup.FULL


def submit(engine: Engine, client: Client, number: int, length: int, **params: object) -> None:
    client.tokens[number] = []
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    engine.submit(prompt_of(number, length), sampling, partial(client.sink, number))


def run(engine: Engine) -> None:
    while engine.step():
        pass


def text_engine(vocab_size: int = 512, *, backend: NullBackend | None = None) -> Engine:
    """An engine over real text: the null backend says token `position`, the tokenizer " t<position>"."""
    tokenizer = Tokenizer.synthetic(vocab_size)
    backend = backend or NullBackend(vocab_size=vocab_size, max_rows=4, max_steps=4)
    return Engine(
        backend=backend,
        prefiller=backend,
        scheduler=Scheduler(
            BlockManager({FULL: 32}, window=None),
            pace=Pace(most=64, gap=1e9),
            max_sequences=4,
            max_steps=backend.max_steps,
        ),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_context=vocab_size,
        queue=4,
    )


def test_a_prompt_that_cannot_be_fed_is_refused() -> None:
    engine = text_engine()
    with pytest.raises(PromptError, match="no tokens; give at least one"):
        engine.submit([], SamplingParams(), print)
    with pytest.raises(PromptError, match="ids from 0 to 511"):
        engine.submit([1, 512], SamplingParams(), print)
    with pytest.raises(ParameterError, match="logit_bias"):
        engine.submit([1], SamplingParams(logit_bias={512: 1.0}), print)


def test_what_exceeds_the_context_is_refused_in_openai_words() -> None:
    engine, _ = ledger_engine({FULL: 8}, max_context=100)
    with pytest.raises(ContextLengthError, match="maximum context length is 100 tokens") as error:
        engine.submit(prompt_of(1, 60), SamplingParams(max_tokens=41), print)
    assert (error.value.limit, error.value.prompt, error.value.requested) == (100, 60, 41)
    with pytest.raises(ContextLengthError, match="100 in the messages, at least 1 in the completion"):
        engine.submit(prompt_of(1, 100), SamplingParams(), print)


def test_the_default_limit_is_what_the_context_leaves() -> None:
    engine, _ = ledger_engine({FULL: 8}, max_context=100)
    client = Client(engine)
    submit(engine, client, 1, 60)
    run(engine)
    assert len(client.tokens[1]) == 40
    assert client.reasons[1] is FinishReason.LENGTH


def test_the_queue_is_bounded() -> None:
    engine, _ = ledger_engine({FULL: 8}, max_sequences=1, queue=2)
    client = Client(engine)
    for number in (1, 2, 3):  # one that can run at once and two that wait
        submit(engine, client, number, 10, max_tokens=3)
    with pytest.raises(QueueFullError, match="try again later"):
        submit(engine, client, 4, 10)
    run(engine)
    assert set(client.reasons) == {1, 2, 3}
    submit(engine, client, 5, 10, max_tokens=3)


def test_a_stop_token_ends_a_request_and_is_no_text() -> None:
    engine = text_engine()
    outputs: list[Output] = []
    engine.submit(range(300), SamplingParams(stop_token_ids=[305]), outputs.append)
    run(engine)
    assert [token for output in outputs for token in output.token_ids] == [300, 301, 302, 303, 304, 305]
    assert "".join(output.text for output in outputs) == " t300 t301 t302 t303 t304"
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_across_tokens_ends_a_request() -> None:
    engine = text_engine()
    outputs: list[Output] = []
    engine.submit(range(300), SamplingParams(stop=["2 t303 "]), outputs.append)
    run(engine)
    assert "".join(output.text for output in outputs) == " t300 t301 t30"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].token_ids == (304,)


@pytest.mark.parametrize("queued", [False, True])
def test_cancelling_frees_everything_and_says_so_once(queued: bool) -> None:
    engine, _ = ledger_engine({FULL: 8}, max_sequences=1)
    client = Client(engine)
    if queued:
        submit(engine, client, 1, 10, max_tokens=50)
    client.tokens[2] = []
    request = engine.submit(prompt_of(2, 100), SamplingParams(max_tokens=50), partial(client.sink, 2))
    engine.step()
    engine.step()
    engine.cancel(request)
    engine.cancel(request)
    engine.step()
    assert client.reasons[2] is FinishReason.CANCELLED
    run(engine)
    engine.cancel(request)
    run(engine)
    engine.check()
    assert engine.state.free_blocks == {"full": 8}


class CancelsDuringTheCall(NullBackend):
    """Someone cancels while the second step of a call runs."""

    engine: Engine
    steps_run = 0

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        for made in super().run(rows, steps, interrupt):
            self.steps_run += 1
            if self.steps_run == 2:
                self.engine.cancel(next(iter(self.engine._live)))
            yield made


def test_a_cancellation_interrupts_the_call_under_way() -> None:
    backend = CancelsDuringTheCall(vocab_size=512, max_rows=4, max_steps=16)
    engine = backend.engine = text_engine(backend=backend)
    outputs: list[Output] = []
    engine.submit([1], SamplingParams(max_tokens=100), outputs.append)
    run(engine)
    assert backend.steps_run == 2
    assert outputs[-1].finish_reason is FinishReason.CANCELLED


class IsAskedDuringTheCall(NullBackend):
    """A request comes in its second step. It keeps how many steps its calls took, and after how many of all
    of them the request got its tokens."""

    engine: Engine

    def __init__(self, *, max_steps: int) -> None:
        super().__init__(vocab_size=512, max_rows=4, max_steps=max_steps)
        self.calls: list[int] = []
        self.answered: list[int] = []

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        self.calls.append(0)
        for made in super().run(rows, steps, interrupt):
            self.calls[-1] += 1
            if sum(self.calls) == 2:
                self.engine.submit([1], SamplingParams(max_tokens=5, ignore_eos=True), self._answer)
            yield made

    def _answer(self, output: Output) -> None:
        self.answered.append(sum(self.calls))


def test_a_request_joins_the_call_under_way_at_the_end_of_its_step() -> None:
    backend = IsAskedDuringTheCall(max_steps=16)
    engine = backend.engine = text_engine(backend=backend)
    engine.submit([1], SamplingParams(max_tokens=40, ignore_eos=True), lambda output: None)
    while not backend.calls:
        engine.step()
    assert backend.calls == [2]
    run(engine)
    assert backend.answered[0] <= 4, "one step may go by while the prompt is taken in"
    assert len(backend.answered) == 5


def test_calls_take_several_steps_only_when_nobody_waits() -> None:
    engine, backend = ledger_engine({FULL: 16}, max_sequences=1, max_steps=4)
    client = Client(engine)
    submit(engine, client, 1, 2, max_tokens=8)
    run(engine)
    assert [steps for rows, steps in backend.calls if rows] == [4, 4]
    backend.calls.clear()
    submit(engine, client, 2, 2, max_tokens=4)
    submit(engine, client, 3, 2, max_tokens=4)
    run(engine)
    assert [steps for rows, steps in backend.calls if rows] == [1, 1, 1, 1, 4]


def test_a_long_prompt_does_not_stop_the_others() -> None:
    engine, backend = ledger_engine({FULL: 16}, chunk_tokens=50, max_context=700, max_steps=4)
    client = Client(engine)
    submit(engine, client, 1, 5, max_tokens=100)
    while len(client.tokens[1]) < 5:
        engine.step()
    backend.calls.clear()
    submit(engine, client, 2, 500, max_tokens=5)
    while not client.tokens[2]:
        engine.step()
    chunks = [tokens for rows, tokens in backend.calls if not rows]
    assert chunks == [50] * 9 + [49]
    assert set(backend.calls[1:-1:2]) == {(1, 1)}, "a decode call of one step follows every chunk"


class ScoringLedger(LedgerBackend):
    """One that gives prompts scores, all alike."""

    def score(self, chunk: Span, following: Sequence[int], count: int) -> list[TokenLogprobs]:
        self.prefill([chunk])
        return [TokenLogprobs(token, -1.0, ()) for token in following]


def test_a_request_that_only_wants_its_prompt_fed_is_over_before_anybody_is_preempted() -> None:
    """An older one needs a block in the very step in which that has been done, and there is none free."""
    engine, backend = ledger_engine({FULL: 3}, max_steps=1, ledger=ScoringLedger)
    client = Client(engine)
    submit(engine, client, 1, 60, max_tokens=10)
    while len(client.tokens[1]) < 4:
        engine.step()
    submit(engine, client, 2, 80, max_tokens=0, prompt_logprobs=0)  # two blocks; the older one's is full
    engine.step()
    engine.step()
    assert client.reasons == {2: FinishReason.LENGTH}
    assert (engine.state.preemptions, engine.state.waiting) == (0, 0)
    run(engine)
    assert len(client.tokens[1]) == 10
    assert backend.fed == 59 + 79
    engine.check()


def test_failure_ends_every_request_with_an_error() -> None:
    engine, _ = ledger_engine({FULL: 16})
    client = Client(engine)
    submit(engine, client, 1, 5)
    engine.step()
    submit(engine, client, 2, 5)
    engine.fail("the device is gone")
    assert client.reasons == {1: FinishReason.ERROR, 2: FinishReason.ERROR}
    with pytest.raises(EngineDeadError, match="the device is gone"):
        submit(engine, client, 3, 5)


def test_seeds() -> None:
    """A request without a seed gets one of its own; a given one is kept."""
    engine, _ = ledger_engine({FULL: 16})
    first, second = (engine.submit(prompt_of(1, 5), SamplingParams(), lambda _: None) for _ in range(2))
    assert first.seed != second.seed
    assert engine.submit(prompt_of(1, 5), SamplingParams(seed=7), lambda _: None).seed == 7


def test_end_of_sequence_ends_unless_ignored() -> None:
    tokenizer = Tokenizer.synthetic(512)
    [eos] = tokenizer.eos_token_ids
    for ignore, count in ((False, eos), (True, 100)):
        engine = text_engine()
        outputs: list[Output] = []
        engine.submit([0], SamplingParams(max_tokens=100, ignore_eos=ignore), outputs.append)
        run(engine)
        assert sum(len(output.token_ids) for output in outputs) == count
    assert eos < 100
