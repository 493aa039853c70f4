"""The choice of the next token. Legend: R rows (requests), D model, V vocabulary, N candidates.

Every draw is a function of (seed, position in the request) alone, so neither companions in the
batch nor a preemption change it, and no generator has to be kept or moved. How a row is computed
depends on its own request alone, too: greedy rows and rows whose cut leaves few candidates
(`top_k`, or a `min_p` that the last candidate misses) never see whole logits. A nucleus (`top_p`)
alone needs the sum over the whole vocabulary, and with it whole logits; so do penalties, bias, bans
and log probabilities. The compiled head gives the same sums, bit for bit, either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.engines.serve.draws import NUM_CANDIDATES, Draw, draw_cut, draw_whole
from phalanx.engines.serve.logit_rules import LogitRules, rules_of
from phalanx.engines.serve.settings import Request, Sampling, TokenScore
from phalanx.models.spec import DecoderConfig


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
    scores: dict[int, TokenScore] = {}
    if many:
        logits_RV = model.logits(hidden_RD[many]).float()
        changed_RV = _under_rules(logits_RV, [rules[row] for row in many], requests, many)
        for row, token in zip(many, _from_logits(changed_RV, [requests[row] for row in many])):
            tokens[row] = token
        scores = _scores(logits_RV, many, requests, tokens)
    return [(token, scores.get(row)) for row, token in enumerate(tokens)]


def _under_rules(
    logits_RV: Tensor,
    rules: Sequence[LogitRules | None],
    requests: Sequence[Request],
    rows: Sequence[int],
) -> Tensor:
    """What tokens are chosen from; the model's own logits stay as they are."""
    if not any(rules):
        return logits_RV
    changed_RV = logits_RV.clone()
    for logits_V, rule, row in zip(changed_RV, rules, rows):
        if rule is not None:
            rule.apply_(logits_V, requests[row])
    return changed_RV


def _scores(
    logits_RV: Tensor, rows: Sequence[int], requests: Sequence[Request], tokens: Sequence[int]
) -> dict[int, TokenScore]:
    """Row -> score, of those among `rows` that ask for one."""
    num_best = {row: requests[row].sampling.num_logprobs for row in rows}
    at = [place for place, row in enumerate(rows) if num_best[row] is not None]
    if not at:
        return {}
    asked = [rows[place] for place in at]
    most = max(num_best[row] or 0 for row in asked)
    return dict(zip(asked, score(logits_RV[at], [tokens[row] for row in asked], most)))


def _is_of_few(sampling: Sampling) -> bool:
    """Whether the best candidates may be enough."""
    is_cut = 0 < sampling.top_k <= NUM_CANDIDATES or sampling.min_p > 0
    return sampling.num_logprobs is None and (sampling.temperature <= 0 or is_cut)


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
    draw = Draw([asked[at] for at in drawn], hidden_RD.device)
    unknown_R1 = torch.full((len(drawn), 1), torch.inf, device=hidden_RD.device)
    found, closed = draw.among(logits_RN[drawn], tokens_RN[drawn], unknown_R1, is_all=False)
    for at, token, is_closed in zip(drawn, found, closed):
        tokens[at] = token if is_closed else -1
    return tokens


def _from_logits(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    drawn = [row for row, each in enumerate(requests) if each.sampling.temperature > 0]
    # max finds the place several times faster than argmax on CPU
    is_any_greedy = len(drawn) < len(requests)
    tokens = logits_RV.max(-1).indices.tolist() if is_any_greedy else [0] * len(drawn)
    cut = [row for row in drawn if _is_cut(requests[row].sampling)]
    whole = [row for row in drawn if not _is_cut(requests[row].sampling)]
    for rows, draw in ((cut, draw_cut), (whole, draw_whole)):
        if rows:
            found = draw(logits_RV[rows], [requests[row] for row in rows])
            for row, token in zip(rows, found):
                tokens[row] = token
    return tokens


def _is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.min_p > 0 or sampling.top_p < 1


@torch.inference_mode()
def score(logits_RV: Tensor, tokens: Sequence[int], num_best: int) -> list[TokenScore]:
    """Log probability of each row's token, and the most probable tokens with theirs."""
    logp_RV = logits_RV.float().log_softmax(-1)
    index_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    own = logp_RV.gather(1, index_R1).flatten().tolist()
    best = logp_RV.topk(min(num_best, logits_RV.shape[1]))
    return list(zip(own, best.indices.tolist(), best.values.tolist()))
