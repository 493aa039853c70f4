"""The engine that another program's file starts, priced beside the best one of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from phalanx.cost.model_shape import ModelShape
from phalanx.errors import PhalanxError
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.importers import ForeignPlan
from phalanx.planner.models import stored_precision
from phalanx.planner.serve_plan import ServeAnswer, ServeQuestion, serve_answer

_NAMES = {
    "tensor": "tensor parallel",
    "pipeline": "stages",
    "expert": "expert parallel",
    "attention_dp": "attention replicas",
}
_WEIGHT_BITS = {"fp8": 8, "int8": 8, "fp4": 4, "mxfp4": 4, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class GivenServer:
    """A file's engine on one cluster.

    Attributes:
        answer: priced; None where the cluster cannot be cut like that.
        changes: from it to the best engine, in words; or why it cannot be.
        unpriced: what the file limits and the price does not know, in words.
        started: engines that the file starts; the cluster is filled with them.
    """

    answer: ServeAnswer | None
    changes: tuple[str, ...]
    unpriced: tuple[str, ...]
    started: int = 1


def weight_precision(foreign: ForeignPlan | None, name: str) -> str:
    """Of the weights that the file asks for: its quantisation, or as the checkpoint stores them."""
    if foreign is None or foreign.weight_bits is None:
        return stored_precision(name)
    if foreign.weight_bits == 4:
        return "fp4" if foreign.precision == "fp4" else "int4"
    return "fp8" if foreign.weight_bits == 8 else "bf16"


def degrees_of(foreign: ForeignPlan, shape: ModelShape) -> dict[str, int]:
    """Columns of `EngineSpace`: data ranks of a mixture share one engine, of others they do not."""
    only = {"tensor": foreign.tensor or 1, "pipeline": foreign.pipeline or 1}
    if shape.expert_params:
        only |= {"attention_dp": foreign.replicate or 1, "expert": foreign.expert or 1}
    return only


def given_server(
    foreign: ForeignPlan,
    shape: ModelShape,
    asked: AskedCluster,
    question: ServeQuestion,
    best: ServeAnswer,
) -> GivenServer:
    """Price the file's engine where an answer was found, and say what the best does otherwise.

    Its batch, its share of memory and whether it caches prefixes are those of the file.
    """
    only = degrees_of(foreign, shape)
    unpriced = _unpriced(foreign)
    started = 1 if shape.expert_params else foreign.replicate or 1
    needed, there = (
        prod(only.values()) // only.get("expert", 1) * started,
        asked.cluster.num_devices,
    )
    if needed > there:
        rule = f"it takes {needed} devices, and {asked.text} has {there}"
        return GivenServer(answer=None, changes=(rule,), unpriced=unpriced)
    reuses = question.reuses_prefixes and foreign.caches_prefixes is not False
    own = replace(question, max_running=foreign.max_running or 0, reuses_prefixes=reuses)
    try:
        answer = serve_answer(shape, _with_memory(asked, foreign), own, only=only)
    except PhalanxError as error:
        return GivenServer(answer=None, changes=(error.sentence(),), unpriced=unpriced)
    other = best.best.degrees if best.best is not None else {}
    changes = _changes(only, other)
    if question.names_prefixes and question.reuses_prefixes and not reuses:
        changes += ("prefix cache off -> on",)
    return GivenServer(answer=answer, changes=changes, unpriced=unpriced, started=started)


def _with_memory(asked: AskedCluster, foreign: ForeignPlan) -> AskedCluster:
    """The cluster whose devices give an engine the share of memory that the file states."""
    frac = foreign.memory_frac
    if frac is None or "default" in foreign.origin.get("memory_frac", ""):
        return asked
    machine = asked.cluster.machine
    figure = replace(machine.usable_memory_frac, value=frac, source=foreign.origin["memory_frac"])
    machine = replace(machine, usable_memory_frac=figure)
    return replace(asked, cluster=replace(asked.cluster, machine=machine))


def server_of(model: str, answer: ServeAnswer, question: ServeQuestion) -> ForeignPlan:
    """The best engine of a cluster as other programs start it.

    Engines of a dense model are one server with as many data ranks; of a mixture it is one engine,
    to be started as often as there are engines. Weights that are served as the checkpoint stores
    them need no word: engines read their format there.
    """
    best = answer.best
    assert best is not None
    degrees = best.degrees
    is_mixture = max(degrees["expert"], degrees["attention_dp"]) > 1
    data = degrees["attention_dp"] if is_mixture else best.replicas
    precision, is_stored = question.precision, question.precision == stored_precision(model)
    bits = 16 if is_stored else _WEIGHT_BITS.get(precision, 16)
    is_own = precision in ("fp8", "fp4", "fp16") and not is_stored
    products = precision if is_own else answer.asked.cluster.machine.half
    return ForeignPlan(
        kind="phalanx",
        role="serve",
        model=model,
        devices=degrees["tensor"] * degrees["pipeline"] * data,
        tensor=degrees["tensor"],
        pipeline=degrees["pipeline"],
        expert=degrees["expert"],
        replicate=data,
        max_running=best.max_running,
        caches_prefixes=None if question.reuses_prefixes else False,
        precision=products,
        weight_bits=bits if bits < 16 else None,
        kv_bits=8 if precision in ("fp8", "fp4") else None,
    )


def _changes(only: Mapping[str, int], best: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{told} {only.get(name, 1)} -> {best[name]}"
        for name, told in _NAMES.items()
        if name in best and best[name] != only.get(name, 1)
    )


def _unpriced(foreign: ForeignPlan) -> tuple[str, ...]:
    """Limits of the file that change the price and are not in it."""
    tokens = foreign.max_step_tokens
    return (f"at most {tokens:,} tokens a step",) if tokens else ()
