"""Two configurations that belong together: how a model is spread, and what is trained."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from phalanx.errors import JobError
from phalanx.planner.importers.entries import AMBIGUOUS
from phalanx.planner.importers.foreign import ASSUMED, ForeignPlan, Note

_SPREAD: tuple[str, ...] = (
    *("devices", "tensor", "pipeline", "context", "context_kind", "replicate", "shard", "zero"),
    *("keeps_gathered", "offload", "offloads_weights", "sequence_parallel"),
)


def merged(one: ForeignPlan, other: ForeignPlan) -> ForeignPlan:
    """The plan of an accelerate configuration and of a TRL one, in either order.

    Raises:
        JobError: `foreign/ambiguous` for any other pair.
    """
    by_kind = {one.kind: one, other.kind: other}
    if set(by_kind) != {"accelerate", "trl"}:
        rule = (
            f"{one.kind} and {other.kind} do not belong together; two files are one of accelerate"
        )
        raise JobError(AMBIGUOUS, "--from", f"{one.path},{other.path}", f"{rule} and one of trl")
    spread, trained = by_kind["accelerate"], by_kind["trl"]
    values = trained.stated() | {name: getattr(spread, name) for name in _SPREAD}
    values = {name: value for name, value in values.items() if value is not None}
    origin = {name: where for name, where in trained.origin.items() if name not in _SPREAD}
    origin |= {name: where for name, where in spread.origin.items() if name in _SPREAD}
    if trained.origin.get("precision", "").endswith("dtype") and spread.precision != "fp32":
        values["precision"] = spread.precision  # the trainer asks for neither bf16 nor fp16
        origin["precision"] = spread.origin.get("precision", "")
    again, notes = _recompute(spread, trained)
    known = {each.name for each in fields(ForeignPlan)}
    fresh = ForeignPlan(
        kind="trl",
        version=f"{trained.version} on accelerate {spread.version}",
        path=f"{spread.path},{trained.path}",
        origin=origin,
        notes=(*spread.notes, *_without(trained.notes, "accelerate_config"), *notes),
        **{name: value for name, value in values.items() if name in known},
    )
    return replace(fresh, recompute=again)


def _without(notes: tuple[Note, ...], key: str) -> tuple[Note, ...]:
    return tuple(each for each in notes if each.key != key)


def _recompute(spread: ForeignPlan, trained: ForeignPlan) -> tuple[str | None, list[Note]]:
    """Either file may ask for it; transformers refuses both at once."""
    asked: list[Any] = [spread.recompute, trained.recompute]
    is_stated = trained.origin.get("recompute", "").startswith("line")
    if asked == ["full", "full"] and is_stated:
        text = "both files ask for it, which transformers refuses; priced once"
        return "full", [Note("", "activation_checkpointing", ASSUMED, text)]
    if spread.recompute and not is_stated:  # TRL's default does not undo what is written
        return spread.recompute, []
    return ("full" if "full" in asked else trained.recompute or spread.recompute), []
