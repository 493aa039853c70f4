"""What a rank computes in a typical step: rows, documents, targets as they are dealt. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from phalanx.data.batches import SampleStream, deal, step_samples
from phalanx.data.samples import Samples
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import LoraSpec, TensorSpec, canonical_tensors, layer_tensors, lora_tensors

_MOST_STEPS = 256  # dealt to see what a typical one holds
_LEAST_ROW_TOKENS = 512  # products of fewer rows reach less of the machine's rate


def counted_weight(config: DecoderConfig) -> float:
    """Work of a target beyond that of any token, in tokens: head over layer products.

    Both cost 2 FLOPs per parameter forward and the same multiple of it backward, so the ratio is
    V D over the layers' matrix parameters, whatever is trained.
    """
    layers = sum(
        spec.num_elements
        for layer in range(config.num_layers)
        for spec in layer_tensors(config, layer)
        if len(spec.shape) == 2
    )
    return config.vocab_size * config.hidden_size / layers


def row_multiple(device: str) -> int:
    """Tokens that rows are rounded up to where a plan does not say.

    Libraries for CPUs compile and cache a kernel per shape. With rows of any length the cache
    (1,024 kernels, some 0.6 GB) overflows and compiling goes on for ever; 3 % more tokens were
    9 % less time (Gemma 3 270M, rows of 512, oneDNN of PyTorch 2.13).
    """
    return 32 if device == "cpu" else 1


def row_tokens_for(longest: int, multiple: int) -> int:
    """Tokens of a packed row where a plan does not say: the longest document, at least 512.

    Longer rows need more memory and gained nothing on CPUs (Gemma 3 270M, 4,096 tokens a step: rows
    of 512, 1,024, 2,048 and 4,096 took the same time within 3 %, measured).
    """
    return -(-max(longest, _LEAST_ROW_TOKENS) // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank computes in a typical step.

    Attributes:
        tokens, counted: of the rank with the most work in a step, mean over steps.
        num_items: micro-batches of a step, mean; most_items: of the step that has most, where no
            schedule asks for more.
        row_tokens, row_counted: of a typical micro-batch; longest_row: of the longest one that is
            trained on (evaluations keep nothing of their rows).
        document_tokens: mean length of documents, weighted by their tokens.
        row_lengths, document_lengths, target_counts: all that occur (tokens and targets of rows).
        num_trained: elements that get a gradient.
        lora_rank, lora_alpha, lora_targets: of the adapters; rank 0: all weights are trained.
        tensor_degree: ranks that share every product.
        splits_tokens: these ranks also share the tokens between blocks (sequence parallelism).
        context_degree: ranks that share the tokens of every row; sizes here are those of all.
        gathers_keys: these ranks gather the keys and values of the row, which every layer keeps for
            its backward pass; windows_seen: in layers with a window, what its queries see instead.
        row_limit, row_multiple: longest packed row allowed, and what rows are filled up to.
        num_steps: of the whole job.
    """

    tokens: float
    counted: float
    num_items: float
    row_tokens: int
    row_counted: int
    longest_row: int
    document_tokens: int
    num_trained: int
    row_lengths: Sequence[int] = ()
    document_lengths: Sequence[int] = ()
    target_counts: Sequence[int] = ()
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: Sequence[str] = ()
    tensor_degree: int = 1
    splits_tokens: bool = False
    context_degree: int = 1
    row_limit: int = 0
    row_multiple: int = 1
    num_steps: int = 0
    most_items: int = 1
    gathers_keys: bool = False
    windows_seen: bool = False

    @property
    def lora(self) -> LoraSpec | None:
        """The adapters; None when all weights are trained."""
        if not self.lora_rank:
            return None
        targets = tuple(self.lora_targets)
        return LoraSpec(rank=self.lora_rank, alpha=self.lora_alpha, targets=targets)


