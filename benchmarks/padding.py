"""What padding to one length costs: a training step of padded rows beside the same samples packed.

    python benchmarks/padding.py --json FILE

Eight samples in the proportions of a published recipe (arXiv 2605.25645: 922 tokens in the mean,
each padded to 3,072), all lengths a quarter of that, forward and backward through a small decoder
with the same kinds of layers, one core, CPU seconds. Both ways compute the same gradients; padded
rows compute 3.33 times the tokens. Exits with 1 when the seconds differ by a factor outside 2.5 to
3.6.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from time import process_time

import torch
from gated import main

from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import DecoderConfig, canonical_tensors, small_config
from phalanx.ops.loss import counted_cross_entropy
from phalanx.report import Report
from phalanx.systems import published

RECIPE_TOKENS, SCALE, ROUNDS = 3072, 4, 3
PADDED_TOKENS = RECIPE_TOKENS // SCALE
LENGTHS = (100, 128, 151, 172, 194, 226, 305, 568)  # of a batch; skewed, as code answers are
LOW, HIGH = 2.5, 3.6
CONFIG: DecoderConfig = small_config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=1024,
    num_layers=3,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    window=128,
    full_every=3,
    dtype="float32",
    max_positions=PADDED_TOKENS,
)
Row = tuple[list[int], list[int], list[int]]  # tokens, first row of each document, counted rows


def padded_rows(samples: Sequence[list[int]]) -> list[Row]:
    """One sample a row, filled up behind its end."""
    return [
        (each + [0] * (PADDED_TOKENS - len(each)), [0], list(range(len(each) - 1)))
        for each in samples
    ]


def packed_rows(samples: Sequence[list[int]]) -> list[Row]:
    """Samples behind one another as long as they fit into a row, longest first."""
    rows: list[Row] = []
    for each in sorted(samples, key=len, reverse=True):
        fits = (row for row in rows if len(row[0]) + len(each) <= PADDED_TOKENS)
        tokens, starts, counted = next(fits, None) or ([], [], [])
        if not tokens:
            rows.append((tokens, starts, counted))
        starts.append(len(tokens))
        counted += range(len(tokens), len(tokens) + len(each) - 1)
        tokens += each
    return rows


def step_s(decoder: Decoder, rows: Sequence[Row]) -> float:
    """CPU seconds of forward and backward, gradients summed over the rows."""
    decoder.zero_grad()
    start_s = process_time()
    for tokens, starts, counted in rows:
        tokens_S = torch.tensor(tokens)
        hidden_SD, counted_N = decoder(tokens_S, document_starts=starts), torch.tensor(counted)
        head_VD, targets_N = decoder.head_weight, tokens_S[counted_N + 1]
        total = sum(LENGTHS) - len(LENGTHS)
        loss = counted_cross_entropy(
            hidden_SD, head_VD, counted_N, targets_N, num_counted_global=total
        )
        loss.backward()
    return process_time() - start_s


def gradients(decoder: Decoder) -> torch.Tensor:
    """All of them as one vector."""
    return torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])


def measure() -> Report:
    """Padded and packed steps in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    load_parameters(decoder, initial_values(0, canonical_tensors(CONFIG).values()))
    samples = [torch.randint(1, CONFIG.vocab_size, (length,)).tolist() for length in LENGTHS]
    ways = {"padded": padded_rows(samples), "packed": packed_rows(samples)}
    grads, ratios = {}, []
    for at in range(1 + ROUNDS):
        seconds = {}
        for name, rows in ways.items():
            seconds[name] = step_s(decoder, rows)
            grads[name] = gradients(decoder)
        if at:  # the first round warms up
            ratios.append(seconds["padded"] / seconds["packed"])
    return report_of(ways, ratios, grads)


def report_of(
    ways: dict[str, list[Row]], ratios: list[float], grads: dict[str, torch.Tensor]
) -> Report:
    """The rows, with their gates."""
    report = Report("Padding to one length")
    tokens = {name: sum(len(row[0]) for row in rows) for name, rows in ways.items()}
    mean = next(r.number for r in published("gemma4-tpu") if r.metric == "length_mean")
    assert mean is not None
    report.add(
        "tokens, padded / packed",
        tokens["padded"] / tokens["packed"],
        "1",
        "formula",
        target=RECIPE_TOKENS / mean,
        tolerance_frac=1e-9,
        note="gate: 3,072 over the published mean length",
    )
    report.add(
        "CPU seconds of a step, padded / packed",
        median(ratios),
        "1",
        "measured",
        target=(LOW + HIGH) / 2,
        tolerance=(HIGH - LOW) / 2,
        note=f"median of {len(ratios)} rounds, in turns",
    )
    gap = (grads["padded"] - grads["packed"]).norm() / grads["packed"].norm()
    report.add(
        "distance of the gradients",
        float(gap),
        "1",
        "measured",
        target=0.0,
        tolerance=1e-5,
        note="relative, float32: padding changes the work, not the result",
    )
    return report


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
