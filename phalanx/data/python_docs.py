"""Real data that every machine has: questions and answers from the standard library's docstrings.

The library is read as source and never imported, so the list depends on the Python version only.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = frozenset(
    """__pycache__ config distutils ensurepip idlelib lib-dynload lib2to3 pydoc_data site-packages
    dist-packages test tests turtledemo""".split()
)
# modules that users know under another name
_PUBLIC_NAME = {
    "posixpath": "os.path",
    "_collections_abc": "collections.abc",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_pydatetime": "datetime",
    "_strptime": "time.strptime",
}
_QUESTIONS = {
    "function": (
        "What does {name}() do in Python?",
        "What does the Python function {name} do?",
        "Explain {name}({args}) from the standard library.",
        "What is {name}() for?",
        "How would you describe the function {name}({args})?",
        "In Python, what happens when I call {name}({args})?",
    ),
    "method": (
        "What does {name}() do in Python?",
        "What does the method {short}() of {owner} do?",
        "Explain the method {name}({args}).",
        "What is {short}() of the class {owner} for?",
        "I have a {owner} object. What does calling {short}({args}) do?",
    ),
    "class": (
        "What is the Python class {name}?",
        "What is {name} for?",
        "Explain the class {name} from the standard library.",
        "When would I use {name} in Python?",
    ),
    "module": (
        "What is the Python module {name} for?",
        "What does the module {name} provide?",
        "Describe the standard library module {name}.",
    ),
}
_MIN_CHARS, _MAX_CHARS = 24, 600
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Pair:
    """A question about `name` (a qualified public name) and the answer of its docstring."""

    name: str
    question: str
    answer: str


def fingerprint() -> str:
    """What the list depends on: the Python version, the library's folder, this file's rules."""
    rules = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    text = f"{sys.version_info[:3]} {_library()} {rules}"
    return hashlib.sha256(text.encode()).hexdigest()


def question_answer_pairs() -> list[Pair]:
    """One pair per public module, class, function and method whose docstring opens with prose.

    Sorted by name; of equal answers only the first is kept, so that no answer stands on both sides
    of a split.
    """
    first_by_answer: dict[str, Pair] = {}
    by_name = {pair.name: pair for pair in _pairs(_library())}
    for _, pair in sorted(by_name.items()):
        first_by_answer.setdefault(pair.answer, pair)
    return list(first_by_answer.values())


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _pairs(library: Path) -> Iterator[Pair]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if any(part in _SKIPPED or part.startswith("config-") for part in parts):
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        module = ".".join(parts)
        module = _PUBLIC_NAME.get(module, module)
        if module and _is_public(module):
            yield from _pairs_of_module(module, path)


def _is_public(dotted: str) -> bool:
    return not any(part.startswith("_") for part in dotted.split("."))


def _pairs_of_module(module: str, path: Path) -> Iterator[Pair]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own invalid escapes
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return  # a deliberately broken file of the distribution
    yield from _pair("module", module, "", tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            owner = f"{module}.{node.name}"
            yield from _pair("class", owner, module, node)
            for member in node.body:
                if isinstance(member, _FUNCTIONS) and _is_public(member.name):
                    yield from _pair("method", f"{owner}.{member.name}", owner, member)
        elif isinstance(node, _FUNCTIONS) and _is_public(node.name):
            yield from _pair("function", f"{module}.{node.name}", module, node)


def _pair(
    kind: str, name: str, owner: str, node: ast.Module | ast.ClassDef | Function
) -> Iterator[Pair]:
    answer = _opening_prose(ast.get_docstring(node, clean=True) or "")
    if len(answer) < _MIN_CHARS:
        return
    forms = _QUESTIONS[kind]
    choice = hashlib.blake2b(name.encode(), digest_size=2).digest()
    form = forms[int.from_bytes(choice, "little") % len(forms)]
    words = {"name": name, "owner": owner, "short": name.rsplit(".", 1)[-1]}
    yield Pair(name, form.format(**words, args=_arguments(node)), answer)


def _arguments(node: ast.AST) -> str:
    if not isinstance(node, _FUNCTIONS):
        return ""
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [each.arg for each in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(name for name in names if name not in ("self", "cls"))


def _opening_prose(docstring: str) -> str:
    """The paragraphs before the first list, code or signature block, each on one line."""
    kept: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.splitlines()
        is_prose = lines and not any(
            line.startswith((" ", "\t", ">>>", "-", "*", "=", ":", "@", ".. ")) for line in lines
        )
        text = " ".join(" ".join(lines).split())
        if not is_prose or text.endswith(":") or len(text) + sum(map(len, kept)) > _MAX_CHARS:
            break
        kept.append(text)
    return "\n\n".join(kept)
