"""The choice of the next token. Legend: R rows (requests), V vocabulary, N candidates.

Every draw is a function of (seed, position in the request) alone, so neither companions in the
batch nor a preemption change it, and no generator has to be kept or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from phalanx.engines.serve.settings import Sampling, TokenScore

_FIRST_CANDIDATES = 64
_MORE = 16


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def choose(logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The next token of each row: the most probable one at temperature 0, else a draw.

    Args:
        logits_RV: any float dtype.
        samplings: how each row chooses.
        positions: index of the new token in its request, which the draw depends on.
    """
    drawn = [row for row, each in enumerate(samplings) if each.temperature > 0]
    # max finds the place several times faster than argmax on CPU
    tokens = logits_RV.max(-1).indices.tolist() if len(drawn) < len(samplings) else [0] * len(drawn)
    if drawn:
        heat_R1 = _column([samplings[row].temperature for row in drawn], logits_RV.device)
        probs_RV = (logits_RV[drawn].float() / heat_R1).softmax(-1)
        draws = [uniform(samplings[row].seed, positions[row]) for row in drawn]
        top_p = [samplings[row].top_p for row in drawn]
        for row, token in zip(drawn, _draw(probs_RV, top_p, draws)):
            tokens[row] = token
    return tokens


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _draw(probs_RV: Tensor, top_p: Sequence[float], draws: Sequence[float]) -> list[int]:
    tokens = [0] * len(draws)
    whole = [row for row, p in enumerate(top_p) if p >= 1]
    open_ = [row for row, p in enumerate(top_p) if p < 1]
    if whole:
        places = _invert(probs_RV[whole], [draws[row] for row in whole])
        for row, place in zip(whole, places):
            tokens[row] = place
    num = _FIRST_CANDIDATES
    while open_:
        num = min(num, probs_RV.shape[1])
        best = probs_RV[open_].topk(num)
        p_R1 = _column([top_p[row] for row in open_], probs_RV.device)
        before_RN = best.values.cumsum(-1) - best.values
        closed = (best.values.sum(-1, keepdim=True) >= p_R1).flatten().tolist()
        nucleus_RN = torch.where(before_RN < p_R1, best.values, 0.0)
        nucleus_RN[:, 0] = best.values[:, 0]  # the best one always stays
        places = _invert(nucleus_RN, [draws[row] for row in open_])
        chosen = best.indices.gather(1, torch.tensor(places, device=probs_RV.device)[:, None])
        left = []
        for row, token, is_closed in zip(open_, chosen.flatten().tolist(), closed):
            tokens[row] = token
            if not is_closed and num < probs_RV.shape[1]:
                left.append(row)
        open_, num = left, num * _MORE
    return tokens


def _invert(weights_RN: Tensor, draws: Sequence[float]) -> list[int]:
    """First place at which the running sum exceeds draw * total."""
    sums_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    wanted_R1 = torch.tensor(draws, dtype=torch.float64, device=weights_RN.device)[:, None]
    places_R1 = torch.searchsorted(sums_RN, wanted_R1 * sums_RN[:, -1:], right=True)
    return places_R1.clamp_(max=weights_RN.shape[1] - 1).flatten().tolist()


@torch.inference_mode()
def score(logits_RV: Tensor, tokens: Sequence[int], num_best: int) -> list[TokenScore]:
    """Log probability of each row's token, and the most probable tokens with theirs."""
    logp_RV = logits_RV.float().log_softmax(-1)
    index_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    own = logp_RV.gather(1, index_R1).flatten().tolist()
    best = logp_RV.topk(min(num_best, logits_RV.shape[1]))
    return list(zip(own, best.indices.tolist(), best.values.tolist()))
