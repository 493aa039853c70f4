"""What training software keeps in the memory of a device, one profile each. No torch.

A profile holds facts of a program's design (which dtype its gradients have, whether attention
writes its matrix) and the few figures that `benchmarks/fit_memory.py` fitted to published rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import expm1
from typing import Any

from phalanx.errors import JobError, nearest_names


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """One program.

    Attributes:
        name, title: key of the table and whom it stands for.
        frozen_bytes, input_bytes, wide_bytes: of a weight that is not trained, of an element that a
            linear layer read, and of a channel of F before or after its function.
        weight_bytes, grad_bytes, moment_bytes, master_bytes: of a trained parameter; master
            weights beside the weights (0: the stored weights are the master).
        bucket_bytes: of a trained parameter, held to exchange gradients where data ranks are many.
        fp8_weight_bytes, fp8_grad_bytes, fp8_input_bytes: of a parameter, of its gradient and of an
            element that a linear layer read, with fp8 or fp4 products; 0: as in 16 bits.
        fp8_tuned_wide_bytes: of gate and up channels with fp8 products and adapters (MLPerf
            submissions keep them in fp8), whose own inputs then stay in 16 bits; 0: as otherwise.
        gathered_bytes: of a parameter while a sharded unit is gathered.
        unit_frac: what is gathered at once, over a layer (or over the embedding and the head).
        prefetched_units: units gathered ahead of the one that computes.
        head_bytes: of an element of a trained head while the loss makes its gradient, where what
            layers do not hold is reduced last, behind all activations; 0: beside them.
        matrix_bytes: of a pair of tokens and head that attention keeps; 0: it is fused.
        dropout_masks: of D bytes a token and layer.
        hidden_extra: bytes a channel of D that a layer keeps beyond `memory_activations`: rotated
            copies, residual sums, norms in fp32; split over the tensor axis.
        wide_extra: bytes a channel of F of a gated block beyond those: the gate after its function.
        adapters: which matrices have one when a model is tuned with LoRA: "all", or those of
            "attention" (MLPerf's rules, performance recipes of NeMo).
        adapter_input_bytes: of an element that an adapter read, each adapter a copy of its own; 0:
            it reads what is kept anyway.
        stage_input: bytes a channel of D that each micro-batch in flight keeps once a stage.
        selective_keeps: share of a layer's activations that "selective" recomputation keeps; 0: it
            recomputes the attention matrix alone.
        logit_bytes: of one logit at the peak of the loss: copies and gradient together.
        most_logit_bytes: where the loss is computed in parts, of one part; 0: it is not.
        splits_loss: logits stay cut over the tensor axis.
        sequence_parallel: tokens between blocks are always split where weights are.
        stages: "even" layers on pipeline ranks, or "by-cost" of blocks, the head among them.
        token_copies: of all tokens' D channels, gathered over the tensor axis at once.
        late_copies: such copies that are freed late because the host runs ahead of the device;
            an exchange with another pipeline rank holds it back.
        keeps_gathered_keys: what a context axis gathers of keys and values is kept by every layer
            for its backward pass; else it is gathered again.
        keeps_waiting_outputs: where a schedule parts the backward pass, gradients of what trained
            operators put out are kept between its parts.
        working_frac: buffers of a layer's backward pass over what that layer keeps.
        fragmentation_frac: memory the allocator holds beyond tensors that come and go.
        context_bytes: of the driver's context, libraries and their communicators.
        logs: what its own log counts: "device" (all), "reserved" (without the context),
            "allocated" (without fragmentation either).
        logs_first: its log is the first pipeline rank's, which need not be the fullest.
        low_log, high_log: 5th and 95th percentile of the logarithm of published over predicted.
        source: of what is not fitted.
        fitted, fitted_rows: names of figures that are, and to how many rows.
    """

    name: str
    title: str
    weight_bytes: float
    grad_bytes: float
    moment_bytes: float
    master_bytes: float
    frozen_bytes: float = 2.0
    input_bytes: float = 2.0
    wide_bytes: float = 2.0
    bucket_bytes: float = 0.0
    fp8_weight_bytes: float = 0.0
    fp8_grad_bytes: float = 0.0
    fp8_input_bytes: float = 0.0
    fp8_tuned_wide_bytes: float = 0.0
    gathered_bytes: float = 2.0
    unit_frac: float = 1.0
    prefetched_units: float = 1.0
    head_bytes: float = 0.0
    matrix_bytes: float = 0.0
    dropout_masks: float = 0.0
    hidden_extra: float = 0.0
    wide_extra: float = 0.0
    adapters: str = "all"
    adapter_input_bytes: float = 0.0
    stage_input: float = 0.0
    selective_keeps: float = 0.0
    logit_bytes: float = 8.0
    most_logit_bytes: float = 0.0
    splits_loss: bool = True
    sequence_parallel: bool = False
    stages: str = "even"
    token_copies: float = 1.0
    late_copies: float = 0.0
    keeps_gathered_keys: bool = False
    keeps_waiting_outputs: bool = False
    working_frac: float = 0.5
    fragmentation_frac: float = 0.05
    context_bytes: float = 1.5e9
    logs: str = "allocated"
    logs_first: bool = False
    low_log: float = -0.15
    high_log: float = 0.15
    source: str = ""
    fitted: tuple[str, ...] = ()
    fitted_rows: int = 0

    def for_training(self, precision: str, method: str) -> MemoryProfile:
        """The same with products of that precision."""
        if precision not in ("fp8", "fp4"):
            return self
        has_adapters = method == "lora"
        wide = self.fp8_tuned_wide_bytes if has_adapters else 0.0
        inputs = self.fp8_input_bytes if not wide else 0.0
        return replace(
            self,
            weight_bytes=self.weight_bytes if has_adapters else self._fp8_weight_bytes,
            frozen_bytes=self.fp8_weight_bytes or self.frozen_bytes,
            grad_bytes=self.grad_bytes if has_adapters else self.fp8_grad_bytes or self.grad_bytes,
            input_bytes=inputs or self.input_bytes,
            wide_bytes=wide or self.wide_bytes,
        )

    @property
    def _fp8_weight_bytes(self) -> float:
        return self.fp8_weight_bytes or self.weight_bytes

    def describe(self) -> str:
        """One line: whom it stands for, where its figures come from, how wide its bars are."""
        low, high = (f"{100 * expm1(each):+.0f} %" for each in (self.low_log, self.high_log))
        names = ", ".join(self.fitted)
        fit = f"{names} fitted to {self.fitted_rows} published rows; " if names else ""
        bars = "of published rows" if self.fitted_rows else "assumed"
        return f"memory of {self.title}: {self.source}; {fit}90 % bar {low} to {high}, {bars}"


NORMAL_95 = 1.645  # standard deviations to the 95th percentile


@cache
def _table() -> dict[str, Any]:
    text = (files("phalanx.cost") / "memory_software.json").read_text(encoding="utf-8")
    return json.loads(text)


def memory_software_names() -> list[str]:
    """Programs that have a profile of their own or share one."""
    return sorted({*_table()["profiles"], *_table()["families"]})


@cache
def memory_profile(software: str) -> MemoryProfile:
    """The profile of "family:generation"; the family's where the generation has none.

    A generation "YY.MM" before the date of a family's `earlier` profile has that one.

    Raises:
        JobError: `registry/unknown` with the nearest names.
    """
    profiles, families = _table()["profiles"], _table()["families"]
    family, _, generation = software.partition(":")
    family = families.get(family, family)
    if family not in profiles:
        legal = nearest_names(family, memory_software_names())
        raise JobError(
            "registry/unknown", "software", software, "no memory profile of that name", legal=legal
        )
    key = f"{family}:{generation}"
    if key not in profiles:
        before = profiles[family].get("earlier", {})
        is_dated = re.fullmatch(r"\d\d\.\d\d", generation)
        key = next(
            (name for date, name in before.items() if is_dated and generation < date), family
        )
    return MemoryProfile(name=key, **_entry(key))


def _entry(key: str) -> dict[str, Any]:
    """A profile's own values over those of the profile that it is like."""
    own = dict(_table()["profiles"][key])
    base = _entry(own.pop("like")) if "like" in own else {}
    known = {field.name for field in fields(MemoryProfile)}
    values = {name: value for name, value in {**base, **own}.items() if name in known}
    return values | {"fitted": tuple(values.get("fitted", ()))}
