"""Where and how a step of reinforcement learning runs best: one pool for all, or one for each half.

One pool generates and learns in turn, on policy. Two pools work side by side on answers that are
some steps behind; how many devices each gets is searched. Generation and training each take the
plan that is fastest for them (`cost.serving_step`, `cost.training_step`); these plans are prices,
for `phalanx train` learns from data files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.bars import Bar
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.rl_efficiency import rl_efficiency
from phalanx.cost.rl_step import RlStep, RlWork, rl_steps, rollout
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import ServingPlans, serving_plans
from phalanx.cost.serving_step import kv_room_tokens
from phalanx.cost.training_plans import COLUMNS, SCHEDULES, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.hardware import Cluster
from phalanx.planner.answers import PricedPlan, priced_plan
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.rl_words import RlAsked
from phalanx.planner.search import PROVEN_SCHEDULES, TIGHT_COSTS
from phalanx.planner.sized import limit_of, sized_plans
from phalanx.planner.training import Training

SOFTWARE = "megatron"
ENGINE = "vllm"
_EIGHTHS = 8  # of a cluster, in which two pools share it
_MOST_TENSOR = 64


@dataclass(frozen=True, kw_only=True)
class RlPlan:
    """A step and how it is done.

    Attributes:
        serving_tensor, num_engines: of generation.
        training: plan of an update.
        train_devices, serving_devices: of the pools; the same devices where one does all.
        longest_tokens: that the longest answer is expected to have.
    """

    step: RlStep
    serving_tensor: int
    num_engines: int
    training: PricedPlan
    train_devices: int
    serving_devices: int
    longest_tokens: float

    def describe(self) -> str:
        """In a line."""
        plural = "" if self.num_engines == 1 else "s"
        engines = f"{self.num_engines} engine{plural} of {self.serving_tensor}"
        if self.step.is_colocated:
            return f"one pool: {engines}, then {self.training.sized.describe()}"
        return (
            f"two pools: {self.serving_devices} devices answer ({engines}), "
            f"{self.train_devices} learn ({self.training.sized.describe()})"
        )


@dataclass(frozen=True)
class RlAnswer:
    """What a cluster can do for a step of reinforcement learning.

    Attributes:
        one_pool, two_pools: the best of each; None where none fits.
        work: of a step.
    """

    asked: AskedCluster
    one_pool: RlPlan | None
    two_pools: RlPlan | None
    work: RlWork

    @property
    def plans(self) -> Sequence[RlPlan]:
        """Those that fit, fastest first."""
        found = [each for each in (self.one_pool, self.two_pools) if each is not None]
        return sorted(found, key=lambda plan: plan.step.total_s)

    @property
    def fits(self) -> bool:
        """Whether the cluster holds the model in both roles."""
        return bool(self.plans)

    def tokens_per_s(self, plan: RlPlan) -> float:
        """Of prompts and answers, of a device."""
        return self.work.tokens / plan.step.total_s / self.asked.cluster.num_devices

    def dollars(self, plan: RlPlan) -> Bar:
        """Of a step; infinite where no price is known."""
        cluster = self.asked.cluster
        return plan.step.total * (cluster.num_devices * cluster.machine.usd_per_h / 3600.0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bars as [expected, least, most]."""
        return {
            "cluster": str(self.asked.cluster),
            "fits": self.fits,
            "plans": [self._table(plan) for plan in self.plans],
        }

    def _table(self, plan: RlPlan) -> dict[str, Any]:
        step, priced = plan.step, self.asked.cluster.machine.price is not None
        return {
            "pools": 1 if step.is_colocated else 2,
            "step_s": list(step.total),
            "generation_s": step.generation_s,
            "scoring_s": step.scoring_s,
            "training_s": step.training_s,
            "weights_s": step.weights_s,
            "states_s": step.states_s,
            "binds": step.binds,
            "serving_tensor": plan.serving_tensor,
            "engines": plan.num_engines,
            "serving_devices": plan.serving_devices,
            "train_devices": plan.train_devices,
            "training_plan": dict(plan.training.sized.row),
            "longest_answer_tokens": plan.longest_tokens,
            "tokens_per_s_per_device": self.tokens_per_s(plan),
            "dollars": list(self.dollars(plan)) if priced else None,
        }


def rl_answer(
    shape: ModelShape, rl: RlAsked, asked: AskedCluster, *, precision: str = "bf16"
) -> RlAnswer:
    """The best plans of a cluster with one pool and with two.

    Args:
        precision: of products in generation and training.
    """
    search = _Search(shape, rl, precision)
    whole = asked.cluster
    one = search.best(whole, whole, is_colocated=True)
    return RlAnswer(asked, one, search.two_pools(whole), search.work)


def _learning_devices(cluster: Cluster, eighth: int) -> int:
    """So many eighths of a cluster, in whole nodes where it has several; 0 or all: no split."""
    node = min(cluster.machine.devices_per_domain, 8)
    unit = node if cluster.num_devices >= 2 * node else 1
    return round(cluster.num_devices * eighth / _EIGHTHS / unit) * unit


