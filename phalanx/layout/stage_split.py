"""Which layers each stage of a pipeline holds, when stages need not hold equally many.

The embedding and the head are weighed as layers: a layer weighs 1 on average, and each operator
half by its FLOPs (forward and backward) and half by the bytes of its weights. So a large vocabulary
takes layers off the first and the last stage: Llama 3 405B (126 layers) comes out as 7 + 14 x 8 + 7
on 16 stages, and as the embedding, 126 single layers and the head on 128.

Source: "Scaling Llama 3 Training with Efficient Parallelism Strategies", DOI
10.1145/3695053.3731410, section 3.1.2, which takes one layer off either end by hand.

No torch: the planner asks before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from phalanx.errors import PlanError, nearest_numbers
from phalanx.models.config import DecoderConfig
from phalanx.models.operators import operators
from phalanx.models.spec import LoraSpec

_WHERE = "plan.pipeline"


class StageRange(NamedTuple):
    """A stage: its layers, and what it holds beside them.

    Attributes:
        start, stop: first layer and the one behind the last; equal where it holds none.
        embeds: it begins with the embedding; ends: it closes with the last norm and the head.
    """

    start: int
    stop: int
    embeds: bool
    ends: bool


class StageWeights(NamedTuple):
    """Shares of a step, with the mean layer as the unit.

    Attributes:
        embedding, head: of what comes before and behind the layers.
        layers: of each layer.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float

    def of(self, stage: StageRange) -> float:
        """Weight of a stage."""
        ends = stage.embeds * self.embedding + stage.ends * self.head
        return ends + sum(self.layers[stage.start : stage.stop])


def stage_weights(
    config: DecoderConfig,
    *,
    document_tokens: int = 1024,
    counted_frac: float = 1.0,
    lora: LoraSpec | None = None,
) -> StageWeights:
    """Half of the FLOPs over those of a mean layer plus half of the weight bytes over its bytes.

    Args:
        document_tokens: length of the documents that attention stays within.
        counted_frac: share of the tokens whose logits are computed.
        lora: adapters on a frozen base; None: every weight is trained.
    """
    num_layers = config.num_layers
    flops, num_bytes = np.zeros(num_layers + 2), np.zeros(num_layers + 2)
    is_below = True
    for op in operators(config, document_tokens=document_tokens, lora=lora):
        is_below = is_below and op.layer is None
        at = op.layer + 1 if op.layer is not None else (0 if is_below else num_layers + 1)
        per_token = op.flops_per_token + op.backward_flops_per_token
        flops[at] += per_token * (counted_frac if op.op == "head" else 1.0)
        num_bytes[at] += op.weight_bytes
    shares = (flops / flops[1:-1].mean() + num_bytes / num_bytes[1:-1].mean()) / 2
    return StageWeights(float(shares[0]), tuple(shares[1:-1].tolist()), float(shares[-1]))


def split_layers(
    config: DecoderConfig,
    num_stages: int,
    *,
    document_tokens: int = 1024,
    counted_frac: float = 1.0,
    lora: LoraSpec | None = None,
    where: str = _WHERE,
) -> tuple[StageRange, ...]:
    """The split whose heaviest stage is lightest; of those the most even, later stages first.

    The first stage may hold the embedding alone and the last one the head alone, where everything
    is trained: beside a frozen base such a stage would train nothing. Layers that use keys and
    values of an earlier one stay in its stage.

    Args:
        document_tokens, counted_frac, lora: as `stage_weights`.
        where: what to name in an error.

    Raises:
        PlanError: `plan/illegal` for more stages than can be filled, with the nearest number.
    """
    weights = stage_weights(
        config, document_tokens=document_tokens, counted_frac=counted_frac, lora=lora
    )
    cuts = legal_cuts(config)
    may_be_bare = _may_be_bare(config, lora)
    most = most_stages(config, lora)
    if not 1 <= num_stages <= most:
        legal = nearest_numbers(num_stages, range(1, most + 1))
        rule = _why_not(config, num_stages, most)
        raise PlanError("plan/illegal", where, num_stages, rule, legal=legal)
    if num_stages == 1:
        return (StageRange(0, config.num_layers, True, True),)
    before_K = np.concatenate([[0.0], np.cumsum(weights.layers)])[cuts]
    inner_KK = before_K[None, :] - before_K[:, None]
    is_filled_KK = np.triu(np.ones_like(inner_KK, dtype=bool), k=1)
    first_K, last_K = inner_KK[0] + weights.embedding, inner_KK[:, -1] + weights.head
    if not may_be_bare:
        first_K[0] = last_K[-1] = np.inf
    inner_KK = np.where(is_filled_KK, inner_KK, np.inf)
    heaviest, _ = _lightest_chain(first_K, inner_KK, last_K, num_stages, np.maximum)
    first_K, inner_KK, last_K = (
        np.where(part <= heaviest * (1 + 1e-9), part**2, np.inf)
        for part in (first_K, inner_KK, last_K)
    )
    _, chosen = _lightest_chain(first_K, inner_KK, last_K, num_stages, np.add)
    ends = [0, *(cuts[at] for at in chosen), config.num_layers]
    return stage_ranges(list(pairwise(ends)))


