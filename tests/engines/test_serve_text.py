"""Laws of the text in front of the tokens, and of what crosses the socket."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.engines.serve.settings import ServeSettings
from phalanx.engines.serve.text import StopFinder, TextStream, Tokeniser
from phalanx.engines.serve.wire import encode, error_from_json, error_to_json
from phalanx.errors import JobError, PlanError


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory) -> Tokeniser:
    """One token per byte, so that most characters of the test are several tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokeniser(folder)


@given(text=st.text(max_size=40), context=st.text(max_size=5))
def test_pieces_join_to_the_text_of_the_whole(tokeniser, text, context):
    ids = tokeniser.encode(text)
    stream = TextStream(tokeniser, tokeniser.encode(context))
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


def test_an_unfinished_character_is_shown_at_the_end(tokeniser):
    ids = tokeniser.encode("a\u20ac")
    stream = TextStream(tokeniser)
    assert [stream.push(token) for token in ids[:-1]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.fixture(scope="module")
def with_spaces(tmp_path_factory) -> Tokeniser:
    """As the sentencepiece ones: a space begins each word, unknown characters are bytes."""
    folder = tmp_path_factory.mktemp("spaces")
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "ab", "\u2581a"]
    vocabulary = {piece: at for at, piece in enumerate(vocabulary)}
    merges = [("a", "b"), ("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokeniser(folder)


@given(
    text=st.text("ab \u20ac\n", max_size=30),
    context=st.text("ab \u20ac", min_size=1, max_size=6),
)
def test_pieces_keep_the_spaces_between_words(with_spaces, text, context):
    before, both = with_spaces.encode(context), with_spaces.encode(context + text)
    if both[: len(before)] != before:
        return  # the text's first character became a part of the context's last token
    stream = TextStream(with_spaces, before)
    pieces = [stream.push(token) for token in both[len(before) :]]
    assert context + "".join(pieces) + stream.flush() == context + text
    assert "\ufffd" not in "".join(pieces)
    spelt = [with_spaces.spell(token) for token in both[len(before) :]]
    if text.isascii() and "\n" not in text:
        assert "".join(spelt) == text


@pytest.mark.demo
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30) | st.text("ab \n\u20ac\U0001f600\u4f60", max_size=30))
def test_pieces_of_a_real_tokenizer_join_to_the_text_of_the_whole(text):
    tokeniser = _demo_tokeniser()
    ids = tokeniser.encode(text)
    stream = TextStream(tokeniser, ids[:1])
    assert "".join(map(stream.push, ids[1:])) + stream.flush() == tokeniser.decode(ids)
    joined = [byte for token in ids[1:] for byte in tokeniser.bytes_of(token)]
    assert bytes(joined).decode() == tokeniser.decode(ids[1:], skip_special=False)


@cache
def _demo_tokeniser() -> Tokeniser:
    from phalanx.models.demo import ensure_demo_model

    return Tokeniser(ensure_demo_model(lambda text: None))


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(JobError, match=r"tokenizer\.json: is no tokenizer"):
        Tokeniser(tmp_path)


def test_without_a_tokenizer_only_ids_are_served(tmp_path):
    tokeniser = Tokeniser(tmp_path)
    assert not tokeniser.has_text and tokeniser.decode([1, 2]) == ""
    with pytest.raises(JobError, match="send token ids"):
        tokeniser.encode("a")
    assert tokeniser.spell(7) == "token_id:7"
    assert tokeniser.bytes_of(7) == list(b"token_id:7")


@given(text=st.text(max_size=20))
def test_the_bytes_of_tokens_join_to_the_text_also_within_characters(tokeniser, text):
    joined = [byte for token in tokeniser.encode(text) for byte in tokeniser.bytes_of(token)]
    assert bytes(joined) == text.encode()
    assert tokeniser.spell(tokeniser.encode("\u20ac")[0]) == "bytes:\\xe2"


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_text_ends_at_the_first_complete_stop_string_however_it_is_cut(text, stops, cuts):
    finder, shown, start = StopFinder(stops), "", 0
    for cut in [*sorted(cuts), len(text)]:
        shown += finder.push(text[start : max(start, cut)])
        start = max(start, cut)
        if finder.found:
            break
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert finder.found == bool(found)
    assert shown + finder.flush() == (text[: min(found)[1]] if found else text)


@given(text=st.text("abc", max_size=20), stop=st.text("abc", min_size=1, max_size=3))
def test_a_kept_stop_string_ends_the_text(text, stop):
    finder, shown = StopFinder([stop], keep=True), ""
    for character in text:
        shown += finder.push(character)
        if finder.found:
            break
    whole = text[: text.find(stop) + len(stop)] if stop in text else text
    assert shown + finder.flush() == whole


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    finder = StopFinder(["\n\n", "END"])
    assert [finder.push(part) for part in ("a\n", "b", "E", "NE", "ND x")] == [
        *("a", "\nb", "", "EN", ""),
    ]
    assert finder.found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_running": 0}, "serve.max_running = 0: must be at least 1"),
        ({"max_step_tokens": 8}, "serve.max_step_tokens = 8: must be at least 16"),
        ({"port": 70000}, "serve.port = 70000"),
        (
            {"dtype": "bfloat"},
            "serve.dtype = bfloat: no such dtype; nearest legal values: bfloat16",
        ),
    ],
)
def test_wrong_settings_are_named(options, words):
    with pytest.raises(JobError, match=words):
        ServeSettings(folder="x", scheduler="continuous", **options)


def test_errors_cross_the_socket():
    error = PlanError("plan/illegal", "a.b", 3, "is wrong", legal=[4, 5])
    again = error_from_json(json.loads(encode(error_to_json(error))))
    assert type(again) is PlanError and str(again) == str(error) and again.code == error.code
