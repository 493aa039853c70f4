"""Events of rank 0 among what other code prints."""

from __future__ import annotations

import pytest

from phalanx.engines.events import hear, tell

EVENT = {"kind": "step", "step": 3, "text": "\N{LATIN SMALL LETTER U WITH DIAERESIS}\n\x1e{"}


def heard(line: str) -> list[dict]:
    events: list[dict] = []
    hear(line, events.append)
    return events


def test_an_event_is_one_line_and_heard_as_told(capsys):
    tell(EVENT)
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert heard(line) == [EVENT]


def test_an_event_after_a_line_without_an_end_is_heard_too(capsys):
    print("loss is", end=" ")
    tell(EVENT)
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert heard(line) == [{"kind": "log", "text": "loss is "}, EVENT]


@pytest.mark.parametrize(
    "line", ["{'loss': 1}", '{"kind": "stopped", "reason": "signal"}', "\x1ex"]
)
def test_what_user_code_prints_is_text(line):
    assert heard(line) == [{"kind": "log", "text": line}]


def test_nothing_says_nothing():
    assert heard("") == heard("  ") == []
