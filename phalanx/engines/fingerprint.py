"""Summaries of activations, gradients and weights, written while a run trains.

They say where two runs part (`analyze.first_divergence`) whatever their layouts: a summary is a sum
over tokens and channels, keyed by the token's place in the global batch, so what ranks and
micro-batches have adds up to the same. A recorded step computes the same numbers as any other.

| phase | what | key of a row |
|---|---|---|
| W | weights before the step (frozen ones before the first) | row of the matrix |
| F | output of embedding, layers, last norm | token's place among all of the step |
| B | gradient of these outputs | the same |
| G | gradients of the weights, summed over all ranks, before clipping | row of the matrix |

Legend: R rows, C columns, K projections.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.analyze.first_divergence import FOLDER, FORMAT_VERSION, Summary
from phalanx.ops.dropout import mixed

if TYPE_CHECKING:
    from phalanx.engines.trainer_model import TrainModel

NUM_SIGNS = 16
_BLOCK_ELEMENTS = 1 << 20
_AS_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32}


def summary_of(x_RC: Tensor, keys_R: Tensor) -> Summary:
    """The summary of a matrix whose rows have keys; rows with negative keys are left out.

    -0 counts as 0.
    """
    total = Summary(0, 0.0, (0.0,) * NUM_SIGNS, 0)
    size = max(1, _BLOCK_ELEMENTS // max(1, x_RC.shape[1]))
    kept_R = keys_R >= 0
    for block_RC, keys_r, kept_r in zip(x_RC.split(size), keys_R.split(size), kept_R.split(size)):
        if not bool(kept_r.all()):
            block_RC, keys_r = block_RC[kept_r], keys_r[kept_r]
        total = total + _summary(block_RC.detach(), keys_r)
    return total


def _summary(x_RC: Tensor, keys_R: Tensor) -> Summary:
    channels_C = torch.arange(x_RC.shape[1], device=x_RC.device)
    wide_RC = x_RC.double()
    projected_RK = wide_RC @ _signs(channels_C + (1 << 40))
    signs_K = (_signs(keys_R) * projected_RK).sum(0)
    integers_RC = (x_RC + 0.0).view(_AS_INTEGERS.get(x_RC.dtype, torch.int16)).long()
    places_RC = mixed(keys_R)[:, None] + mixed(channels_C + (1 << 41))
    bits = int(mixed(integers_RC + mixed(places_RC)).sum()) % (1 << 64)
    squares = float(wide_RC.square().sum())
    return Summary(x_RC.numel(), squares, tuple(signs_K.tolist()), bits)


def _signs(keys_N: Tensor) -> Tensor:
    """K signs for each key, [N, K]."""
    which_K = torch.arange(NUM_SIGNS, device=keys_N.device)
    return 1.0 - 2.0 * ((mixed(keys_N)[:, None] >> which_K) & 1).double()


class Fingerprints:
    """Writes the summaries of a run's first steps to a file of this rank.

    Args:
        model: bound; the decoder is called with the keyword `dropout`, whose token places are the
            keys, also where nothing is dropped.
        rank: whose file it is.
        folder: of the run.
        num_steps: how many steps of this process are recorded.
        is_new: False: a run that goes on, whose earlier summaries stay.
    """

    def __init__(
        self, model: TrainModel, rank: int, folder: Path, num_steps: int, *, is_new: bool = True
    ) -> None:
        self._model = model
        self._path = folder / FOLDER / f"rank{rank}.jsonl"
        self._num_left, self._is_new = num_steps, is_new
        self._has_begun = False
        self._step = -1  # recorded now; -1: none
        self._places_S: Tensor | None = None
        self._found: dict[tuple[str, str], Summary] = {}

    @property
    def is_recording(self) -> bool:
        """Whether this step is recorded."""
        return self._step >= 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record this block as step `number` (from 1 in the file), if it is one of the first."""
        if self._num_left <= 0:
            yield
            return
        self._num_left -= 1
        self._step = number
        self._weights()
        hooks = [hook for name, module in self._watched() for hook in self._hooks(name, module)]
        hooks.append(
            self._model.decoder.register_forward_pre_hook(self._note_places, with_kwargs=True)
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._write()
            self._step = -1

    def gradients(self) -> None:
        """The gradients are summed over all ranks; nothing outside of a recorded step."""
        if not self.is_recording:
            return
        for name, parameter in self._model.decoder.named_parameters():
            grad = self._model.data.held(parameter).grad
            if grad is not None:
                self._whole("G", name, grad)

    def _weights(self) -> None:
        for name, parameter in self._model.decoder.named_parameters():
            if parameter.requires_grad or not self._has_begun:
                self._whole("W", name, parameter)
        self._has_begun = True

    def _whole(self, phase: str, name: str, value: Tensor) -> None:
        """Gathered by all ranks that hold a part, kept by one of those that hold it whole."""
        whole = value.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if self._counts(name):
            rows_RC = whole.reshape(whole.shape[0] if whole.dim() > 1 else 1, -1)
            keys_R = torch.arange(rows_RC.shape[0], device=whole.device)
            self._add(phase, name, summary_of(rows_RC, keys_R))

    def _counts(self, name: str) -> bool:
        """Whether this rank is the one of those with equal weights that writes them down."""
        elsewhere = self._model.stages is not None and name in self._model.stages.tied
        context = self._model.context.rank if self._model.context else 0
        return not (self._model.data.rank or self._model.tensor.rank or context or elsewhere)

    def _watched(self) -> Iterator[tuple[str, nn.Module]]:
        body = self._model.decoder.model
        if hasattr(body, "embed_tokens") and self._model.decoder.is_first:
            yield "model.embed_tokens", body.embed_tokens
        for at, layer in body.layers.items():
            yield f"model.layers.{at}", layer
        if self._model.decoder.is_last:
            yield "model.norm", body.norm

    def _note_places(self, _decoder: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        self._places_S = kwargs["dropout"].tokens_S

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        tensor = self._model.tensor
        if tensor.rank and not tensor.splits_tokens:
            return  # another rank has the same rows

        def note(_module: nn.Module, _args: tuple, x_SD: Tensor) -> None:
            keys_S = self._places_S
            if tensor.splits_tokens:
                keys_S = keys_S.chunk(tensor.degree)[tensor.rank]
            self._add("F", name, summary_of(x_SD, keys_S))
            if x_SD.requires_grad:
                x_SD.register_hook(
                    lambda grad_SD: self._add("B", name, summary_of(grad_SD, keys_S))
                )

        yield module.register_forward_hook(note)

    def _add(self, phase: str, name: str, summary: Summary) -> None:
        before = self._found.get((phase, name))
        self._found[phase, name] = summary if before is None else before + summary

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        is_first, self._is_new = self._is_new or not self._path.exists(), False
        with self._path.open("w" if is_first else "a", encoding="utf-8") as file:
            if is_first:
                head = {"format_version": FORMAT_VERSION, "dtype": self._model.compute_dtype}
                head |= {"threads": torch.get_num_threads()}
                file.write(json.dumps(head) + "\n")
            for (phase, name), found in self._found.items():
                line = {"step": self._step + 1, "phase": phase, "name": name}
                line |= {"count": found.count, "squares": found.squares, "bits": found.bits}
                file.write(json.dumps(line | {"signs": found.signs}) + "\n")
        self._found = {}