def workload_of(
    samples: Samples,
    config: DecoderConfig,
    *,
    num_steps: int,
    global_batch_tokens: int,
    row_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    seed: int = 0,
    lora: LoraSpec | None = None,
    held_out: Samples | None = None,
    tensor_degree: int = 1,
    splits_tokens: bool = False,
    context_degree: int = 1,
    least_items: int = 1,
) -> Workload:
    """Deal the steps as training will and see what they hold.

    Args:
        row_tokens: longest packed row.
        num_ranks: data-parallel ranks.
        multiple: what rows are rounded up to; the filler counts as tokens.
        held_out: samples that an evaluation scores, as one more step of shapes.
        least_items: micro-batches that a rank has at least (for a pipeline's schedule).
    """
    weight = counted_weight(config)

    def dealt(least_rows: int) -> list[DealtStep]:
        return deal_steps(
            SampleStream(samples, seed),
            weight,
            num_steps=min(num_steps, _MOST_STEPS),
            global_batch_tokens=global_batch_tokens,
            row_tokens=row_tokens,
            num_ranks=num_ranks,
            multiple=multiple,
            least_rows=least_rows,
        )

    steps = dealt(1)
    most_items = max(len(step.rows) // num_ranks for step in steps)
    steps = dealt(least_items) if least_items > 1 else steps
    heaviest = [step.heaviest_rank(num_ranks, weight) for step in steps]
    tokens, counted = (mean(column) for column in zip(*heaviest))
    num_items = mean(len(step.rows) / num_ranks for step in steps)
    lengths = samples.lengths.astype(float)
    seen = list(steps)
    if held_out is not None and len(held_out):
        stream = SampleStream(held_out, seed)
        counters = range(len(held_out))
        seen.append(_dealt(stream, counters, weight, row_tokens, num_ranks, multiple))
    rows = [row for step in seen for row in step.rows if row]
    return Workload(
        tokens=tokens,
        counted=counted,
        num_items=num_items,
        row_tokens=round(tokens / num_items),
        row_counted=max(1, round(counted / num_items)),
        longest_row=max(sum(row) for step in steps for row in step.rows),
        document_tokens=round(float((lengths**2).sum() / lengths.sum())),
        num_trained=sum(spec.num_elements for spec in _trained(config, lora)),
        row_lengths=sorted({sum(row) for row in rows}),
        document_lengths=sorted({length for row in rows for length in row}),
        target_counts=sorted({count for step in seen for count in step.counted}),
        lora_rank=lora.rank if lora else 0,
        lora_alpha=lora.alpha if lora else 0.0,
        lora_targets=lora.targets if lora else (),
        tensor_degree=tensor_degree,
        splits_tokens=splits_tokens,
        context_degree=context_degree,
        row_limit=row_tokens,
        row_multiple=multiple,
        num_steps=num_steps,
        most_items=most_items,
    )


def deal_steps(
    stream: SampleStream,
    weight: float,
    *,
    num_steps: int,
    global_batch_tokens: int,
    row_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    least_rows: int = 1,
) -> list[DealtStep]:
    """The first steps as training deals them.

    Args:
        weight: work of a target beyond that of any token, in tokens (`counted_weight`).
        row_tokens, num_ranks, multiple: as in `workload_of`; least_rows: of each rank.
    """
    start = 0
    steps: list[DealtStep] = []
    for _ in range(num_steps):
        counters = step_samples(stream, start, global_batch_tokens)
        steps.append(_dealt(stream, counters, weight, row_tokens, num_ranks, multiple, least_rows))
        start = counters.stop
    return steps


class DealtStep(NamedTuple):
    """A step's rows as document lengths with their filler, and the targets of each.

    Row r belongs to rank r modulo the ranks.
    """

    rows: list[list[int]]
    counted: list[int]

    def heaviest_rank(self, num_ranks: int, weight: float) -> tuple[int, int]:
        """Tokens and targets of the rank with the most work."""
        ranks = [
            (sum(map(sum, self.rows[rank::num_ranks])), sum(self.counted[rank::num_ranks]))
            for rank in range(num_ranks)
        ]
        return max(ranks, key=lambda rank: rank[0] + weight * rank[1])


def _dealt(
    stream: SampleStream,
    counters: range,
    weight: float,
    row_tokens: int,
    num_ranks: int,
    multiple: int,
    least_rows: int = 1,
) -> DealtStep:
    lengths = [stream.length(counter) for counter in counters]
    counted = [stream.num_counted(counter) for counter in counters]
    work = [n + weight * c for n, c in zip(lengths, counted)]
    least = {"least_rows": least_rows} if least_rows > 1 else {}
    rows = deal(lengths, work, row_tokens=row_tokens, num_ranks=num_ranks, **least)
    return DealtStep(
        [_rounded([lengths[at] for at in row], multiple) for row in rows],
        [sum(counted[at] for at in row) for row in rows],
    )


def _rounded(row: Sequence[int], multiple: int) -> list[int]:
    """Document lengths of a row with its filler."""
    filler = -sum(row) % multiple
    return [*row, filler] if filler else list(row)


def _trained(config: DecoderConfig, lora: LoraSpec | None) -> list[TensorSpec]:
    table = lora_tensors(config, lora) if lora else canonical_tensors(config)
    return list(table.values())
