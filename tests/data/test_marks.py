"""Which tokens count: what the assistant says, to the end of its turn, with any stock template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import marks
from phalanx.data.chat import OPENING, ChatTemplate
from phalanx.data.rows import Example, Message
from phalanx.data.tokenise import TextTokenizer, train_tokenizer
from phalanx.errors import JobError
from tests.data.templates import GEMMA_3, GEMMA_4, LLAMA_3, QWEN_3, SPECIAL, STOCK, WITH_BLOCKS

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
CALL = json.dumps({"tool_calls": [{"function": {"name": "weather", "arguments": {"at": "Oslo"}}}]})
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {}}}])


def example(*turns, tools=""):
    found = [t if isinstance(t, Message) else Message(ROLES[t[0]], t[1:]) for t in turns]
    return Example(tuple(found), "", "rows.jsonl:7", tools)


def template(source):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<end>"})


def learnt(source, *turns, tools=""):
    found = marks.mark_turns(template(source), example(*turns, tools=tools), SPECIAL)
    return [found.text[start:end] for start, end in found.learnt]


def test_gemma_3_learns_the_turn_with_its_end_and_folds_the_system_turn():
    turns = ("sbe brief", "uone?", "a yes ", "utwo?", "ano")
    assert learnt(GEMMA_3, *turns) == ["yes<end>", "no<end>"]
    found = marks.mark_turns(template(GEMMA_3), example(*turns), SPECIAL)
    assert [found.text[cut:] for cut in found.cuts] == [
        "<turn>user\ntwo?<end>\n<turn>model\nno<end>\n"
    ]


def test_gemma_4_learns_nothing_of_a_prompt_that_its_turns_do_not_have():
    assert learnt(GEMMA_4, "uone?", "a<b>yes</b>", "utwo?", "ano") == ["<b>yes</b><end>", "no<end>"]


def test_llama_3_writes_the_same_day_every_day():
    assert learnt(LLAMA_3, "uone?", "ayes", "utwo?", "ano") == ["yes<end>", "no<end>"]
    text = template(LLAMA_3).render(example("uone?").messages)
    assert "Today: 26 Jul 2024" in text


def test_qwen_3_learns_the_thought_of_the_last_turn_only():
    turns = ("uone?", "a<think>\nr1\n</think>\n\nyes", "utwo?", "a<think>\nr2\n</think>\n\nno")
    assert learnt(QWEN_3, *turns) == ["yes<end>", "<think>\nr2\n</think>\n\nno<end>"]
    assert learnt(QWEN_3, "uone?", "ayes", "utwo?", "ano") == [
        "yes<end>",
        "<think>\n\n</think>\n\nno<end>",
    ]


def test_a_prompt_that_opens_a_thought_is_not_learnt():
    opening = QWEN_3.replace(
        "<turn>assistant\n{% endif %}", "<turn>assistant\n<think>\n{% endif %}"
    )
    assert opening != QWEN_3
    assert learnt(opening, "uone?", "a<think>\nr1\n</think>\n\nyes", "utwo?", "ano") == [
        "yes<end>",
        "\n</think>\n\nno<end>",
    ]


@pytest.mark.parametrize("source", [LLAMA_3, QWEN_3], ids=["llama3", "qwen3"])
def test_calls_are_learnt_and_answers_of_tools_are_not(source):
    turns = ("uweather?", Message("assistant", "", CALL), "tsunny", "ait is sunny")
    first, last = learnt(source, *turns)
    assert '"weather"' in first and '{"at": "Oslo"}' in first and first.endswith("<end>")
    assert last.endswith("it is sunny<end>") and "answer" not in last


def test_a_template_that_leaves_tools_out_is_refused():
    turns = ("uweather?", Message("assistant", "", CALL), "tsunny", "ait is sunny")
    with pytest.raises(JobError, match="leaves out a call of turn 1"):
        learnt(WITH_BLOCKS, *turns)
    with pytest.raises(JobError, match="leaves out the definitions of tools"):
        learnt(LLAMA_3, "uweather?", "asunny", tools=TOOLS)
    assert learnt(QWEN_3, "uweather?", "asunny", tools=TOOLS)[0].endswith("sunny<end>")


def test_generation_blocks_are_taken_at_their_word():
    assert learnt(WITH_BLOCKS, "uone?", "ayes", "utwo?", "ano") == ["yes<end>", "no<end>"]
    assert OPENING not in template(WITH_BLOCKS).render(example("uone?", "ayes").messages)
    with pytest.raises(JobError, match="private character"):
        learnt(WITH_BLOCKS, f"uone{OPENING}", "ayes")
    half = WITH_BLOCKS.replace("== 'assistant'", "== 'assistant' and loop.last")
    with pytest.raises(JobError, match="not one generation block for each"):
        learnt(half, "uone?", "ayes", "utwo?", "ano")


def test_a_turn_of_weight_zero_is_not_learnt():
    turns = ("uone?", Message("assistant", "yes", "", False), "utwo?", "ano")
    for source in (GEMMA_3, QWEN_3, WITH_BLOCKS):
        (only,) = learnt(source, *turns)
        assert only.endswith("no<end>") and "yes" not in only


said = st.text("ab <>\n", min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("name", STOCK)
@given(exchanges=st.lists(st.tuples(said, said), min_size=1, max_size=4), head=st.none() | said)
@settings(max_examples=40, deadline=None)
def test_every_answer_is_learnt_to_its_end_and_no_question_is(name, exchanges, head):
    turns = [
        f"{role}Q{text}Q" if role != "a" else f"aA{text}A"
        for pair in exchanges
        for role, text in zip("ua", pair)
    ]
    found = learnt(STOCK[name], *([f"sQ{head}Q"] if head else []), *turns)
    assert len(found) == len(exchanges)
    for text, (_, answer) in zip(found, exchanges):
        assert text.endswith(f"A{answer}A<end>") and "Q" not in text


@pytest.mark.parametrize("name", ["gemma3", "llama3"])
@given(exchanges=st.lists(st.tuples(said, said), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_prefixes_and_markers_agree_where_both_apply(name, exchanges):
    turns = [f"{role}x{text}x" for pair in exchanges for role, text in zip("ua", pair)]
    row, used = example(*turns), template(STOCK[name])
    text = used.render(row.messages)
    by_prefixes = marks._by_prefixes(used, row, text)
    by_marker = marks._by_marker(used, row, text, SPECIAL)
    assert by_prefixes is not None
    assert [(t.start, t.end, t.next) for t in by_prefixes] == [
        (t.start, t.end, t.next) for t in by_marker
    ]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}{{ m.content if loop.last else '...' }}<end>{% endfor %}",
         "does not show which part"),
        ("{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}"
         "{{ messages[1].content | length }}", "rewrites more than turn"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end an assistant turn"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_trusted_are_refused(source, told):
    with pytest.raises(JobError, match=told) as caught:
        learnt(source, "uone?", "ayes", "utwo?", "ano")
    assert caught.value.code == "data/row" and "rows.jsonl:7" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 // 0 }}", "{{ messages[9].content }}", "{{ 'a' + 1 }}", "{{ messages | tojson(x=1) }}",
     "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)  # fmt: skip
def test_what_a_template_raises_is_a_refusal_of_the_row(source):
    with pytest.raises(JobError, match="refuses this conversation") as caught:
        learnt(source, "uone?", "ayes")
    assert caught.value.code == "data/row"


def test_a_template_that_is_none_is_refused_with_its_line(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}\n{% for %}\n")
    with pytest.raises(JobError, match=r"own\.jinja:2: is no jinja2 template") as caught:
        ChatTemplate.from_folder(tmp_path, own)
    assert caught.value.code == "job/syntax"
    with pytest.raises(JobError, match=r"data\.chat_template"):
        ChatTemplate.from_folder(tmp_path, tmp_path / "absent.jinja")
    own.write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="is not UTF-8"):
        ChatTemplate.from_folder(tmp_path, own)


# ---- tokens --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some words, and then   others\n\nof them"] * 3, 320, target)
    return target


@pytest.mark.parametrize("trim", [True, False])
def test_white_space_in_answers_counts_whatever_the_offsets_say(folder, tmp_path, trim):
    """Llama 3 and Qwen 3 ship tokenizers that cut white space out of the offsets of tokens."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(LLAMA_3)
    used = TextTokenizer(tmp_path)
    answer = "some\n\nwords,   and\n\n\nthen  others"
    ((_, row),) = used.encode_examples([example("uwords?", f"a{answer}")])
    counted = np.flatnonzero(row.counted)
    assert counted.tolist() == list(range(counted[0], counted[-1] + 1))
    assert used.decode(row.tokens[counted], skip_special=False) == f"{answer}<end>"
    assert row.ends == (counted[-1] + 1,)


