"""Sizes of a model that need not be here: a preset, a folder, a config.json, a name of the Hub.

No torch, and no weights: planners ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names
from phalanx.models.config import DecoderConfig, parse_config, read_config
from phalanx.models.demo import DEMO_MODEL
from phalanx.models.file_head import demo_tokenizer_folder

_NEEDED = (
    "model_type, vocab_size, hidden_size, intermediate_size, num_hidden_layers, "
    "num_attention_heads, num_key_value_heads and max_position_embeddings"
)


@dataclass(frozen=True)
class NamedModel:
    """What is known of a model without its weights.

    Attributes:
        name: as it is printed.
        config: sizes.
        source: where they come from.
        tokenizer_folder: with the model's own tokenizer.json; None where it is not here.
    """

    name: str
    config: DecoderConfig
    source: str
    tokenizer_folder: Path | None = None


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Every name of a preset, in lower case -> its file's content, with its short name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(str(files("phalanx.models.presets"))).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8")) | {"short": path.stem}
        found |= {name.lower(): content for name in (path.stem, *content["names"])}
    return found


def preset_names() -> list[str]:
    """Short names of the models whose sizes come with Phalanx."""
    return sorted({content["short"] for content in _presets().values()})


def is_here(name: str) -> bool:
    """Whether a name is a folder, a file or a preset, so that nothing has to be fetched."""
    try:
        exists = bool(name) and Path(name).expanduser().exists()
    except (OSError, ValueError):  # longer than a path may be, or with a NUL
        exists = False
    return exists or name.lower() in _presets()


def named_model(name: str, log: Callable[[str], None] = print) -> NamedModel:
    """The sizes of a model by its name.

    A folder or a config.json of that name comes first, then a preset (whatever its capitals), then
    the Hub.

    Raises:
        JobError: `job/not-found` with the nearest presets and the keys that a config.json needs;
            from `parse_config` for one that cannot be read.
    """
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # longer than a path may be, or with a NUL
        is_folder = is_file = False
    if is_folder and name:
        return NamedModel(path.name, read_config(path), f"{path}/config.json", _with_words(path))
    if is_file and path.suffix == ".json":
        return NamedModel(path.parent.name or path.name, _read_file(path), str(path), None)
    if found := _presets().get(name.lower()):
        where = f"phalanx/models/presets/{found['short']}.json"
        config = parse_config(found["config"], where)
        is_demo = DEMO_MODEL in found["names"]
        words = demo_tokenizer_folder() if is_demo else _kept(found["names"])
        return NamedModel(found["short"], config, f"preset: {found['source']}", words)
    return _of_hub(name, log)


def _read_file(path: Path) -> DecoderConfig:
    if path.name == "config.json":
        return read_config(path.parent)
    try:
        table = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise JobError("job/syntax", str(path), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(path), None, "must be a JSON object")
    return parse_config(table, str(path))


def _of_hub(name: str, log: Callable[[str], None]) -> NamedModel:
    help_text = f"a folder or a config.json works as well; it needs {_NEEDED}"
    near = nearest_names(name.lower(), _presets()) or preset_names()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        rule = f"is no folder, no config.json, no preset and no Hub name (owner/name); {help_text}"
        raise JobError("job/not-found", "model.name", name, rule, legal=near)
    from phalanx.models.hub import hub_folder

    try:
        folder = hub_folder(name, log, weights=False)
    except JobError as error:
        if error.code != "job/not-found":
            raise
        rule = f"{error.rule}; {help_text}"
        raise JobError("job/not-found", "model.name", name, rule, legal=near) from error
    return NamedModel(name, read_config(folder), f"config.json of {name}", _with_words(folder))


def _with_words(folder: Path) -> Path | None:
    """The folder, if it holds a tokenizer."""
    return folder if (folder / "tokenizer.json").is_file() else None


def _kept(names: list[str]) -> Path | None:
    """The folder of a copy that the Hub's cache holds, without asking the Hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    known = {f"models--{name.replace('/', '--')}".lower() for name in names if "/" in name}
    cache_path = Path(HF_HUB_CACHE)
    if not cache_path.is_dir():
        return None
    for folder in sorted(cache_path.iterdir()):
        if folder.name.lower() in known:
            for tokenizer in sorted((folder / "snapshots").glob("*/tokenizer.json")):
                return tokenizer.parent
    return None