def _why_not(config: DecoderConfig, num_stages: int, most: int) -> str:
    if num_stages < 1:
        return "a pipeline has at least one stage"
    if config.per_layer_embedding is not None:
        return "every layer reads the tokens (per-layer embedding), so one stage holds them all"
    rule = f"{config.num_layers} layers fill at most {most} stages, so that one stays empty"
    shares = len(legal_cuts(config)) <= config.num_layers
    return rule + "; layers that share keys and values stay together" * shares


def most_stages(config: DecoderConfig, lora: LoraSpec | None = None) -> int:
    """As many as can be filled."""
    return len(legal_cuts(config)) - 1 + 2 * _may_be_bare(config, lora)


def _may_be_bare(config: DecoderConfig, lora: LoraSpec | None) -> bool:
    """Whether the end stages may hold no layer."""
    return lora is None and config.per_layer_embedding is None


def job_stages(
    config: DecoderConfig,
    num_stages: int,
    num_ranks: int,
    given: Sequence[int] = (),
    *,
    lora: LoraSpec | None = None,
) -> tuple[StageRange, ...]:
    """The stages of a job: as it names them, or split by weight where every token counts.

    Args:
        num_stages, num_ranks: of its schedule and its pipeline axis.
        given: layers of each stage, in model order; (): not named.
        lora: as `split_layers`.

    Raises:
        PlanError: `plan/illegal` for more stages than can be filled; for given stages of another
            number or of other layers, without anything to train, or that part layers which belong
            together.
    """
    most = most_stages(config, lora)
    if num_stages > max(most, num_ranks):
        each, rule = num_stages // num_ranks, _why_not(config, num_stages, most)
        value = f"{num_stages} stages, {each} on each of {num_ranks} ranks"
        fewer = [f"{most // num_ranks} on each"] if most >= num_ranks else []
        raise PlanError("plan/illegal", _WHERE, value, rule, legal=fewer)
    split = split_layers(config, num_stages, lora=lora, where="plan.mesh.pp")
    if not given:
        return split
    if rule := _why_not_given(config, num_stages, given, lora):
        legal = [[stage.stop - stage.start for stage in split]]
        raise PlanError("plan/illegal", "plan.stages", list(given), rule, legal=legal)
    return stage_ranges(list(pairwise([0, *accumulate(given)])))


def _why_not_given(
    config: DecoderConfig, num_stages: int, given: Sequence[int], lora: LoraSpec | None
) -> str:
    """What stages of so many layers break; "": nothing."""
    ends = [0, *accumulate(given)]
    if len(given) != num_stages or ends[-1] != config.num_layers or min(given) < 0:
        return f"must hold {config.num_layers} layers in {num_stages} stages"
    needed = given[1:-1] if lora is None else given  # ends may hold a table alone
    if 0 in needed:
        return "has a stage without anything to train"
    if not set(ends) <= set(legal_cuts(config)):
        return "cuts off layers that use keys, values or embeddings of another stage"
    return ""


def stage_ranges(stages: Sequence[Sequence[int]]) -> tuple[StageRange, ...]:
    """The stages of a plan, [[start, stop], ...] in model order.

    Raises:
        PlanError: `plan/illegal` where one does not begin at the end of the one before it.
    """
    ends = [0, *(int(stop) for _, stop in stages)]
    for at, (start, stop) in enumerate(stages):
        if int(start) != ends[at] or stop < start:
            rule = f"stage {at} must begin at layer {ends[at]} and not end before it"
            legal = [[ends[at], max(ends[at], int(stop))]]
            raise PlanError("plan/illegal", "stages", [start, stop], rule, legal=legal)
    last = len(stages) - 1
    return tuple(
        StageRange(int(start), int(stop), at == 0, at == last)
        for at, (start, stop) in enumerate(stages)
    )


def legal_cuts(config: DecoderConfig) -> list[int]:
    """Layers before which a stage may begin, 0 and the number of layers among them.

    A layer that uses another one's keys and values cannot be cut off from it, and layers that
    receive a per-layer embedding cannot be cut off from the tokens.
    """
    num_layers = config.num_layers
    if config.per_layer_embedding is not None:
        return [0, num_layers]
    sources = [config.kv_source(layer) for layer in range(num_layers)]
    return [cut for cut in range(num_layers + 1) if all(source >= cut for source in sources[cut:])]


def _lightest_chain(
    first_K: np.ndarray, inner_KK: np.ndarray, last_K: np.ndarray, num_stages: int, joined
) -> tuple[float, list[int]]:
    """The lightest way through `num_stages` stages, and the cuts between them.

    Args:
        first_K: weight of the first stage by its end; inner_KK: of one by its two ends; last_K: of
            the last by its beginning.
        joined: how weights add up (np.add, np.maximum).
    """
    total_K, choices = first_K, []
    for _ in range(num_stages - 2):
        tried_KK = joined(total_K[:, None], inner_KK)
        choices.append(tried_KK.argmin(axis=0))
        total_K = tried_KK.min(axis=0)
    tried_K = joined(total_K, last_K)
    at = int(tried_K.argmin())
    chosen = [at]
    for choice_K in reversed(choices):
        at = int(choice_K[at])
        chosen.append(at)
    return float(tried_K.min()), chosen[::-1]
