"""A tiny model whose greedy output wanders, prompts of awkward lengths, an inbox with a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.settings import Request, Sampling
from phalanx.engines.serve.step import Output, StepResult
from phalanx.engines.serve.world import Cancel
from phalanx.errors import PhalanxError
from phalanx.models.hf import read_tensors, save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.spec import DecoderConfig, canonical_tensors, read_config, small_config

VOCABULARY = 101
CONFIG: DecoderConfig = small_config(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=80,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=21,
    full_every=2,
    dtype="float32",
    max_positions=512,
)
GREEDY = Sampling(max_new=24, ignore_eos=True)


def tensors(seed: int, config: DecoderConfig = CONFIG) -> Iterator[tuple[str, torch.Tensor]]:
    """Fresh weights; strong layers, because a tied head otherwise repeats its input."""
    for name, value in initial_values(seed, canonical_tensors(config).values()):
        if "post_" in name:
            yield name, value + 3.0
        else:
            yield name, value * (5.0 if "layers" in name else 1.0)


def write_model(folder: Path, seed: int = 0, config: DecoderConfig = CONFIG) -> Path:
    """A model folder without a tokenizer."""
    return save_folder(folder, config, tensors(seed, config))


def prompt_of(length: int, seed: int = 6) -> list[int]:
    """Random ids without special tokens."""
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def make_engine(
    source: Path | DecoderConfig = CONFIG,
    *,
    max_running: int = 5,
    max_tokens: int = 160,
    max_step_tokens: int = 33,
    kv_tokens: int = 0,
    seed: int = 0,
) -> ServeEngine:
    """An engine of a folder, or of a config with fresh weights."""
    is_config = isinstance(source, DecoderConfig)
    config = source if is_config else read_config(source)
    model = PackedDecoder(config)
    model.update(tensors(seed, config) if is_config else read_tensors(source))
    limits = KvLimits(
        max_tokens=max_tokens, max_running=max_running, max_step_tokens=max_step_tokens
    )
    dtype = getattr(torch, config.dtype)
    kv = PagedKv(config, kv_tokens or max_running * max_tokens, limits, dtype=dtype)
    return ServeEngine(model, kv, limits, "tiny@0")


def request(
    id_: int, prompt: Sequence[int], sampling: Sampling = GREEDY, adapter: str = ""
) -> Request:
    """A request with a copy of the prompt."""
    return Request(id_, list(prompt), len(prompt), sampling, adapter)


class ScriptedInbox:
    """Messages that come when so many steps have ended; closes when nothing is left.

    Attributes:
        outputs: request -> its outputs.
        results: what each step gave.
        refused: request -> why it was not accepted.
    """

    def __init__(self, script: Mapping[int, Sequence[Request | Cancel]]) -> None:
        self._script = {at: list(messages) for at, messages in script.items()}
        self.outputs: dict[int, list[Output]] = {}
        self.results: list[StepResult] = []
        self.refused: dict[int, PhalanxError] = {}

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        due = [at for at in self._script if at <= len(self.results) or wait]
        if not due:
            return None if wait else []
        at = min(due)
        return self._script.pop(at)

    def deliver(self, result: StepResult) -> None:
        self.results.append(result)
        for each in result.outputs:
            self.outputs.setdefault(each.request, []).append(each)

    def refuse(self, request: int, error: PhalanxError) -> None:
        self.refused[request] = error

    def tokens(self) -> dict[int, list[int]]:
        """Request -> output tokens."""
        return {id_: [each.token for each in outputs] for id_, outputs in self.outputs.items()}
