"""What vLLM would choose, asked in the interpreter that has it: it pins a torch of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from phalanx.engines.parity.observed import Sequences
from phalanx.engines.parity.subject import Subject

_SCRIPT = Path(__file__).with_name("vllm_script.py")
_LIMIT_S = 600.0


def vllm_interpreter() -> tuple[list[str], str]:
    """The command of a Python that has vllm, and "" or why there is none."""
    if find_spec("vllm") is not None:
        return [sys.executable], ""
    executable = shutil.which("vllm")
    if executable is None:
        return [], "vllm is not installed"
    with open(executable, "rb") as file:
        first = file.readline(500)
    command = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if not any("python" in Path(part).name for part in command):
        return [], f"{executable} is no script of a Python"
    return command, ""


def vllm_choices(
    interpreter: list[str], subject: Subject, sequences: Sequences, dtype: str
) -> tuple[Tensor | None, str]:
    """Its most probable token at each position and its version; None and the reason if it fails."""
    question = {
        "folder": str(subject.export.resolve()),
        "dtype": dtype,
        "num_new": sequences.num_new,
        "sequences": [[*p, *f] for p, f in zip(sequences.prompts, sequences.forced)],
    }
    # as text, in another folder: a script's own folder comes first where it imports from
    command = [*interpreter, "-c", _SCRIPT.read_text(encoding="utf-8")]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            cwd=subject.export,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{type(error).__name__}: {error}"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return None, f"vllm failed: {said[0]}"
    answer = json.loads(lines[-1])
    return torch.tensor(answer["choices"]).flatten(), str(answer["version"])