def _fastest(plans: Iterable[RlPlan | None]) -> RlPlan | None:
    return min(
        (each for each in plans if each is not None),
        key=lambda plan: plan.step.total_s,
        default=None,
    )


def _fastest_update(training: Training, cluster: Cluster) -> PricedPlan | None:
    """By formula, of the schedules that published runs stand behind; plans whose memory may not
    suffice come last. (`search.answer` would play the best pipelines too: seconds for every pool.)
    """
    limit = limit_of(cluster, 0.0)
    sized = sized_plans(training, cluster, limit)
    known = [SCHEDULES.index(name) for name in PROVEN_SCHEDULES]
    is_known = (sized.table["pipeline"] == 1) | np.isin(sized.table["schedule"], known)
    at = np.flatnonzero((sized.memory.peak_bytes <= limit) & is_known)
    if not len(at):
        return None
    times = training_step(training.shape, sized.plans, cluster.machine)
    tight = np.where(sized.memory.high_bytes[at] > limit, TIGHT_COSTS, 1.0)
    best = int(at[np.argmin(times.total_s[at] * tight)])
    return priced_plan(sized.at(best), times, best)


class _Search:
    """Plans of one model and one kind of work; training plans are remembered by pool."""

    def __init__(self, shape: ModelShape, rl: RlAsked, precision: str) -> None:
        self.shape, self.rl, self.precision = shape, rl, precision
        self.work = rl.work(shape)
        self._updates: dict[Cluster, PricedPlan | None] = {}

    def best(self, learning: Cluster, answering: Cluster, *, is_colocated: bool) -> RlPlan | None:
        """The fastest generation plan beside the fastest training plan; None where one is not."""
        update, plans = self._update(learning), self._engines(answering)
        if update is None or plans is None:
            return None
        num_engines = answering.num_devices // plans.devices
        answers = rollout(
            plans,
            serving_efficiency().rates(plans),
            num_engines=num_engines,
            num_answers=self.work.num_answers,
            prompt_tokens=self.work.prompt_tokens,
            lengths=self.work.lengths,
        )
        times = training_step(self.shape, self._table(update.sized.row), learning.machine)
        steps = rl_steps(
            self.work, learning.machine, plans, answers, times,
            devices=learning.num_devices, is_colocated=is_colocated, efficiency=rl_efficiency(),
        )  # fmt: skip
        at = min(range(len(steps)), key=lambda each: steps[each].total_s)
        return RlPlan(
            step=steps[at],
            serving_tensor=int(plans.tensor[at]),
            num_engines=int(num_engines[at]),
            training=update,
            train_devices=learning.num_devices,
            serving_devices=answering.num_devices,
            longest_tokens=self.work.lengths.longest_of(self.work.num_answers),
        )

    def two_pools(self, whole: Cluster) -> RlPlan | None:
        """The best split: quarters first, then the eighths beside the best of them."""
        found: dict[int, RlPlan | None] = {}

        def try_eighth(eighth: int) -> None:
            learning = _learning_devices(whole, eighth)
            if 0 < learning < whole.num_devices and learning not in found:
                pools = (
                    Cluster(whole.machine, learning),
                    Cluster(whole.machine, whole.num_devices - learning),
                )
                found[learning] = self.best(*pools, is_colocated=False)
                eighth_of[learning] = eighth

        eighth_of: dict[int, int] = {}
        for eighth in (2, 4, 6):
            try_eighth(eighth)
        best = _fastest(found.values())
        near = eighth_of[best.train_devices] if best is not None else _EIGHTHS - 2
        for eighth in (near - 1, near + 1):
            try_eighth(eighth)
        return _fastest(found.values())

    def _update(self, cluster: Cluster) -> PricedPlan | None:
        if cluster not in self._updates:
            tokens = self.rl.prompt_tokens + round(self.work.lengths.mean_tokens)
            training = Training(
                known_shape=self.shape,
                seq_tokens=tokens,
                batch_tokens=tokens * self.work.answers_per_update,
                method="full",
                epochs=0,
                steps=1,
                precision=self.precision,
                software=SOFTWARE,
            )
            self._updates[cluster] = _fastest_update(training, cluster)
        return self._updates[cluster]

    def _table(self, row: Mapping[str, float]) -> TrainingPlans:
        columns: dict[str, Any] = {name: np.array([row[name]]) for name in COLUMNS}
        scalars = {"method": "full", "precision": self.precision, "software": SOFTWARE}
        return TrainingPlans(**columns | scalars)

    def _engines(self, cluster: Cluster) -> ServingPlans | None:
        """Engines of 1, 2, 4 ... devices that hold the model and one answer of full length."""
        most = min(cluster.num_devices, _MOST_TENSOR)
        degrees = [float(1 << power) for power in range(most.bit_length())]
        plans = serving_plans(
            self.shape, cluster.machine, tensor=degrees, precision=self.precision, software=ENGINE
        )
        longest = self.work.prompt_tokens + self.work.lengths.limit_tokens
        fits = kv_room_tokens(plans, longest) >= longest
        return plans.take(fits) if fits.any() else None
