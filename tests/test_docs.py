"""What the pages say exists: linked files and headings, commands, options, keys, tests, imports."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer

from phalanx.cli.app import build, verbs
from phalanx.job import load_job
from phalanx.job.sections import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOREIGN_KEYS = "docs/interchange.md"  # speaks of other programs' keys
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them, and places that have a name of their own."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    named = re.findall(r'<a id="([^"]+)">', text)
    return {heading.replace(" ", "-") for heading in plain} | set(named)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name):
    page = ROOT / name
    prose = FENCED.sub("", text_of(name))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name):
    named = re.findall(r"\b(?:tests|benchmarks|examples)/[\w/.-]+\.(?:py|toml)\b", text_of(name))
    for path in named:
        assert (ROOT / path).exists(), path


# ---- commands ------------------------------------------------------------------------------------


def commands(name: str) -> list[str]:
    """Lines that call phalanx, joined where they go on, without comments."""
    joined = re.sub(r" *\\\n\s*", " ", text_of(name))
    lines = re.findall(r"^ {4}(?:\$ )?(?:\.venv/bin/)?(phalanx [^\n]+)", joined, re.MULTILINE)
    inline = re.findall(r"`(phalanx [^`]+)`", text_of(name).replace("\n", " "))
    return [re.split(r" +#| *[|>] ", line)[0] for line in [*lines, *inline]]


@cache
def keys() -> frozenset[str]:
    return frozenset(
        f"{section}.{each.name}" for section, made in SECTIONS.items() for each in fields(made)
    )


ALL = [(name, line) for name in NAMES for line in commands(name)]


def test_pages_show_commands():
    assert len(ALL) > 60 and {name for name, _ in ALL} >= {"README.md", "docs/training.md"}


@pytest.mark.parametrize(("name", "line"), ALL, ids=[f"{n}: {line}" for n, line in ALL])
def test_commands_and_their_options_exist(name, line):
    words = shlex.split(line.replace("...", ""))[1:]
    if not words or not words[0].islower():
        return  # "phalanx VERB"
    command = typer.main.get_command(build(words))
    own: set[str] = {"--debug", "--version", "--help"}
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        own |= {each for option in command.params for each in option.opts}
    assert command.name in verbs() or not words or words[0] not in verbs()
    for word in words:
        option = word.split("=")[0]
        if option.startswith("--") and "." in option:
            key = ".".join(option[2:].split(".")[:2])
            assert key in keys(), f"{option} is no key of a job"
        elif re.fullmatch(r"--?[a-z][\w-]*", option):
            assert option in own, f"{option} is no option of {command.name}"


# ---- job files, keys, Python ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != FOREIGN_KEYS])
def test_keys_in_running_text_exist(name):
    sections = "|".join(SECTIONS)
    for said in re.findall(rf"`((?:{sections})\.[a-z_]+)(?: = [^`]*)?`", text_of(name)):
        assert said in keys() or said.endswith(".py"), said


@pytest.mark.parametrize("name", NAMES)
def test_job_files_are_jobs(name):
    blocks = [body for kind, body in FENCED.findall(text_of(name)) if kind == "toml"]
    for at, body in enumerate(blocks):
        table = tomllib.loads(body)
        if not set(table) <= set(SECTIONS):
            continue  # a machine
        flags = {f"{section}.{key}": value for section, made in table.items()
                 for key, value in made.items()}  # fmt: skip
        assert load_job(None, {"model.name": "tiny"} | flags), f"block {at}"


@pytest.mark.parametrize("name", NAMES)
def test_python_parses_and_its_imports_resolve(name):
    for kind, body in FENCED.findall(text_of(name)):
        if kind != "python":
            continue
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("phalanx"):
                module = import_module(str(node.module))
                for each in node.names:
                    assert hasattr(module, each.name), f"{node.module}.{each.name}"
