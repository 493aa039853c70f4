"""A vocabulary head whose hidden states are logits, and requests that ask for draws from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from hypothesis import strategies as st

from phalanx.engines.serve.draws import best_of
from phalanx.engines.serve.settings import Request, Sampling

logit = st.integers(-12, 12).map(lambda each: each / 2)


@dataclass
class Head:
    """A vocabulary head whose hidden states are the logits; says which path was taken."""

    vocab_size: int
    eos_tokens: tuple[int, ...] = ()
    taken: tuple[str, ...] = ()

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.vocab_size, eos_tokens=self.eos_tokens)

    def logits(self, hidden):
        self.taken += ("logits",)
        return hidden

    def greedy(self, hidden):
        self.taken += ("greedy",)
        best = hidden.max(-1)
        return best.indices, best.values

    def best(self, hidden, num):
        self.taken += ("best",)
        return best_of(hidden, num)


def rows_of(sampling: Sampling, num: int, tokens: tuple[int, ...] = (1,)) -> list[Request]:
    """Requests that differ in their seeds."""
    return [
        Request(i, list(tokens), len(tokens), replace(sampling, seed=sampling.seed + i))
        for i in range(num)
    ]
