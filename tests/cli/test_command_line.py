"""What a script can rely on: exit codes, one line on stderr, JSON, and a fast start."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from phalanx import cli, systems
from phalanx.cli import app, main
from phalanx.cli.output import write_file
from phalanx.errors import CODES, GateError, JobError
from phalanx.report import Report

HEAVY = ("torch", "matplotlib", "pandas", "transformers", "rich.table", "rich.console")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def in_process(*argv: str, code: str = "") -> subprocess.CompletedProcess:
    script = code or f"import sys; from phalanx.cli import main; sys.exit(main({list(argv)!r}))"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("argv", "absent"),
    [
        (["--help"], (*HEAVY, "numpy")),
        (["systems", "show", "fsdp"], (*HEAVY, "numpy")),
        (["doctor"], (*HEAVY, "numpy")),
        (["systems", "list"], HEAVY),  # policies of serving work on arrays
        (["policies"], HEAVY),
    ],
)
def test_a_quick_verb_imports_nothing_heavy(argv, absent):
    code = (
        "import sys; from phalanx.cli import main; "
        f"code = main({argv!r}); "
        f"print([name for name in {absent!r} if name in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    done = in_process(code=code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_one_verb_imports_no_other_verb():
    code = (
        "import sys; from phalanx.cli import main; main(['policies']); "
        "print([n for n in sys.modules if n.startswith('phalanx.cli.')])"
    )
    loaded = in_process(code=code).stdout.splitlines()[-1]
    assert "phalanx.cli.policies" in loaded
    assert "phalanx.cli.systems" not in loaded and "phalanx.cli.doctor" not in loaded


def test_help_names_every_verb(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert [verb for verb in app.verbs() if f"\n  {verb}" not in out] == []
    assert run(capsys)[1] == out  # no arguments: the same page


def test_a_group_alone_prints_its_help(capsys):
    code, out, err = run(capsys, "systems")
    assert (code, err) == (0, "") and "reproduce" in out


def test_version(capsys):
    assert run(capsys, "--version")[1].startswith("phalanx 0.")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["systems", "show", "fdsp"], "registry/unknown", ["fsdp"]),
        (["systems", "list", "--status", "done"], "job/bad-value", ["planned", "verified"]),
        (["policies", "pipelines"], "registry/unknown", ["pipeline"]),
        (["systems", "reproduce", "tigon"], "system/unreproduced", ["cannot say", "planned"]),
        (["sistems"], "cli/usage", ["sistems", "phalanx --help"]),
        (["systems", "show"], "cli/usage", ["NAME", "phalanx systems show --help"]),
        (["systems", "list", "--json"], "cli/usage", ["'-' for standard output"]),
        (["doctor", "--deeper"], "cli/usage", ["--deeper"]),
        (["policies", "--json", "/no/such/folder/x"], "cli/file", ["no such file"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, argv, code, words):
    exit_code, _, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.startswith("error[")]
    assert exit_code == 2 and len(lines) == 1 and "Traceback" not in err
    assert lines[0].startswith(f"error[{code}]: ") and code in CODES
    assert all(word in lines[0] for word in words), lines[0]


def test_debug_shows_where_an_error_was_raised_after_any_verb(capsys):
    _, _, plain = run(capsys, "systems", "show", "fdsp")
    code, _, err = run(capsys, "systems", "show", "fdsp", "--debug")
    assert code == 2 and "Traceback" in err and err.endswith(plain)


def test_a_missed_gate_prints_the_report_and_exits_1(capsys, monkeypatch):
    report = Report("made up")
    report.add("bytes", 5.0, "B", "simulated", target=4.0)
    monkeypatch.setattr(systems, "reproduce", lambda slug: report)
    code, out, err = run(capsys, "systems", "reproduce", "fsdp")
    assert code == GateError.exit_code == 1
    assert "MISS" in out and "0 of 1 gated rows met" in out and "error[report/gate]" in err


def test_a_mistake_of_ours_never_looks_like_a_verdict(capsys, monkeypatch):
    def broken(slug):
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(systems, "reproduce", broken)
    code, _, err = run(capsys, "systems", "reproduce", "fsdp")
    assert code not in (0, 1, 2) and "ZeroDivisionError" in err and "mistake in Phalanx" in err


def test_interruption_exits_130_without_a_word(capsys, monkeypatch):
    def interrupted(slug):
        raise KeyboardInterrupt

    monkeypatch.setattr(systems, "get", interrupted)
    code, _, err = run(capsys, "systems", "show", "fsdp")
    assert code == 130 and "Traceback" not in err and err.strip() == ""


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["systems", "list"], "systems"),
        (["systems", "show", "hanayo"], "system"),
        (["systems", "reproduce", "fsdp"], "report"),
        (["policies"], "policies"),
        (["doctor"], "doctor"),
    ],
)
def test_json_is_versioned_and_alone_on_stdout(capsys, tmp_path, argv, kind):
    code, out, _ = run(capsys, *argv, "--json", "-")
    document = json.loads(out)
    assert code == 0 and document["kind"] == kind and document["format_version"] == 1
    path = tmp_path / "out.json"
    code, text, _ = run(capsys, *argv, "--json", str(path))
    assert code == 0 and text and not text.startswith("{")
    written = json.loads(path.read_text())
    assert written.keys() == document.keys()


def test_json_of_a_system_holds_all_published_rows(capsys):
    document = json.loads(run(capsys, "systems", "show", "spmm", "--json", "-")[1])
    assert len(document["published"]) == document["num_published"] == 554
    assert {"system", "metric", "value", "unit", "source"} <= document["published"][0].keys()


def test_show_says_how_many_rows_it_left_out(capsys):
    short, full = (run(capsys, "systems", "show", "quake", *rest)[1] for rest in ([], ["--all"]))
    assert "304 more published numbers: add --all" in short
    assert "more published" not in full and full.count("\n") > 316


def test_status_filter_keeps_only_that_status(capsys):
    document = json.loads(run(capsys, "systems", "list", "--status", "planned", "--json", "-")[1])
    assert {row["status"] for row in document["systems"]} == {"planned"}


def test_a_reader_that_stops_reading_is_no_error():
    code = "import sys; from phalanx.cli import main; sys.exit(main(['systems', 'list']))"
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=written, stderr=subprocess.PIPE)
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")


def on_terminal(columns: int, *argv: str) -> str:
    """Standard output of the command line on a terminal of that width."""
    main_end, terminal = pty.openpty()
    script = (
        "import os, sys, shutil; "
        f"shutil.get_terminal_size = lambda *_: os.terminal_size(({columns}, 40)); "
        f"from phalanx.cli import main; sys.exit(main({list(argv)!r}))"
    )
    environment = os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, env=environment)
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(main_end, 65536):
            chunks.append(chunk)
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(main_end)
    assert process.wait(timeout=60) == 0
    return b"".join(chunks).decode()


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_tables_stay_within_the_terminal_and_keep_names_whole(columns):
    text = on_terminal(columns, "systems", "list")
    lines = text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    for slug in systems.names():
        assert any(line.strip().startswith(slug) for line in lines), slug


def test_every_module_of_the_command_line_is_a_verb_or_named_as_none():
    for verb in app.verbs():
        module = __import__(f"{cli.__name__}.{verb.replace('-', '_')}", fromlist=["register"])
        assert callable(module.register), verb


def test_a_file_that_cannot_be_written_names_option_and_path(tmp_path):
    with pytest.raises(JobError) as caught:
        write_file(str(tmp_path), "x", "--json")
    assert (caught.value.code, caught.value.where) == ("cli/file", "--json")