def test_an_end_token_that_takes_white_space_along_still_ends_the_turn(folder, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, special=True), "<turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(QWEN_3)
    used = TextTokenizer(tmp_path)
    ((_, row),) = used.encode_examples([example("uwords?", "aothers", "uand?", "awords")])
    assert len(row.ends) == 2 and row.counted[[end - 1 for end in row.ends]].all()
    assert {used.decode([row.tokens[end - 1]], skip_special=False) for end in row.ends} == {"<end>"}


STOCK_OF_TRL = {
    "gemma3": "gemma3_training",
    "llama3": "llama3_training",
    "qwen2_5": "qwen2_5_training",
    "phi3": "phi3_training",
    "cohere": "cohere_training",
    "lfm2": "lfm2_training",
}


@pytest.mark.parametrize("name", STOCK_OF_TRL)
def test_stock_templates_get_the_mask_of_their_hand_marked_form(name):
    """TRL ships stock templates, and copies of them with generation blocks put in by hand."""
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    if not (folder / f"{STOCK_OF_TRL[name]}.jinja").is_file():
        pytest.skip("this release of TRL ships others")
    ends = (
        "<end>",
        "<end_of_turn>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|END_OF_TURN_TOKEN|>",
    )
    rows = [example("uone?", "ayes"), example("uone?", "ayes", "utwo?", "ano\n\nreally", "uthree?")]
    for row in rows:
        found = []
        for file in (name, STOCK_OF_TRL[name]):
            used = template((folder / f"{file}.jinja").read_text())
            marked = marks.mark_turns(used, row, ends)
            found.append(
                [marked.text[start:end].split("<")[0].strip() for start, end in marked.learnt]
            )
        assert found[0] == found[1] != []


def test_marks_need_no_torch():
    code = "import sys, phalanx.data.prepare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_without_a_prompt_the_white_space_before_an_answer_is_learnt():
    """Mistral's way: nothing opens an assistant turn, so a model has to say the space itself."""
    plain = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content | trim }}<end>{% endif %}{% endfor %}"
    )
    turns = ("uone?", "ayes", "utwo?", "ano")
    assert learnt(plain, *turns) == [" yes<end>", " no<end>"]
    counting = plain.replace("{{ bos_token }}", "{{ messages | length }}")  # prefixes differ
    assert learnt(counting, *turns) == [" yes<end>", " no<end>"]
