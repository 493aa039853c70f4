"""The page of a run: whole, valid, harmless, with every number, whatever a run left out."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from phalanx.pages import Curves, RunPage, Timeline, render_html, render_markdown, write_pages
from phalanx.pages.canvas import Picture
from phalanx.pages.pictures import pictures
from phalanx.report import Report
from tests.pages.run_pages import Elements, page, parity, report, step

HOSTILE = "<script>alert(1)</script>\u202etxt.exe\x00&amp;\"'|`````\ud800\n</pre></body>"
DRAWN_ANEW = (
    "one rank",
    "nothing at all",
    "no held-out rows",
    "no steps",
    "no forecast",
    "eight ranks",
    "no operators",
)
WITHOUT = {
    "no load test": {"serving": ""},
    "no held-out rows": {"curves": Curves(steps=[1], losses=[7.0], tokens_per_s=[10.0])},
    "no steps": {"curves": Curves()},
    "parity skipped": {"parity": parity(None)},
    "no parity": {"parity": None},
    "no prices": {"elsewhere": None},
    "no forecast": {"memory": None, "timeline": Timeline(measured=step("measured", 2))},
    "no samples": {"samples": []},
    "one rank": {
        "timeline": Timeline(simulated=step("simulated", 1), measured=step("measured", 1))
    },
    "eight ranks": {
        "timeline": Timeline(simulated=step("simulated", 8), measured=step("measured", 8))
    },
    "no operators": {
        "timeline": Timeline(
            simulated=step("simulated", 2), measured=step("measured", 2, operators=False)
        )
    },
    "nothing at all": {
        "report": Report("empty"), "parity": None, "elsewhere": None, "memory": None,
        "timeline": None, "serving": "", "samples": [], "curves": Curves(), "commands": [],
        "not_run": [], "environment": {}, "facts": [],
    },
}  # fmt: skip


@cache
def whole() -> tuple[RunPage, list[Picture], str]:
    """A page with all its parts, drawn once for all tests that only read it."""
    made = page()
    drawn = pictures(made)
    return made, drawn, render_html(made, drawn)


def test_every_number_of_the_report_stands_on_both_pages():
    made, drawn, html = whole()
    text, markdown = Elements(html).all, render_markdown(made, drawn)
    for row in made.report.rows:
        assert row.quantity in text and row.quantity in markdown
        assert str(row.value) in text and repr(row.value) in markdown
        assert row.target is None or str(row.target) in text
        assert row.note in text and row.note in markdown


@pytest.mark.parametrize("missing", WITHOUT)
def test_a_page_without_some_of_its_parts_is_whole(missing):
    made = page(**WITHOUT[missing])
    # pictures that the change does not touch are drawn once
    drawn = pictures(made) if missing in DRAWN_ANEW else whole()[1]
    found = Elements(render_html(made, drawn))
    assert found.names >= {"title", "h1", "h2", "main", "table"}
    assert len(found.ids) == len(set(found.ids)), "ids are unique"
    assert "None" not in found.all and "Undefined" not in found.all
    assert render_markdown(made, drawn).startswith("# job")


def test_a_page_needs_no_network_and_no_script():
    *_, text = whole()
    found = Elements(text)
    assert found.addresses and all(each.startswith("#") for each in found.addresses)
    assert "script" not in found.names and "link" not in found.names
    assert not re.search(r"@import|url\((?!#)", text)


def test_pictures_and_tables_can_be_read_without_seeing_them():
    *_, text = whole()
    images = re.findall(r'<svg[^>]* role="img" aria-label="([^"]+)"', text)
    assert len(images) == text.count("<svg") == 4
    assert any("6.8743" in each for each in images), "the curve is told"
    assert any("simulated step: 700 ms" in each for each in images)
    assert re.search(r'<th scope="col"[^>]*>Predicted</th>', text)
    assert '<html lang="en">' in text


def test_texts_of_others_stay_texts():
    sample = {"prompt": HOSTILE, "before": HOSTILE, "after": HOSTILE}
    rows = report()
    rows.add("training/" + HOSTILE, 1.0, "1", "measured", note=HOSTILE)
    made = page(
        title=HOSTILE, report=rows, samples=[sample], serving=HOSTILE, facts=[HOSTILE],
        commands=[(HOSTILE, HOSTILE)], environment={HOSTILE: HOSTILE}, not_run=[HOSTILE],
    )  # fmt: skip
    text = render_html(made, whole()[1])
    found = Elements(text)
    assert "script" not in found.names and found.all.count("<script>alert(1)</script>") > 8
    for char in ("\x00", "\u202e", "\ud800"):
        assert char not in text
    assert "\\u202e" in text and "\\u0000" in text and "\\ud800" in text
    text.encode("utf-8")


def test_markdown_fences_what_others_wrote():
    sample = {"prompt": HOSTILE, "before": "", "after": HOSTILE}
    made = page(title=HOSTILE, samples=[sample], serving=HOSTILE)
    text = render_markdown(made, whole()[1])
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert re.search(r"^``````text$", text, flags=re.MULTILINE), "longer than any run inside"
    assert not re.search(r"(?<!\\)<script", outside)
    assert "\u202e" not in text and "\x00" not in text
    text.encode("utf-8")


def test_without_matplotlib_the_page_says_which_pictures_are_absent(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    names = write_pages(page(), tmp_path)
    assert names == ["report.html", "report.md"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    told = Elements(text).all
    for name in ("loss", "speed", "memory", "timeline"):
        assert f"The picture “{name}” is absent" in told
        assert f"{name}.png is absent" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "phalanx-parallel[report]" in told and "6.8743 after step 3" in told


def test_files_are_written_whole(tmp_path: Path):
    names = write_pages(page(), tmp_path)
    assert {*names} == {each.name for each in tmp_path.iterdir()}
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    for name in ("loss", "speed", "memory", "timeline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"]({name}.png)" in markdown
    assert len((tmp_path / "report.html").read_bytes()) < 400_000


def test_colours_of_the_page_follow_the_reader():
    *_, text = whole()
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--ink)" in svg and "var(--muted)" in svg
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    neutral = {"#000000", "#ffffff", "#010203", "#040506", "#070809", "#0a0b0c"}
    assert not neutral & set(re.findall(r"#[0-9a-f]{6}", svg))


def test_long_runs_and_runs_that_diverged_are_drawn_in_small_files():
    steps = list(range(1, 5001))
    losses = [8.0 / at**0.1 for at in steps[:-2]] + [float("inf"), float("nan")]
    held_out = [[at, 8.0 / (1 + at) ** 0.1] for at in range(0, 5001, 10)]
    curves = Curves(steps=steps, losses=losses, tokens_per_s=losses[:1] * 5000, held_out=held_out)
    made = page(curves=curves, memory=None, timeline=None)
    drawn = pictures(made)
    assert Elements(render_html(made, drawn)).names >= {"svg"}
    assert all(each.svg and len(each.svg) < 150_000 for each in drawn)
    assert "to nan at step 5000" in drawn[0].alt and len(drawn[0].alt) < 300
    assert all(each.png and len(each.png) < 300_000 for each in drawn)
