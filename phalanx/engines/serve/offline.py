"""Tokens in, tokens out, in this process: for evaluation and reinforcement learning.

    engine = make_engine(ServeSettings(folder=folder, scheduler="continuous"))
    for step in range(num_steps):
        rollouts = generate(engine, prompts, Sampling(max_new=64, temperature=1.0, num_logprobs=0))
        ...                                                # train on tokens, scores and versions
        engine.update_weights(trainer_tensors, f"policy@{step + 1}")      # in place

Every token comes with the version of the weights that chose it, so that a trainer can correct for
tokens of older ones. Weights change between two steps: after `generate`, or inside it through
`between`, where live requests go on with the cache they have (`ServeEngine.update_weights`).

The same over HTTP or from another process: `EngineClient.submit` gives token, score and version of
one request as they come, `/v1/completions` takes token ids and returns them with
`return_token_ids`; weights then come from a folder (`update_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.drive import drive
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.settings import Request, Sampling, TokenScore
from phalanx.engines.serve.step import StepResult
from phalanx.engines.serve.world import Cancel, EngineWorld
from phalanx.errors import PhalanxError
from phalanx.registry import build

Between = Callable[[ServeEngine], None]


@dataclass(slots=True)
class Generated:
    """The output of one prompt, one element per token.

    Attributes:
        tokens: ids, the one that ended it included.
        scores: log probability and best candidates of each, where `num_logprobs` asks for them.
        weight_versions: of the weights that chose it.
        reason: "stop" or "length".
        prompt_scores: of the prompt's tokens from the second on, where asked for.
    """

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    reason: str = ""
    prompt_scores: Sequence[TokenScore] = ()


def generate(
    engine: ServeEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    adapter: str = "",
    scheduler: str | Mapping[str, Any] = "continuous",
    between: Between | None = None,
) -> list[Generated]:
    """Outputs of all prompts, in their order; batched as the scheduler decides.

    Args:
        engine: without live requests.
        prompts: token ids each.
        sampling: of every prompt; the i-th draws with `seed` + i.
        adapter: loaded adapter that computes them; "": the base.
        scheduler: policy of the family "serve": a name, or a table with its options.
        between: called between two steps.

    Raises:
        JobError: as `ServeEngine.add`; nothing is left in the engine then.
        WorldError: `serve/asleep`.
    """
    requests = [
        Request(i, list(each), len(each), replace(sampling, seed=sampling.seed + i), adapter)
        for i, each in enumerate(prompts)
    ]
    inbox = _Prompts(engine, requests, between)
    try:
        drive(EngineWorld(engine, inbox), reacts=[build("serve", scheduler, "plan.serve")])
    finally:
        for each in requests:
            engine.cancel(each.id)
    return inbox.generated


class _Prompts:
    """All prompts at once; closes when nothing is left to compute."""

    def __init__(
        self, engine: ServeEngine, requests: Sequence[Request], between: Between | None
    ) -> None:
        self._engine, self._between = engine, between
        self._waiting = list(requests)
        self.generated = [Generated() for _ in requests]

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        if self._between is not None:
            self._between(self._engine)
        found: list[Request | Cancel] = [*self._waiting]
        self._waiting = []
        return None if wait and not found else found

    def deliver(self, result: StepResult) -> None:
        for each in result.outputs:
            generated = self.generated[each.request]
            generated.tokens.append(each.token)
            generated.scores.append(each.score)
            generated.weight_versions.append(each.weight_version)
            generated.reason = each.reason
            if each.prompt_scores is not None:
                generated.prompt_scores = each.prompt_scores

    def refuse(self, request: int, error: PhalanxError) -> None:
        raise error
