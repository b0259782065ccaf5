"""North Micro's text, tokenizer and conversations, made from a library of a few files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.model import markers
from headrace.model.tokenizer import Tokenizer, north_chat_template
from tools import train_micro
from tools.micro import chats, text, vocabulary
from tools.micro.data import Corpus, prepare

MODULE = '''"""A module."""


class Stack:
    @property
    def top(self, index, default=None):
        """Return the top item.

        More words about it.
        """
        return self.items[-1]


def undocumented():
    return 1
'''


def library(folder: Path) -> Path:
    """Many small modules with distinct texts."""
    for index in range(80):
        (folder / f"module{index}.py").write_text(MODULE.replace("Stack", f"Stack{index}"))
    return folder


def test_tables_copies_and_packages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    for name, content in (
        ("a.py", MODULE),
        ("copy.py", MODULE),
        ("site-packages/b.py", MODULE + "# other\n"),
        ("table.py", "x = [" + "0x12, " * 100 + "]"),
        ("tiny.py", "pass\n"),
        ("large.py", MODULE * 2000),
    ):
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.py").write_bytes(MODULE.encode() + b"# \xe9\n")
    assert [file.path for file in text.read_library(tmp_path)] == ["a.py"]


def test_the_split_depends_on_the_path_alone() -> None:
    files = [text.SourceFile(f"package/module{index}.py", "x") for index in range(4000)]
    share = sum(file.held_out for file in files) / len(files)
    assert 0.03 < share < 0.07
    assert all(text.SourceFile(file.path, "changed").held_out == file.held_out for file in files)


def test_functions_are_taken_with_their_documentation() -> None:
    (function,) = chats.functions([text.SourceFile("a.py", MODULE), text.SourceFile("b.py", "def (")])
    assert function.name == "top"
    assert function.parameters == ("index", "default")
    assert function.summary == "Return the top item."
    assert function.source.startswith("@property\ndef top(self, index")
    assert function.source.endswith("return self.items[-1]")


def test_a_vocabulary_holds_markers_and_gives_text_back(tmp_path: Path) -> None:
    backend = vocabulary.train_vocabulary([MODULE], 330)
    vocabulary.write_vocabulary(backend, tmp_path, 4096)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 330
    assert tokenizer.has_chat_markers
    sample = MODULE + "x = 12345  # naïve 🎉\n\t\n"
    ids = tokenizer.encode(sample)
    assert tokenizer.token_text(ids[0]) == markers.BOS
    assert tokenizer.decode(ids) == sample
    assert all(len(tokenizer.encode(marker, add_special_tokens=False)) == 1 for marker in markers.MARKERS)
    with pytest.raises(ValueError, match="give more text"):
        vocabulary.train_vocabulary(["abc"], 400)


def test_the_template_is_norths_but_for_the_name() -> None:
    ours, theirs = vocabulary.chat_template(), north_chat_template()
    assert "Cohere." not in ours
    assert "North Mini Code." not in ours
    for before, after in vocabulary.IDENTITY.items():
        assert theirs.count(before) == ours.count(after) == 1
        ours = ours.replace(after, before)
    assert ours == theirs


def test_completions_continue_the_generation_prompt(tmp_path: Path) -> None:
    files = text.read_library(library(tmp_path))
    made = chats.make_chats(files, 40, seed=1)
    assert len(made) == 41
    tokenizer = Tokenizer.synthetic(300)
    kinds = set()
    for chat in made:
        prompt = tokenizer.decode(chat.prompt(tokenizer), skip_special_tokens=False)
        completion = chat.completion()
        ending = markers.START_THINKING + ("" if chat.reasoning else markers.END_THINKING)
        assert prompt.endswith(markers.CHATBOT + ending)
        assert completion.endswith(markers.END_OF_TURN)
        assert (markers.END_THINKING in completion) is chat.reasoning
        if markers.START_ACTION in completion:
            action = completion.split(markers.START_ACTION)[1].split(markers.END_ACTION)[0]
            (call,) = json.loads(action)
            assert f'{{"name": "{call["tool_name"]}", ' in prompt
            kinds.add("call")
        elif markers.START_TEXT + "```python\n" in completion:
            kinds.add("code")
        elif "<|START_TOOL_RESULT|>" in prompt:
            kinds.add("result")
        else:
            kinds.add("words")
    assert kinds == {"call", "code", "result", "words"}
    assert made == chats.make_chats(files, 40, seed=1)


def test_prepared_files_hold_whole_documents(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    source, out = library(tmp_path / "library"), tmp_path / "out"
    facts = prepare(source, out, vocabulary=320, chats=10, max_positions=512, seed=1)
    assert facts.files == 80
    assert 0 < facts.held_out_files < 20
    tokenizer = Tokenizer.from_pretrained(out / "tokenizer")
    bos, end = tokenizer.encode(markers.BOS + markers.END_OF_TURN, add_special_tokens=False)
    corpus = Corpus.load(out / "train.npz")
    assert len(corpus.tokens) == facts.train_tokens
    assert (corpus.tokens[corpus.starts] == bos).all()
    assert (corpus.tokens[corpus.starts[1:] - 1] == end).all()
    assert not corpus.learn[corpus.starts].any()
    held_out = Corpus.load(out / "held_out.npz")
    assert len(held_out.starts) == facts.held_out_files
    first = tokenizer.decode(held_out.tokens[: held_out.starts[1]].tolist())
    assert len(first.encode()) * facts.held_out_files >= facts.held_out_bytes * 0.9


def test_training_without_token_files_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train_micro", "--data", str(tmp_path), "train"])
    with pytest.raises(SystemExit, match=r"tools\.train_micro prepare makes them"):
        train_micro.main()
