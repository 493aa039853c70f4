"""Shapes of models by name, for more models than the decoder computes. No torch, no downloads.

`phalanx/models/shapes/*.json` holds one list per maker: names, the count of parameters as it was
published, its source, and the sizes as keys of a `config.json`. A published count is what the
shape is checked against, never what it is made from. Presets are known too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.cost.model_shape import ModelShape
from phalanx.errors import JobError
from phalanx.models.shape_keys import shape_of_keys

# Words of a name that change how a model was trained, packed or benchmarked, not its shape.
_SHAPELESS = frozenset(
    """instruct chat it base hf fp8 fp4 nvfp4 mxfp4 bf16 fp16 int4 int8 w4a16 w8a8 kv awq gptq
    dynamic thinking preview edge fast 99 99.9 hf meta nvidia turbo mlperf block float8 dense
    original redhatai quantized unsloth bnb 4bit""".split()
)
_VERSION = re.compile(r"v0\.\d|0\d\d\d|2[0-6]\d\d|20\d\d")  # v0.1, 0528, 2507, 2024


@dataclass(frozen=True)
class KnownModel:
    """An entry of the tables.

    Attributes:
        names: in lower case; the first is the one to print.
        config: keys of its sizes.
        source: where they were published.
        params, active: parameters in all and per token, as printed ("30.5B"); "" where nobody
            printed them or only a name says so.
        left_out: of them in parts that a `ModelShape` leaves out, such as a tower for pictures.
        stored: precision of the published weights (of a mixture's experts), as servers name it.
    """

    names: tuple[str, ...]
    config: Mapping[str, Any]
    source: str
    params: str = ""
    active: str = ""
    left_out: str = ""
    stored: str = "bf16"

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        name = self.names[0]
        found = shape_of_keys(self.config, f"phalanx/models/shapes: {name}", name)
        return replace(found, source=self.source)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """All entries, presets of the decoder first."""
    presets = (
        {key: entry[key] for key in ("names", "config", "source")}
        for entry in _entries("phalanx.models.presets")
    )
    listed = (each for entry in _entries("phalanx.models.shapes") for each in entry)
    return tuple(
        KnownModel(**entry | {"names": tuple(entry["names"])}) for entry in (*presets, *listed)
    )


def _entries(package: str) -> Iterator[Any]:
    for path in sorted(Path(str(files(package))).glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def known_names() -> list[str]:
    """A name of each model."""
    return sorted(model.names[0] for model in known_models())


@cache
def known_shape(name: str) -> ModelShape | None:
    """The shape of a model by its name; None where it is not known.

    Capitals, the owner, separators and words that change no size (Instruct, FP8, dates) do not
    matter: "Meta-Llama-3.1-8B-Instruct-FP8" is "llama3.1-8b".
    """
    found = _found(name)
    return found.shape if found else None


def published_precision(name: str) -> str:
    """Of the weights that the maker of a model published; "bf16" where it is not known."""
    found = _found(name)
    return found.stored if found else "bf16"


def hub_name_of(name: str) -> str:
    """Owner and name on the Hub, in lower case, of a model by its short name; "": not known."""
    found = _found(name)
    names = [each for each in found.names if "/" in each] if found else []
    alike = [each for each in names if _plain(each.rsplit("/", 1)[-1]) == _plain(name)]
    return next(iter([*alike, *names]), "")


def shape_at(name: str, log: Callable[[str], None] = print) -> tuple[ModelShape, dict[str, Any]]:
    """The shape that a folder, a .json file or a name of the Hub describes, and its config.

    Raises:
        JobError: `job/not-found` or `job/syntax` for a file that cannot be read; from
            `shape_of_keys` and the Hub.
    """
    path = Path(name).expanduser()
    if not path.exists():
        from phalanx.models.hub import hub_folder

        path = hub_folder(name, log, weights=False)
    file = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(file.read_bytes().decode())
    except OSError as error:
        raise JobError("job/not-found", str(file), None, "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise JobError("job/syntax", str(file), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(file), None, "must be a JSON object")
    label = file.parent.name if Path(name).name == file.name == "config.json" else Path(name).name
    return shape_of_keys(table, str(file), label), table


def _found(name: str) -> KnownModel | None:
    by_name = _by_name()
    return next((by_name[key] for key in _spellings(name) if key in by_name), None)


@cache
def _by_name() -> dict[str, KnownModel]:
    found: dict[str, KnownModel] = {}
    for model in known_models():
        for name in _with_and_without(model):
            found.setdefault(_plain(name), model)
    return found


def _with_and_without(model: KnownModel) -> Iterator[str]:
    for name in model.names:
        yield name
        yield name.rsplit("/", 1)[-1]


def _spellings(name: str) -> Iterator[str]:
    """Keys under which a name may be known, the most literal first."""
    lower = name.strip().lower()
    for each in (lower, lower.rsplit("/", 1)[-1]):
        yield _plain(each)
        yield _plain(_shapeless_removed(each))


def _shapeless_removed(name: str) -> str:
    words = re.split(r"[-_ ]+", re.sub(r"(?<=\d)_(?=\d)", ".", name))
    return "-".join(
        word for word in words if word not in _SHAPELESS and not _VERSION.fullmatch(word)
    )


def _plain(name: str) -> str:
    """Without separators; "3_1" is 3.1."""
    return re.sub(r"[-_ ]+", "", re.sub(r"(?<=\d)_(?=\d)", ".", name.lower()))
