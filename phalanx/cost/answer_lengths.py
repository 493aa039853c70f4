"""How long the answers of a model are: a lognormal law that ends at a limit.

X = min(exp(mu + sigma Z), c), Z standard normal. With F the normal distribution function,

    E[X] = exp(mu + sigma^2 / 2) F((ln c - mu - sigma^2) / sigma) + c F((mu - ln c) / sigma)
    S(t) = P(X > t) = F((mu - ln t) / sigma) for t < c, else 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from phalanx.errors import JobError

# of the logarithm. RollPacker (arXiv 2509.21009): the longest of a batch is 25 to 32 times the
# median; of 1,024 answers the longest lies 3.1 deviations above it, and exp(3.1 sigma) = 28
SPREAD = 1.07
_NORMAL = NormalDist()
_ROUNDS = 80  # of halving
_LEAST_SPREAD, _MOST_SPREAD = 1e-3, 4.0  # below, answers are all alike


@dataclass(frozen=True)
class AnswerLengths:
    """Lengths of answers in tokens.

    Attributes:
        mean_tokens: of all answers, those that end at the limit included.
        limit_tokens: c, where generation stops.
        spread: sigma, the standard deviation of the logarithm of answers without a limit; 0: all
            alike.
    """

    mean_tokens: float
    limit_tokens: float
    spread: float = SPREAD

    def __post_init__(self) -> None:
        if not 0.0 < self.mean_tokens <= self.limit_tokens < math.inf:
            rule = f"must lie in 0 < tokens <= {self.limit_tokens:g}, the limit of an answer"
            raise JobError("job/bad-value", "mean answer", self.mean_tokens, rule)
        if not 0.0 <= self.spread <= _MOST_SPREAD:
            rule = f"must lie in 0 <= spread <= {_MOST_SPREAD:g}"
            raise JobError("job/bad-value", "spread", self.spread, rule, legal=[SPREAD])

    @property
    def _is_fixed(self) -> bool:
        return self.spread < _LEAST_SPREAD or self.mean_tokens == self.limit_tokens

    @cached_property
    def location(self) -> float:
        """mu, for which the mean is as given."""
        low = math.log(self.mean_tokens) - self.spread**2 - 1.0
        high = math.log(self.limit_tokens) + 20.0 * max(self.spread, 0.1)
        for _ in range(_ROUNDS):
            middle = 0.5 * (low + high)
            if self._mean_at(middle) < self.mean_tokens:
                low = middle
            else:
                high = middle
        return 0.5 * (low + high)

    def _mean_at(self, mu: float) -> float:
        sigma, end = self.spread, math.log(self.limit_tokens)
        below = _NORMAL.cdf((end - mu - sigma**2) / sigma)
        part = math.exp(min(mu + sigma**2 / 2.0, 700.0)) * below if below > 0.0 else 0.0
        return part + self.limit_tokens * _NORMAL.cdf((mu - end) / sigma)

    def longest_of(self, count: float) -> float:
        """Tokens that the longest of so many answers has in the middle of cases."""
        if self._is_fixed:
            return self.mean_tokens
        # the median of the largest of n has the n-th root of one half below it
        at = _NORMAL.inv_cdf(max(0.5 ** (1.0 / count), 1e-12)) if count < 1e12 else 7.0
        return min(math.exp(self.location + self.spread * at), self.limit_tokens)

    def alive_after(self, tokens: np.ndarray) -> np.ndarray:
        """Share of answers longer than each of `tokens`, S(t)."""
        if self._is_fixed:
            return np.where(tokens < self.mean_tokens, 1.0, 0.0)
        mu, sigma = self.location, self.spread
        z = (mu - np.log(np.maximum(tokens, 1e-9))) / sigma
        alive = np.array([_NORMAL.cdf(each) for each in np.ravel(z)]).reshape(np.shape(z))
        return np.where(tokens < self.limit_tokens, alive, 0.0)
