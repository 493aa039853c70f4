"""The tree holds its own rules: imports go one way, most of it needs no torch, files stay short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "phalanx"
# Everything else must import without torch.
TORCH_PARTS = (
    "phalanx.ops",
    "phalanx.engines",
    "phalanx.stores",
    *(f"phalanx.models.{name}" for name in ("cache", "decoder", "demo", "folders", "gguf_")),
    *(f"phalanx.models.{name}" for name in ("hf", "lora", "parameters", "peft_folder", "stored_")),
    "phalanx.worlds",
)
TORCH_FREE_WORLDS = (
    *("base", "sim", "faults", "replay", "action_json"),
    *("pipeline_plan", "pipeline_arrays"),
)
POLICY_MAY_IMPORT = {"action", "mesh", "layout", "policy", "units", "errors", "registry"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80


def needs_torch(name):
    world = name.removeprefix("phalanx.worlds.")
    free = name == "phalanx.worlds" or world.split("_")[0] == "sim" or world in TORCH_FREE_WORLDS
    return name.startswith(TORCH_PARTS) and not (name.startswith("phalanx.worlds") and free)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, path


def imports(path, *, at_top_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_policies_import_nothing_but_the_grammar():
    for name, path in modules():
        if not name.startswith("phalanx.policies"):
            continue
        family = ".".join(name.split(".")[:3])
        for imported in imports(path):
            if imported.startswith("phalanx.") and not imported.startswith(family):
                assert imported.split(".")[1] in POLICY_MAY_IMPORT, f"{name} imports {imported}"
            assert imported.split(".")[0] != "torch", f"{name} imports {imported}"


def test_nothing_imports_the_command_line():
    for name, path in modules():
        if not name.startswith("phalanx.cli") and name != "phalanx.__main__":
            assert not any(i.startswith("phalanx.cli") for i in imports(path)), name


def test_engines_and_worlds_know_no_policy():
    for name, path in modules():
        if name.startswith(("phalanx.engines", "phalanx.worlds", "phalanx.lower", "phalanx.cost")):
            found = [i for i in imports(path) if i.startswith("phalanx.policies")]
            assert not found, f"{name} imports {found}"


def test_everything_but_the_torch_part_imports_without_torch():
    free = [name for name, _ in modules() if not needs_torch(name)]
    free = [name for name in free if not name.endswith("__main__")]
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'{name} is not installed', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import importlib\n"
        f"for name in {free!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_torch_is_imported_at_the_top_only_where_it_is_expected():
    for name, path in modules():
        if not needs_torch(name):
            top = {i.split(".")[0] for i in imports(path, at_top_only=True)}
            assert "torch" not in top, name


def sources():
    for folder in ("phalanx", "tests", "benchmarks", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_files_stay_short():
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := _lines(p)) > MAX_FILE_LINES}
    assert not long


def _lines(path):
    return path.read_text().count("\n")


def test_functions_stay_short():
    long = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert not long


@pytest.mark.parametrize("word", ["utils", "helpers", "misc"])
def test_no_file_has_a_name_that_says_nothing(word):
    assert not [p for p in sources() if word in p.stem.split("_")]
