"""Seconds of a step of reinforcement learning: answers, log-probabilities, training, new weights.

Symbols: B answers of a step, E engines, R = B / E answers of each, K requests whose caches fit an
engine, S(t) the share of answers longer than t tokens, L the longest of B, m their mean, h(r, x)
seconds of a decoding step with r requests of x tokens, s steps that answers may be behind.

    rollout    prompts + (R - K)^+ m / K * h(K, n + m / 2) + integral_0^L h(max(min(R, K) S(t), 1),
               n + t) dt: while requests wait, as many run as fit; then they end one by one, and the
               engine that has the longest one decodes it to its end
    behind     max(work, tail / (s + 1)) with work = R m / K h(K, ..): with answers of s steps in
               flight, the tail of one step runs beside the start of the next
    one pool   rollout + log-probabilities + training + weights + states to the host and back
    two pools  max(rollout, log-probabilities + training) + weights

Sources: HybridFlow (arXiv 2409.19256), section 6 (phases of a pool add up, pools run side by side);
RollPacker (arXiv 2509.21009), section 2 (the longest answer binds). Differences: a law of lengths
instead of a measured mix; tools, judges and sandboxes take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.answer_lengths import AnswerLengths
from phalanx.cost.bars import Bar
from phalanx.cost.rl_efficiency import RlEfficiency
from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_steady import Loads, running_limit
from phalanx.cost.serving_step import Rates, decode_s, prefill_s
from phalanx.cost.training_step import StepTimes
from phalanx.cost.weight_sync import sync_s
from phalanx.hardware import Machine

_POINTS = 48  # of the integral over the tail
_HOST_LINK_BYTES_PER_S = 25e9  # assumption: PCIe 4.0 x16
_STATE_BYTES = 12.0  # of a trained element: float32 weight and moments
_FORWARD_SHARE = 1.0 / 3.0  # of a step without recomputation


@dataclass(frozen=True)
class Rollout:
    """Of N generation plans, seconds [N].

    Attributes:
        total_s: from the first prompt to the longest answer.
        work_s: what the same tokens take when every engine is always full.
        running: requests of an engine at the start.
    """

    total_s: np.ndarray
    work_s: np.ndarray
    running: np.ndarray

    def behind_s(self, staleness: int) -> np.ndarray:
        """Of a step when answers may be `staleness` steps behind."""
        if staleness == 0:
            return self.total_s
        return np.maximum(self.work_s, self.total_s / (staleness + 1))


def rollout(
    plans: ServingPlans,
    rates: Rates,
    *,
    num_engines: Any,
    num_answers: int,
    prompt_tokens: float,
    lengths: AnswerLengths,
) -> Rollout:
    """Price the answers of a step.

    Args:
        num_engines: E, of each plan.
        num_answers: B, of all prompts together.
        prompt_tokens: n, on average.
    """
    each = np.maximum(num_answers / np.asarray(num_engines, dtype=float), 1.0)
    one = np.ones_like(plans.tensor)
    mean = lengths.mean_tokens * one
    loads = Loads(prompt_tokens=prompt_tokens * one, answer_tokens=mean, concurrency=each * one)
    running = np.minimum(each, running_limit(plans, loads))
    replicas = plans.attention_dp

    def token_s(rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        return (
            decode_s(plans, np.maximum(rows / replicas, 1.0), context, rates)
            * rates["decode_level"]
        )

    prompts_s = _prompts_s(plans, rates, each, prompt_tokens)
    full_s = token_s(running, prompt_tokens + mean / 2.0)
    waiting_s = np.maximum(each - running, 0.0) * mean / running * full_s
    longest = lengths.longest_of(num_answers)
    edges = np.linspace(0.0, longest, _POINTS + 1)
    middles = (edges[1:] + edges[:-1]) / 2.0
    tail_s = np.zeros_like(full_s)
    for at, alive in zip(middles, lengths.alive_after(middles)):
        rows = np.maximum(running * alive, 1.0)
        tail_s += token_s(rows, (prompt_tokens + at) * one) * (longest / _POINTS)
    work_s = prompts_s + each * mean / running * full_s
    return Rollout(prompts_s + waiting_s + tail_s, work_s, running)


def _prompts_s(
    plans: ServingPlans, rates: Rates, each: np.ndarray, prompt_tokens: float
) -> np.ndarray:
    """Of all prompts of an engine, in chunks."""
    tokens = prompt_tokens * np.ones_like(plans.tensor)
    batch = np.clip(rates["chunk_tokens"] / tokens, 1.0, np.maximum(each / plans.attention_dp, 1.0))
    chunks = each / plans.attention_dp / batch
    seconds = prefill_s(plans, tokens, batch, rates) * rates["prefill_level"]
    return np.asarray(seconds * np.maximum(chunks, 1.0) / plans.pipeline)


def forward_s(times: StepTimes) -> np.ndarray:
    """One forward pass over the tokens of a step, as log-probabilities need it."""
    parts = times.parts
    once = sum(parts.get(name, 0.0) for name in ("recompute", "data", "optimizer"))
    return np.asarray((times.total_s - once) * _FORWARD_SHARE)


@dataclass(frozen=True, kw_only=True)
class RlWork:
    """What a step has to do, wherever it is done.

    Attributes:
        num_answers: of all prompts together.
        answers_per_update: of one optimizer step.
        prompt_tokens: on average.
        lengths: of answers.
        weights_bytes: of one copy in 16 bits.
        num_trained: elements with a gradient.
        score_passes: forward passes over all answers before training: of the policy itself, and of
            a reference where there is one.
        staleness: steps that answers may be behind; 0: on policy.
    """

    num_answers: int
    answers_per_update: int
    prompt_tokens: float
    lengths: AnswerLengths
    weights_bytes: float
    num_trained: float
    score_passes: int = 2
    staleness: int = 0

    @property
    def num_updates(self) -> float:
        """Optimizer steps of one step."""
        return self.num_answers / self.answers_per_update

    @property
    def tokens(self) -> float:
        """Prompts and answers."""
        return self.num_answers * (self.prompt_tokens + self.lengths.mean_tokens)


@dataclass(frozen=True, kw_only=True)
class RlStep:
    """One step, in seconds.

    Attributes:
        generation_s: of a step that is as much behind as allowed.
        scoring_s, training_s, weights_s: log-probabilities, updates, new weights for the engines.
        states_s: moments to the host and back, of one pool.
        is_colocated: whether one pool does all in turn.
        bar: least and most, over expected.
    """

    generation_s: float
    scoring_s: float
    training_s: float
    weights_s: float
    states_s: float
    is_colocated: bool
    bar: tuple[float, float]

    @property
    def total_s(self) -> float:
        """Of the step."""
        if self.is_colocated:
            return self.generation_s + self.learning_s + self.weights_s + self.states_s
        return max(self.generation_s, self.learning_s) + self.weights_s

    @property
    def learning_s(self) -> float:
        """Log-probabilities and updates."""
        return self.scoring_s + self.training_s

    @property
    def total(self) -> Bar:
        """With its 90 % bar."""
        return Bar(self.total_s, self.total_s * self.bar[0], self.total_s * self.bar[1])

    @property
    def binds(self) -> str:
        """What takes most."""
        parts = {
            "generation": self.generation_s,
            "learning": self.learning_s,
            "weights": self.weights_s,
        }
        return max(parts, key=lambda name: parts[name])


def rl_steps(
    work: RlWork,
    machine: Machine,
    plans: ServingPlans,
    answers: Rollout,
    update: StepTimes,
    *,
    devices: int,
    is_colocated: bool,
    efficiency: RlEfficiency,
) -> Sequence[RlStep]:
    """A step for each of N generation plans beside one training plan.

    Args:
        plans: of generation.
        answers: their `rollout`.
        update: seconds of one update of `work.answers_per_update` answers, one row.
        devices: of the pool that trains.
        is_colocated: generation runs on the same devices.
    """
    slow = efficiency.learning_factor * work.num_updates
    packed = efficiency.packed_bytes_per_s * (1.0 if is_colocated else efficiency.apart_factor)
    weights = sync_s(work.weights_bytes, machine, plans.devices, packed)
    generation = answers.behind_s(0 if is_colocated else work.staleness)
    states = 2.0 * work.num_trained * _STATE_BYTES / devices / _HOST_LINK_BYTES_PER_S
    return [
        RlStep(
            generation_s=float(generation[at]),
            scoring_s=slow * work.score_passes * float(forward_s(update)[0]),
            training_s=slow * float(update.total_s[0]),
            weights_s=float(weights[at]),
            states_s=states if is_colocated else 0.0,
            is_colocated=is_colocated,
            bar=(efficiency.low, efficiency.high),
        )
        for at in range(len(generation))
    ]
