"""What an engine is told to compute in one step, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.engines.serve.settings import TokenScore


class BatchPlan(Protocol):
    """What the engine reads of a plan; the policies of family "serve" make them."""

    requests: Sequence[int]
    num_draft: Sequence[int]
    adapter: Sequence[int]
    grammar: Sequence[int]
    preempted: Sequence[int]

    def rows(self) -> list[tuple[int, int, int]]:
        """(request, query_len, kv_len) per row."""
        ...

    def require_legal(self, max_running: int, max_step_tokens: int) -> None:
        """Raise `plan/illegal` unless an engine of these limits can carry it out."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """What a step gave one request.

    Attributes:
        token: the new output token.
        weight_version: of the weights that chose it, as "model@0" or "model@0+adapter@2".
        score: its probabilities, where asked for.
        reason: "stop" or "length" when it was the last, else "".
        prompt_scores: of the prompt's tokens from the second on, with the first output token.
    """

    request: int
    token: int
    weight_version: str
    score: TokenScore | None = None
    reason: str = ""
    prompt_scores: list[TokenScore] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        requests: in the order of the plan's rows.
        accepted: new output tokens of each; 0 while its prompt is not whole.
        outputs: the tokens.
        dur_s: how long it took.
    """

    requests: Sequence[int]
    accepted: Sequence[int]
    outputs: list[Output] = field(default_factory=list)
    dur_s: float = 0.0
