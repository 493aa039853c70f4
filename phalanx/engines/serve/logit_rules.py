"""What a request changes in its logits before a token is chosen: bias, bans, penalties.

In this order: `logit_bias` is added; tokens that would end the output before `min_new` tokens are
impossible; the repetition penalty divides positive and multiplies negative logits of all known
tokens (CTRL, arXiv 1909.05858, section 4.1, with its quotient turned round for negative ones);
presence and frequency penalties are subtracted from output tokens, as the OpenAI interface says.

Legend: V vocabulary, N distinct known tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.engines.serve.settings import Request, Sampling

_FIRST_ROOM = 256


def rules_of(request: Request, eos_tokens: Sequence[int]) -> LogitRules | None:
    """The rules that hold for the next token of a request; None when there are none."""
    sampling = request.sampling
    if not changes_logits(sampling) and request.num_new >= sampling.min_new:
        return None
    if request.rules is None:
        request.rules = LogitRules(sampling, eos_tokens)
    return request.rules


def changes_logits(sampling: Sampling) -> bool:
    """Whether there are rules for every token, not only for the first ones."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


class LogitRules:
    """The rules of one request with the counts that they need; a step counts only new tokens.

    Args:
        sampling: what was asked for.
        eos_tokens: of the model.
    """

    def __init__(self, sampling: Sampling, eos_tokens: Sequence[int]) -> None:
        self._sampling = sampling
        self._bias_ids = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([value for _, value in sampling.logit_bias])
        ends = () if sampling.ignore_eos else tuple(eos_tokens)
        self._ends = torch.tensor(sorted({*ends, *sampling.stop_tokens}), dtype=torch.long)
        self._known = _Known()

    def apply_(self, logits_V: Tensor, request: Request) -> None:
        """Change the logits in place.

        Args:
            logits_V: float32, of the next token.
            request: with all tokens so far; always the same one.
        """
        device, asked = logits_V.device, self._sampling
        if len(self._bias):
            logits_V.index_add_(0, self._bias_ids.to(device), self._bias.to(device))
        if request.num_new < asked.min_new and len(self._ends):
            logits_V[self._ends.to(device)] = -torch.inf
        has_repetition = asked.repetition_penalty != 1.0
        if not (has_repetition or asked.presence_penalty or asked.frequency_penalty):
            return
        self._known.read(request, with_prompt=has_repetition)
        tokens_N, counts_N = (part.to(device) for part in self._known.columns())
        own_N = logits_V[tokens_N]
        penalty = asked.repetition_penalty
        own_N = torch.where(own_N > 0, own_N / penalty, own_N * penalty)
        own_N -= asked.frequency_penalty * counts_N + asked.presence_penalty * (counts_N > 0)
        logits_V[tokens_N] = own_N


class _Known:
    """Distinct tokens of a request, and how often each stands in the output."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._tokens = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._counts = np.zeros(_FIRST_ROOM, dtype=np.float32)
        self._num_read = -1

    def read(self, request: Request, *, with_prompt: bool) -> None:
        """Count what came since the last time."""
        if self._num_read < 0:
            self._num_read = request.num_prompt
            if with_prompt:
                for token in request.tokens[: request.num_prompt]:
                    self._place_of(token)
        for token in request.tokens[self._num_read :]:
            self._counts[self._place_of(token)] += 1
        self._num_read = len(request.tokens)

    def columns(self) -> tuple[Tensor, Tensor]:
        """(tokens [N], occurrences in the output [N])."""
        num = len(self._place)
        return torch.from_numpy(self._tokens[:num]), torch.from_numpy(self._counts[:num])

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._tokens[place] = token
        return place
