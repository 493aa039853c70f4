"""Draws from logits: cuts, sums, and the inversion of a distribution.

Legend: R rows (requests), r some of them, V vocabulary, N candidates, M one more.

Order of the cuts: temperature, min_p, top_k, top_p. All of them keep a run of the most probable
tokens, so a cut is a length; equal logits stand in the order of their ids.
Source of the nucleus: arXiv 1904.09751, section 3.1; of min_p: arXiv 2407.01082, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from phalanx.engines.serve.settings import Request

NUM_CANDIDATES = 64
_MORE = 1024  # where those do not suffice
_BUCKETS = 4096
_COLDEST = 1e-30  # float32 can divide by it


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_whole(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draws among all tokens, in the order of the vocabulary."""
    heat_R1 = _heats(requests, logits_RV.device)
    warm_RV = (logits_RV - logits_RV.max(-1, keepdim=True).values).div_(heat_R1)
    return _invert(warm_RV.softmax(-1), _uniforms(requests, logits_RV.device))


def draw_cut(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draws among the most probable tokens: a few candidates where they are enough."""
    tokens, size = [0] * len(requests), logits_RV.shape[1]
    sums_R1 = Draw(requests, logits_RV.device).weights(logits_RV).sum(-1, True, dtype=torch.float64)
    open_ = list(range(len(requests)))
    for num in (min(NUM_CANDIDATES, size), min(_MORE, size)):
        if not open_:
            break
        draw = Draw([requests[row] for row in open_], logits_RV.device)
        best = best_of(logits_RV[open_], num)
        found, closed = draw.among(*best, sums_R1[open_], is_all=num == size)
        for row, token in zip(open_, found):
            tokens[row] = token
        open_ = [row for row, is_closed in zip(open_, closed) if not is_closed]
    for row in open_:
        tokens[row] = _draw_far(logits_RV[row : row + 1], requests[row])
    return tokens


def _draw_far(logits_1V: Tensor, request: Request) -> int:
    """A draw of one request whose cut leaves very many tokens."""
    draw, size = Draw([request], logits_1V.device), logits_1V.shape[1]
    if top_k := min(request.sampling.top_k, size):
        unknown_11 = torch.full((1, 1), torch.inf, device=logits_1V.device)
        return draw.among(*best_of(logits_1V, top_k), unknown_11, is_all=top_k == size)[0][0]
    weights_V = draw.weights(logits_1V)[0]
    wanted = request.sampling.top_p * weights_V.sum(dtype=torch.float64).item()
    kept_V = nucleus(logits_1V[0], weights_V, wanted)
    return _invert(kept_V[None], _uniforms([request], logits_1V.device))[0]


def nucleus(logits_V: Tensor, weights_V: Tensor, wanted: float) -> Tensor:
    """The weights of the most probable tokens that together reach `wanted`; 0 for the others.

    Without sorting the vocabulary: its logits are counted into buckets, and the one in which the
    last of them lies again, until few are left. Equal logits: the lowest ids are inside.

    Args:
        weights_V: grow with the logits; those of 0 are never inside.
        wanted: more than 0.
    """
    ids = (weights_V > 0).nonzero().flatten()
    logits, weights, above = logits_V[ids], weights_V[ids], 0.0
    while len(ids) > _MORE and (high := logits.max()) > (low := logits.min()):
        bucket = ((high - logits) / (high - low) * _BUCKETS).long().clamp_(max=_BUCKETS - 1)
        masses = torch.bincount(bucket, weights=weights.double(), minlength=_BUCKETS)
        reached = masses.cumsum(0) + above
        last = min(int((reached < wanted).sum()), int(bucket.max()))
        above = (reached[last] - masses[last]).item()
        part = (bucket == last).nonzero().flatten()
        ids, logits, weights = ids[part], logits[part], weights[part]
    order = logits.sort(descending=True, stable=True).indices
    before = weights[order].cumsum(0, dtype=torch.float64) - weights[order] + above
    inside = order[before < wanted]
    kept_V = weights_V * (logits_V > logits[inside[-1]])
    kept_V[ids[inside]] = weights[inside]
    return kept_V


def best_of(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row and their tokens [R, N]; equal ones by ascending id."""
    if num >= logits_RV.shape[1]:
        whole = logits_RV.sort(dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    top_RM = logits_RV.topk(num + 1)
    tokens_RN = top_RM.indices[:, :num].clone()
    # which of several equal ones are inside is decided here, not by topk
    last_R, next_R = top_RM.values[:, num - 1], top_RM.values[:, num]
    for row in (last_R == next_R).nonzero().flatten().tolist():
        ids = (logits_RV[row] >= last_R[row]).nonzero().flatten()
        order = logits_RV[row][ids].sort(descending=True, stable=True).indices
        tokens_RN[row] = ids[order[:num]]
    tokens_RN = tokens_RN.sort(-1).values
    best = logits_RV.gather(1, tokens_RN).sort(dim=-1, descending=True, stable=True)
    return best.values, tokens_RN.gather(1, best.indices)


class Draw:
    """The draws of some requests among their most probable tokens, in float64."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        samplings = [each.sampling for each in requests]
        self._heat_R1 = _heats(requests, device)
        self._draws_R1 = _uniforms(requests, device)
        self._top_k_R1 = _column([float(each.top_k) or torch.inf for each in samplings], device)
        self._min_p_R1 = _column([each.min_p for each in samplings], device)
        self._top_p_R1 = _column([each.top_p for each in samplings], device)

    def weights(self, logits_RV: Tensor) -> Tensor:
        """Probabilities relative to the best token's, float32; 0 where `min_p` cuts them off."""
        best_R1 = logits_RV.max(-1, keepdim=True).values
        weights_RV = ((logits_RV - best_R1) / self._heat_R1).exp_()
        return weights_RV.mul_(weights_RV >= self._min_p_R1)

    def among(
        self, logits_RN: Tensor, tokens_RN: Tensor, sums_R1: Tensor, *, is_all: bool
    ) -> tuple[list[int], list[bool]]:
        """A token per row, and whether no other candidates could have changed it.

        Args:
            logits_RN, tokens_RN: the best of each row, in order.
            sums_R1: of `weights` over the vocabulary; infinite where they are not known.
            is_all: whether these are all tokens.
        """
        num = logits_RN.shape[1]
        wide_RN = logits_RN.double()
        weights_RN = ((wide_RN - wide_RN[:, :1]) / self._heat_R1).exp_()
        inside_RN = weights_RN >= self._min_p_R1
        closed_R1 = ~inside_RN[:, -1:] | (self._top_k_R1 <= num) | is_all
        inside_RN &= torch.arange(num, device=logits_RN.device) < self._top_k_R1
        weights_RN *= inside_RN
        reached_RN = weights_RN.cumsum(-1)
        wanted_R1 = self._top_p_R1 * torch.where(closed_R1, reached_RN[:, -1:], sums_R1)
        # the nucleus is only right when its sum is: top_k cuts it to what lies among these
        closed_R1 |= (reached_RN[:, -1:] >= wanted_R1) & self._top_k_R1.isinf()
        nucleus_RN = weights_RN * (reached_RN - weights_RN < wanted_R1)
        nucleus_RN[:, 0] = weights_RN[:, 0]  # the best one always stays
        places = _invert(nucleus_RN, self._draws_R1)
        places_R1 = torch.tensor(places, device=tokens_RN.device)[:, None]
        return tokens_RN.gather(1, places_R1).flatten().tolist(), closed_R1.flatten().tolist()


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _heats(requests: Sequence[Request], device: torch.device) -> Tensor:
    heats = [max(each.sampling.temperature, _COLDEST) for each in requests]
    return torch.tensor(heats, dtype=torch.float32, device=device)[:, None]


def _uniforms(requests: Sequence[Request], device: torch.device) -> Tensor:
    return _column([uniform(each.sampling.seed, len(each.tokens)) for each in requests], device)


def _invert(weights_RN: Tensor, draws_R1: Tensor) -> list[int]:
    """First place at which the running sum exceeds draw * total; never one of weight 0."""
    sums_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    total_R1 = sums_RN[:, -1:]
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    wanted_R1 = torch.minimum(draws_R1 * total_R1, below_R1)
    places_R1 = torch.searchsorted(sums_RN, wanted_R1, right=True)
    # beyond the end: a model that gave no numbers
    return places_R1.clamp_(max=weights_RN.shape[1] - 1).flatten().tolist()
