"""The choice of the next token. Legend: R rows (requests), D model, V vocabulary, N candidates.

Every draw is a function of (seed, position in the request) alone, so neither companions in the
batch nor a preemption change it, and no generator has to be kept or moved. How a row is computed
depends on its own request alone, too: greedy rows and rows whose cut leaves few candidates
(`top_k`, or a `min_p` that the last candidate misses) never see whole logits. A nucleus (`top_p`)
alone needs the sum over the whole vocabulary, and with it whole logits; so do penalties, bias and
bans.

Order of the cuts: temperature, min_p, top_k, top_p. All of them keep a run of the most probable
tokens, so a cut is a length; equal logits stand in the order of their ids.
Source of the nucleus: arXiv 1904.09751, section 3.1; of min_p: arXiv 2407.01082, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from phalanx.engines.serve.logit_rules import rules_of
from phalanx.engines.serve.settings import Request, Sampling, TokenScore
from phalanx.models.spec import DecoderConfig

NUM_CANDIDATES = 64
_MORE = 16  # times as many, while they do not suffice
_COLDEST = 1e-30  # float32 can divide by it


class VocabularyHead(Protocol):
    """What is read of a model. Equal logits: the lowest id comes first."""

    config: DecoderConfig

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Whole rows [R, V]."""
        ...

    def greedy(self, hidden_SD: Tensor) -> tuple[Tensor, Tensor]:
        """The best token of each row [R] and its logit [R]."""
        ...

    def best(self, hidden_SD: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The largest logits of each row [R, N] and their tokens [R, N], in order."""
        ...


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def choose(
    model: VocabularyHead, hidden_RD: Tensor, requests: Sequence[Request]
) -> list[tuple[int, TokenScore | None]]:
    """The next token of each row: the most probable one at temperature 0, else a draw.

    Args:
        hidden_RD: states after the last norm, one row per request.
        requests: with all tokens so far.

    Returns:
        Token and, where `num_logprobs` asks for it, its score under the model's own distribution:
        temperature, penalties and bias change what is chosen, not what is reported.
    """
    rules = [rules_of(each, model.config.eos_tokens) for each in requests]
    few = [r for r, each in enumerate(requests) if rules[r] is None and _is_of_few(each.sampling)]
    tokens = [-1] * len(requests)
    for row, token in zip(few, _from_candidates(model, hidden_RD, few, requests)):
        tokens[row] = token
    many = [row for row, token in enumerate(tokens) if token < 0]
    scored = [row for row, each in enumerate(requests) if each.sampling.num_logprobs is not None]
    whole = sorted({*many, *scored})
    if not whole:
        return [(token, None) for token in tokens]
    logits_RV = model.logits(hidden_RD[whole]).float()
    place = {row: at for at, row in enumerate(whole)}
    changed_RV = logits_RV[
        [place[row] for row in many]
    ]  # a copy: scores are of what the model gave
    for logits_V, row in zip(changed_RV, many):
        if (rule := rules[row]) is not None:
            rule.apply_(logits_V, requests[row])
    for row, token in zip(many, _from_logits(changed_RV, [requests[row] for row in many])):
        tokens[row] = token
    num_best = max((requests[row].sampling.num_logprobs or 0 for row in scored), default=0)
    scored_RV = logits_RV[[place[row] for row in scored]]
    scores = dict(zip(scored, score(scored_RV, [tokens[row] for row in scored], num_best)))
    return [(token, scores.get(row)) for row, token in enumerate(tokens)]


def _is_of_few(sampling: Sampling) -> bool:
    """Whether the best candidates may be enough."""
    is_cut = 0 < sampling.top_k <= NUM_CANDIDATES or sampling.min_p > 0
    return sampling.temperature <= 0 or is_cut


def _from_candidates(
    model: VocabularyHead, hidden_RD: Tensor, rows: Sequence[int], requests: Sequence[Request]
) -> list[int]:
    """Tokens of these rows; -1 where the candidates are not enough."""
    if not rows:
        return []
    hidden_rD, asked = hidden_RD[rows], [requests[row] for row in rows]
    drawn = [at for at, each in enumerate(asked) if each.sampling.temperature > 0]
    if not drawn:
        return model.greedy(hidden_rD)[0].tolist()
    num = min(NUM_CANDIDATES, model.config.vocab_size)
    logits_RN, tokens_RN = model.best(hidden_rD, num)
    tokens: list[int] = tokens_RN[:, 0].tolist()
    draw = _Draw([asked[at] for at in drawn], hidden_RD.device)
    unknown_R1 = torch.full((len(drawn), 1), torch.inf, device=hidden_RD.device)
    found, closed = draw.among(logits_RN[drawn], tokens_RN[drawn], unknown_R1, is_all=False)
    for at, token, is_closed in zip(drawn, found, closed):
        tokens[at] = token if is_closed else -1
    return tokens


def _from_logits(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    if not requests:
        return []
    drawn = [row for row, each in enumerate(requests) if each.sampling.temperature > 0]
    # max finds the place several times faster than argmax on CPU
    is_any_greedy = len(drawn) < len(requests)
    tokens = logits_RV.max(-1).indices.tolist() if is_any_greedy else [0] * len(drawn)
    cut = [row for row in drawn if _is_cut(requests[row].sampling)]
    whole = [row for row in drawn if not _is_cut(requests[row].sampling)]
    for rows, draw in ((cut, _draw_cut), (whole, _draw_whole)):
        if rows:
            found = draw(logits_RV[rows], [requests[row] for row in rows])
            for row, token in zip(rows, found):
                tokens[row] = token
    return tokens


def _is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.min_p > 0 or sampling.top_p < 1


def _draw_whole(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draws among all tokens, in the order of the vocabulary."""
    heat_R1 = _heats(requests, logits_RV.device)
    warm_RV = (logits_RV - logits_RV.max(-1, keepdim=True).values).div_(heat_R1)
    return _invert(warm_RV.softmax(-1), _uniforms(requests, logits_RV.device))


def _draw_cut(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    """Draws among the most probable tokens: as many candidates as it takes, and no more."""
    tokens, size = [0] * len(requests), logits_RV.shape[1]
    open_, num = list(range(len(requests))), NUM_CANDIDATES
    sums_R1: Tensor | None = None
    while open_:
        num = min(num, size)
        draw = _Draw([requests[row] for row in open_], logits_RV.device)
        logits_rV = logits_RV[open_]
        sums_r1 = draw.sums(logits_rV) if sums_R1 is None else sums_R1[open_]
        sums_R1 = sums_r1 if sums_R1 is None else sums_R1
        found, closed = draw.among(*best_of(logits_rV, num), sums_r1, is_all=num == size)
        for row, token in zip(open_, found):
            tokens[row] = token
        open_ = [row for row, is_closed in zip(open_, closed) if not is_closed]
        num *= _MORE
    return tokens


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


class _Draw:
    """The draws of some requests among their most probable tokens, in float64."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        samplings = [each.sampling for each in requests]
        self._heat_R1 = _heats(requests, device)
        self._draws_R1 = _uniforms(requests, device)
        self._top_k_R1 = _column([float(each.top_k) or torch.inf for each in samplings], device)
        self._min_p_R1 = _column([each.min_p for each in samplings], device)
        self._top_p_R1 = _column([each.top_p for each in samplings], device)

    def sums(self, logits_RV: Tensor) -> Tensor:
        """Weights of all tokens that `min_p` keeps, relative to the best one's [R, 1]."""
        best_R1 = logits_RV.max(-1, keepdim=True).values
        weights_RV = ((logits_RV - best_R1) / self._heat_R1).exp_()
        kept_RV = weights_RV * (weights_RV >= self._min_p_R1)
        return kept_RV.sum(-1, keepdim=True, dtype=torch.float64)

    def among(
        self, logits_RN: Tensor, tokens_RN: Tensor, sums_R1: Tensor, *, is_all: bool
    ) -> tuple[list[int], list[bool]]:
        """A token per row, and whether no other candidates could have changed it.

        Args:
            logits_RN, tokens_RN: the best of each row, in order.
            sums_R1: as `sums`; infinite where they are not known.
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


@torch.inference_mode()
def score(logits_RV: Tensor, tokens: Sequence[int], num_best: int) -> list[TokenScore]:
    """Log probability of each row's token, and the most probable tokens with theirs."""
    logp_RV = logits_RV.float().log_softmax(-1)
    index_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    own = logp_RV.gather(1, index_R1).flatten().tolist()
    best = logp_RV.topk(min(num_best, logits_RV.shape[1]))
    return list(zip(own, best.indices.tolist(), best.values.tolist()))
