"""One answer on its way out: from the engine's text to events, ended by stop strings and limits on calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.engine.request import FinishReason, Output
from headrace.engine.text import StopStrings
from headrace.model.sampling import TokenLogprobs
from headrace.server.formats import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from headrace.server.formats.machine import Lane

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON unless a limit cut it off."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Message:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = STOP
    stop_string: str | None = None

    def events(self) -> list[Event]:
        """The events that make up this message."""
        events: list[Event] = []
        if self.reasoning:
            events.append(Reasoning(self.reasoning))
        if self.content:
            events.append(Content(self.content))
        for index, call in enumerate(self.calls):
            events.append(CallStart(index, call.name))
            if call.arguments:
                events.append(CallArguments(index, call.arguments))
            if call.complete:
                events.append(CallEnd(index))
        return events

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, name):
                    self.calls.append(Call(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].complete = True


@dataclass(frozen=True, slots=True)
class Part:
    """What one step added to an answer. `logprobs` are those of the answer's words alone."""

    events: list[Event]
    logprobs: list[TokenLogprobs]


class Turn:
    """The state of one answer.

    Stop strings end the words of the answer, and nothing but them: neither thoughts nor arguments. Of the
    calls only the first `max_calls` pass (None: all); with none allowed the model's calls are dropped, with
    some the answer ends at the first one too many. `finish_reason` is set when the answer has ended; the
    engine may then still be at work on it.
    """

    def __init__(
        self, parser: OutputParser, *, stop: Iterable[str] = (), max_calls: int | None = None
    ) -> None:
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._parser = parser
        self._stop = StopStrings(tuple(stop))
        self._max_calls = max_calls
        self._calls = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop.matched

    def take(self, output: Output) -> Part:
        """What `output` adds, up to where the answer ends."""
        before = self._parser.lane
        self.completion_tokens += len(output.token_ids)
        if before is Lane.THINKING:
            self.reasoning_tokens += len(output.token_ids)
        found = self._parser.push(output.text)
        if output.finish_reason is not None:
            found += self._parser.finish()
        events = self._limited(found)
        if output.finish_reason is not None and self.finish_reason is None:
            events += self._held()
            self.finish_reason = self._reason(output.finish_reason)
        begins = any(isinstance(event, Content) for event in found)
        in_words = self._parser.lane is Lane.ANSWER and (before is Lane.ANSWER or begins)
        return Part(events, list(output.logprobs) if in_words else [])

    def _limited(self, found: Iterable[Event]) -> list[Event]:
        """The events until a stop string is complete, or a call comes that is not wanted."""
        events: list[Event] = []
        for event in found:
            if isinstance(event, Content):
                if text := self._stop.push(event.text):
                    events.append(Content(text))
                if self._stop.matched is not None:
                    self.finish_reason = STOP
            elif isinstance(event, Reasoning):
                events.append(event)
            elif self._max_calls != 0:
                events += self._call(event)
            if self.finish_reason is not None:
                break
        return events

    def _call(self, event: CallStart | CallArguments | CallEnd) -> list[Event]:
        if not isinstance(event, CallStart):
            return [event]
        if self._calls == self._max_calls:
            self.finish_reason = TOOL_CALLS
            return []
        self._calls += 1
        return [*self._held(), event]

    def _held(self) -> list[Event]:
        """Words that waited because they might have begun a stop string."""
        text = self._stop.finish()
        return [Content(text)] if text else []

    def _reason(self, reason: FinishReason) -> str:
        """A call is only reported as the reason when the model had its say to the end."""
        if reason is FinishReason.LENGTH:
            return LENGTH
        return TOOL_CALLS if self._calls else STOP
