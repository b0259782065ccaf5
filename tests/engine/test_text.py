import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.text import Pushed, TextAssembler


class Pieces:
    """A token stream in which token i is `pieces[i]`; it keeps a trailing "~" back, as half a character."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self.rest = ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.rest + "".join(self.pieces[token] for token in ids)
        whole = text.rstrip("~")
        self.rest = text[len(whole) :]
        return whole

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read by characters until some stop string is complete; the text before the longest of these."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


letters = st.text("ab~é", max_size=4)
stops = st.lists(st.text("ab~é", min_size=1, max_size=5), max_size=3)


@given(st.lists(letters, max_size=12), stops, st.integers(1, 5))
def test_any_split_gives_the_text_cut_at_a_stop(pieces: list[str], stop: list[str], step: int) -> None:
    assembler = TextAssembler(Pieces(pieces), stop)
    text, stopped = "", False
    for start in range(0, len(pieces), step):
        ids = range(start, min(start + step, len(pieces)))
        new, stopped, taken = assembler.push(ids)
        text += new
        assert stopped == assembler.stopped
        if stopped:
            before = "".join(pieces[: start + taken - 1]).rstrip("~")
            assert not cut(before, stop)[1]  # the token before had not completed it
            break
        assert taken == len(ids)
    text += assembler.finish()
    assert (text, assembler.stopped) == cut("".join(pieces), stop)
    assert assembler.finish() == ""


@given(st.lists(letters, max_size=12), stops)
def test_only_what_may_begin_a_stop_string_waits(pieces: list[str], stop: list[str]) -> None:
    assembler = TextAssembler(Pieces(pieces), stop)
    sent = ""
    for token in range(len(pieces)):
        new, stopped = assembler.push_token(token)
        sent += new
        if stopped:
            return
        waiting = "".join(pieces[: token + 1]).rstrip("~")[len(sent) :]
        assert not waiting or any(
            len(string) > len(waiting) and string.startswith(waiting) for string in stop
        )


def assemble(pieces: Sequence[str], stop: Sequence[str]) -> list[Pushed]:
    assembler = TextAssembler(Pieces(pieces), stop)
    return [assembler.push([token]) for token in range(len(pieces))]


def test_text_flows_at_once_without_stop_strings() -> None:
    assert [item.text for item in assemble(["Hel", "lo", " \n"], [])] == ["Hel", "lo", " \n"]


def test_a_stop_string_across_three_tokens() -> None:
    result = assemble(["one E", "N", "D two"], ["END"])
    assert result == [Pushed("one ", False, 1), Pushed("", False, 1), Pushed("", True, 1)]


def test_a_false_alarm_is_sent_late_but_whole() -> None:
    assert [item.text for item in assemble(["a E", "N", "E"], ["END"])] == ["a ", "", "EN"]


def test_the_string_complete_first_wins_even_if_another_began_earlier() -> None:
    assert assemble(["xabcd"], ["abcd", "b"])[0].text == "xa"


def test_of_strings_complete_together_the_longest_wins() -> None:
    for stop in itertools.permutations(["cd", "bcd", "d"]):
        assert assemble(["abcd"], stop)[0].text == "a"


def test_tokens_after_the_stop_are_not_taken() -> None:
    assembler = TextAssembler(Pieces(["a", "STOP", "b"]), ["STOP"])
    assert assembler.push([0, 1, 2]) == Pushed("a", True, 2)
    assert assembler.push([2]) == Pushed("", True, 0)
    assert assembler.finish() == ""


def test_the_end_may_complete_a_stop_string() -> None:
    assembler = TextAssembler(Pieces(["ab~"]), ["b~"])
    assert assembler.push([0]) == Pushed("a", False, 1)
    assert assembler.finish() == ""
    assert assembler.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextAssembler(Pieces([]), [""])
