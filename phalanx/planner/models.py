"""The model of a job as a planner needs it: sizes, positions, a tokenizer where there is one."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from phalanx.cost.model_shape import ModelShape, shape_of
from phalanx.errors import JobError, PhalanxError
from phalanx.job import Job
from phalanx.models.config import DecoderConfig, parse_config
from phalanx.models.known import known_models, known_shape, published_precision, shape_at
from phalanx.models.named import is_here, named_model
from phalanx.models.source import model_source

_FOUR_BITS = frozenset("awq gptq int4 w4a16 w4a8 nvfp4 mxfp4 fp4 nf4 4bit".split())
_EIGHT_BITS = frozenset("fp8 float8 int8 w8a8 w8a16 8bit".split())
UNKNOWN_POSITIONS = 1 << 24  # where nothing is known of a model's context, it limits nothing


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """What is known of it.

    Attributes:
        config: sizes of a decoder that Phalanx computes; None for other architectures.
        shape: of those; None where there is a config.
        source: where the sizes come from.
        tokenizer_folder: with the model's own tokenizer.json; None where it is not here.
        most_tokens: positions that the model was made for; 0: not known.
    """

    name: str
    config: DecoderConfig | None
    shape: ModelShape | None
    source: str
    tokenizer_folder: Path | None = None
    most_tokens: int = 0

    @property
    def sizes(self) -> ModelShape:
        """For prices, whichever of the two is known."""
        if self.shape is not None:
            return self.shape
        assert self.config is not None
        return shape_of(self.config, self.name)


def priced_model(job: Job) -> PricedModel:
    """The model that a job names: one that is here, one whose shape is known, one of the Hub.

    Raises:
        JobError: from `named_model` and `model_source`.
    """
    name = job.model.name
    if name == "tiny" or name.endswith(".gguf"):
        source = model_source(job, _log, weights=False)
        return PricedModel(
            name=name,
            config=source.config,
            shape=None,
            source="the job",
            tokenizer_folder=source.tokenizer_folder,
            most_tokens=source.config.max_positions,
        )
    if not is_here(name) and (shape := known_shape(name)) is not None:
        return _known(name, shape)
    try:
        named = named_model(name, _log)
    except JobError as error:
        if error.code != "model/unknown":
            raise
        return _described(name)  # an architecture or option that the decoder does not compute
    return PricedModel(
        name=named.name,
        config=named.config,
        shape=None,
        source=named.source,
        tokenizer_folder=named.tokenizer_folder,
        most_tokens=named.config.max_positions,
    )


def _known(name: str, shape: ModelShape) -> PricedModel:
    """A model of the tables, with a config where the decoder computes its family."""
    keys = next((dict(m.config) for m in known_models() if m.names[0] == shape.name), {})
    unlimited = {"max_position_embeddings": UNKNOWN_POSITIONS}
    try:
        config = parse_config(unlimited | keys, name)
    except PhalanxError:  # another architecture: it is priced by its shape
        config = None
    return PricedModel(
        name=name,
        config=config,
        shape=shape if config is None else None,
        source=shape.source,
        most_tokens=int(keys.get("max_position_embeddings", 0)),
    )


def _described(name: str) -> PricedModel:
    """A model whose config gives sizes, and no more than sizes are known of it."""
    shape, keys = shape_at(name, _log)
    positions = keys.get("max_position_embeddings", 0)
    return PricedModel(
        name=shape.name,
        config=None,
        shape=shape,
        source=shape.source,
        most_tokens=positions if isinstance(positions, int) else 0,
    )


def stored_bits(name: str) -> int:
    """Of a weight in a checkpoint, by the words of its name ("Qwen3-32B-AWQ"): 4, 8 or 16."""
    words = _words(name)
    return 4 if words & _FOUR_BITS else 8 if words & _EIGHT_BITS else 16


def stored_precision(name: str) -> str:
    """Of a checkpoint's weights, as servers name it: by the words of its name, or as published."""
    words, bits = _words(name), stored_bits(name)
    if bits == 4:
        return "fp4" if words & {"nvfp4", "fp4"} else "mxfp4" if "mxfp4" in words else "int4"
    if bits == 8:
        return "fp8" if words & {"fp8", "float8"} else "int8"
    return "bf16" if words & {"bf16", "fp16", "bfloat16"} else published_precision(name)


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_. ]", name.rstrip("/").rsplit("/", 1)[-1].lower()))


def _log(text: str) -> None:
    print(text, file=sys.stderr)
