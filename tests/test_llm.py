"""The Python API, over the scripted engine and over a small real model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.options import OptionError
from headrace.engine.request import ContextLengthError, EngineDeadError, PromptError
from headrace.llm import GenerationError, Prompt, Usage
from headrace.load import Loaded, SourceError
from headrace.model.tokenizer import Tokenizer
from tests.server.scripted import CONTEXT, REPLY, VOCABULARY, WatchedEngine, config, scripted_engine
from tests.waiting import until


def scripted_llm(**options: Any) -> LLM:
    tokenizer = Tokenizer.synthetic(VOCABULARY)
    loaded = Loaded("scripted", cast(Any, SimpleNamespace(config=config())), tokenizer)
    return LLM.over(loaded, scripted_engine(tokenizer, **options))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


def test_one_prompt(llm: LLM) -> None:
    [completion] = llm.generate("hi")
    assert completion.text == REPLY
    assert completion.finish_reason == "stop"
    assert completion.usage == Usage(prompt_tokens=2, completion_tokens=len(REPLY) + 1)
    assert llm.tokenizer.decode(completion.token_ids) == REPLY
    assert completion.logprobs == []


def test_prompts_of_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("say {x}")
    assert [each.text for each in llm.generate(ids)] == ["x"]
    mixed: list[Prompt] = [ids, "say {y}"]
    assert [each.text for each in llm.generate(mixed)] == ["x", "y"]
    assert llm.generate([]) == []


def test_more_prompts_than_the_queue_holds() -> None:
    with scripted_llm(max_sequences=2, queue=3) as llm:
        completions = llm.generate([f"say {{{i}}}" for i in range(20)])
    assert [each.text for each in completions] == [str(i) for i in range(20)]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2, logprobs=1), SamplingParams(seed=5)]
    first, second = llm.generate(["hi", "seed"], params)
    assert (first.text, first.finish_reason) == (REPLY[:2], "length")
    assert [entry.token for entry in first.logprobs] == first.token_ids
    assert (second.text, second.logprobs) == ("5", [])
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate("hi", params)
    with pytest.raises(ValueError, match="0 sampling parameters for 1 prompts"):
        llm.generate("hi", [])


def test_chat(llm: LLM) -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert [each.text for each in llm.chat(hi)] == [REPLY]
    both = llm.chat([hi, [{"role": "user", "content": "say {x}"}]], reasoning=False)
    assert [each.text for each in both] == [REPLY, "x"]
    assert both[0].usage.prompt_tokens == llm.chat(hi)[0].usage.prompt_tokens + 1


def test_stream(llm: LLM) -> None:
    for prompt in ("say {né}", llm.tokenizer.encode("say {né}"), [{"role": "user", "content": "say {né}"}]):
        outputs = list(llm.stream(prompt))
        assert [output.text for output in outputs if output.text] == ["n", "é"]
        assert [output.finish_reason for output in outputs][-2:] == [None, "stop"]


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("endless")
    next(stream)
    engine = cast(WatchedEngine, llm._engine)
    assert engine.state.running == 1
    stream.close()
    until(lambda: engine.state.running == 0)


def test_a_stream_that_has_ended_is_not_cancelled() -> None:
    with scripted_llm() as llm:
        assert "".join(piece.text for piece in llm.stream("say {x}")) == "x"
        assert not cast(WatchedEngine, llm._engine).cancelled_at


def test_bad_prompts(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["hi", "x" * CONTEXT])
    with pytest.raises(PromptError, match=f"give ids from 0 to {VOCABULARY - 1}"):
        llm.generate([VOCABULARY])
    assert [each.text for each in llm.generate("say {x}")] == ["x"]


def test_a_failing_engine_is_an_error_and_not_an_answer() -> None:
    with scripted_llm() as llm:
        with pytest.raises(GenerationError, match="the script says so"):
            llm.generate(["endless", "crash"])
        with pytest.raises(Exception, match="the script says so"):
            next(llm.stream("hi"))


def test_a_prompt_that_fails_alone_leaves_the_others_their_answers() -> None:
    with scripted_llm(max_sequences=2, queue=2) as llm:
        with pytest.raises(GenerationError, match="after 2 tokens") as error:
            llm.generate(["say {x}", "spoilt", "say {y}", "spoilt", "say {z}"])
        assert error.value.failed == [1, 3]
        assert [each.text for each in error.value.completions] == ["x", "aa", "y", "aa", "z"]
        assert [each.finish_reason for each in error.value.completions] == ["stop", "error"] * 2 + ["stop"]
        assert llm.generate("say {x}")[0].text == "x"


def test_an_engine_that_fails_in_a_batch_leaves_the_answers_that_there_are() -> None:
    """Prompts that still wait for a place in the queue have failed with those that run."""
    with scripted_llm(max_sequences=1, queue=1) as llm:
        with pytest.raises(GenerationError, match="the script says so") as error:
            llm.generate(["say {x}", "crash", "say {y}", "say {z}"])
        assert error.value.failed == [1, 2, 3]
        assert [each.text for each in error.value.completions] == ["x", "", "", ""]
        assert [each.finish_reason for each in error.value.completions] == ["stop"] + ["error"] * 3
        with pytest.raises(EngineDeadError, match="the script says so"):
            llm.generate("say {x}")


def test_mistakes_show_before_the_load() -> None:
    with pytest.raises(OptionError, match="max_sequences"):
        LLM("nowhere", max_sequences=0)
    with pytest.raises(TypeError, match="max_sequencs"):
        LLM("nowhere", max_sequencs=1)
    with pytest.raises(SourceError, match="nowhere"):
        LLM("nowhere")


def test_a_real_model_says_what_recomputation_says() -> None:
    """Greedy tokens of a ragged batch, against the model without a cache on the whole sequence each time."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 256, "max_sequences": 4}
    with LLM(synthetic="north-micro-shape", prefill_chunk=16, **options) as llm:
        prompts = [llm.tokenizer.encode(text) for text in ("a", "Hello there", "x" * 40)]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        completions = llm.generate(prompts, params)
        model = llm._engine._engine._backend._model  # type: ignore[attr-defined]
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = list(prompt)
            for _ in range(6):
                with torch.no_grad():
                    tokens.append(int(model.full(torch.tensor([tokens]))[0, -1].argmax()))
            assert completion.token_ids == tokens[len(prompt) :]
