"""`phalanx data`: what is printed is what is trained on, and every token is accounted for."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from phalanx.cli import main

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": a},
        ]
    }
    for n, a in enumerate(["nothing", "unity", "a pair  of ones", "a crowd"] * 8)
]
MODEL = ("--model", "tiny", "--train.method", "pretrain", "--model.vocabulary", "300")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def run(capsys, *argv):
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_prints_samples_in_the_order_of_training(capsys, source):
    code, out, _ = run(capsys, "data", "show", "3", *MODEL, "--data", source, "--rows", "2")
    assert code == 0
    headings = re.findall(
        r"^---- sample (\d+): (.*):(\d+), (\d+) tokens, (\d+) counted$", out, re.M
    )
    assert [heading[0] for heading in headings] == ["3", "4"]
    for (_, _, line, *_), said in zip(headings, re.findall(r"\[\[(.*?)\]\]", out)):
        turns = ROWS[int(line) - 1]["messages"]
        assert said == turns[1]["content"] + "<eos>" and turns[0]["content"] in out
    _, second, _ = run(capsys, "data", "show", "4", *MODEL, "--data", source)
    assert second.split("account")[0] in out


def test_show_gives_ids_and_the_same_in_json(capsys, source):
    _, out, _ = run(capsys, "data", "show", "--ids", "0", *MODEL, "--data", source)
    lines = [line.split(None, 3) for line in out.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    code, text, _ = run(capsys, "data", "show", "0", *MODEL, "--data", source, "--json", "-")
    (sample,) = json.loads(text)["samples"]
    assert code == 0 and [int(line[1]) for line in lines] == sample["tokens"]
    assert [line[2] == "counted" for line in lines] == sample["counted"]


def test_stats_account_for_every_token(capsys, source):
    flags = ("--data.max_tokens", "60", "--data.too_long", "drop")
    code, text, _ = run(capsys, "data", "stats", *MODEL, "--data", source, *flags, "--json", "-")
    found = json.loads(text)
    audit = found["audit"]
    assert code == 0
    assert audit["tokens_in"] == sum(
        audit[f"tokens_{what}"] for what in ("trained", "masked", "dropped")
    )
    assert found["train"]["samples"] == audit["samples"] and found["epoch_steps"] >= 1
    listed = [each for each in found["dropped"] if each["part"] == "train"]
    assert sum(each["tokens"] for each in listed) == audit["tokens_dropped"]
    _, out, _ = run(capsys, "data", "stats", *MODEL, "--data", source, *flags)
    assert "longest tokens" in out and "counted share" in out and "masked (context)" in out


def test_a_job_file_and_flags_say_the_same(capsys, source, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\nname = "tiny"\nvocabulary = 300\n[train]\nmethod = "pretrain"\n'
        f'[data]\nsource = "{source}"\n'
    )
    one = run(capsys, "data", "show", "2", str(job))
    two = run(capsys, "data", "show", str(job), "2")
    three = run(capsys, "data", "show", "2", *MODEL, "--data", source)
    assert one[0] == 0 and one[1] == two[1] == three[1]


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["data", "show", "1", "2"], "job/syntax", "the number of one sample"),
        (["data", "show", "-1"], "job/syntax", "the number of one sample"),
        (["data", "show", "a.toml", "b.toml"], "job/syntax", "one job file at most"),
        (["data", "show", "--data.source", "x"], "job/syntax", "given twice"),
        (["data", "stats", "--data.held_out_frac", "0.6"], "job/bad-value", "held_out_frac"),
    ],
)
def test_bad_words_are_one_line(capsys, source, argv, code, told):
    exit_code, _, err = run(capsys, *argv, *MODEL, "--data", source)
    lines = [line for line in err.splitlines() if line.startswith("error[")]
    assert exit_code == 2 and len(lines) == 1 and f"error[{code}]" in lines[0] and told in lines[0]


def on_a_terminal(argv, **environment):
    """What a verb writes to a terminal."""
    leader, follower = pty.openpty()
    code = f"import sys; from phalanx.cli import main; sys.exit(main({argv!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=follower,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"} | environment,
    )
    os.close(follower)
    out = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        out += data
    os.close(leader)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.decode()


def test_a_terminal_gets_colours_unless_it_wants_none(source):
    argv = ["data", "show", "0", *MODEL, "--data", source]
    coloured = on_a_terminal(argv, NO_COLOR="")
    assert re.search(r"\x1b\[1;32m[^\x1b]*<eos>\x1b\[0m", coloured) and "[[" not in coloured
    plain = on_a_terminal(argv, NO_COLOR="1")
    assert "[[" in plain and "\x1b[1;32m" not in plain


def test_data_needs_no_torch(source):
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'{name} is not installed', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from phalanx.cli import main\n"
        f"sys.exit(main({['data', 'stats', *MODEL, '--data', source]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
