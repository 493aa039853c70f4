"""The words of `--rl`: what a step of reinforcement learning has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.cost.answer_lengths import SPREAD, AnswerLengths
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.rl_step import RlWork
from phalanx.errors import JobError, nearest_names, shown

_LIMIT_TIMES = 4.0  # of the mean answer, where no limit is named
_WEIGHT_BYTES = 2
_MOST = 10_000_000
_WHOLE = {
    "prompts": (1, "of a step"),
    "samples": (1, "answers to each prompt"),
    "prompt": (1, "mean tokens of a prompt"),
    "answer": (1, "mean tokens of an answer"),
    "limit": (1, "where an answer is cut off"),
    "updates": (1, "optimizer steps of a step"),
    "passes": (0, "forward passes over all answers before training"),
    "behind": (0, "steps that answers may be behind, with two pools"),
}
_DEFAULTS = {"samples": 1, "updates": 1, "passes": 2, "behind": 1}


@dataclass(frozen=True)
class RlAsked:
    """What a user asked for.

    Attributes:
        num_prompts, samples: of a step, and answers to each.
        prompt_tokens: on average; lengths: of answers.
        updates: optimizer steps of a step.
        score_passes: forward passes over all answers before training.
        staleness: steps that answers may be behind, of two pools.
    """

    num_prompts: int
    samples: int
    prompt_tokens: int
    lengths: AnswerLengths
    updates: int
    score_passes: int
    staleness: int

    @property
    def num_answers(self) -> int:
        """Of a step."""
        return self.num_prompts * self.samples

    def work(self, shape: ModelShape) -> RlWork:
        """For a model, all of whose weights are trained."""
        return RlWork(
            num_answers=self.num_answers,
            answers_per_update=self.num_answers // self.updates,
            prompt_tokens=float(self.prompt_tokens),
            lengths=self.lengths,
            weights_bytes=float(_WEIGHT_BYTES * shape.num_params),
            num_trained=float(shape.num_params),
            score_passes=self.score_passes,
            staleness=self.staleness,
        )


def rl_asked(text: str) -> RlAsked:
    """ "prompts=512,samples=16,prompt=200,answer=5700"; the others have defaults.

    Raises:
        JobError: `job/syntax` for what is no list of key=value or names one twice,
            `job/unknown-key`, `job/missing`, `job/bad-value` for a number out of range or answers
            that do not divide into updates.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key in found:
            rule = "is named twice" if equals else "must be key=value, separated by commas"
            legal = ["prompts=512,samples=16,prompt=200,answer=5700"]
            raise JobError("job/syntax", "--rl", shown(part), rule, legal=legal)
        if key != "spread" and key not in _WHOLE:
            legal = nearest_names(key, [*_WHOLE, "spread"]) or [*_WHOLE, "spread"]
            raise JobError(
                "job/unknown-key", f"--rl {shown(key)}", None, "no such key", legal=legal
            )
        found[key] = _spread(value) if key == "spread" else _whole(key, value)
    for key in ("prompts", "prompt", "answer"):
        if key not in found:
            raise JobError("job/missing", f"--rl {key}", None, f"is needed: {_WHOLE[key][1]}")
    given = _DEFAULTS | found
    answers = given["prompts"] * given["samples"]
    if answers > _MOST or answers % given["updates"]:
        rule = (
            f"answers must be at most {_MOST:,}"
            if answers > _MOST
            else (f"must divide the {answers:,} answers of a step")
        )
        key = "prompts" if answers > _MOST else "updates"
        raise JobError("job/bad-value", f"--rl {key}", given[key], rule)
    limit = float(given.get("limit", _LIMIT_TIMES * given["answer"]))
    return RlAsked(
        num_prompts=given["prompts"],
        samples=given["samples"],
        prompt_tokens=given["prompt"],
        lengths=AnswerLengths(float(given["answer"]), limit, given.get("spread", SPREAD)),
        updates=given["updates"],
        score_passes=given["passes"],
        staleness=given["behind"],
    )


def _whole(key: str, text: str) -> int:
    low, meaning = _WHOLE[key]
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_MOST)):
        rule = f"must be a whole number ({meaning})"
        raise JobError("job/bad-value", f"--rl {key}", shown(text), rule)
    value = int(text)
    if not low <= value <= _MOST:
        rule = f"must be from {low} to {_MOST:,} ({meaning})"
        raise JobError("job/bad-value", f"--rl {key}", value, rule, legal=[low])
    return value


def _spread(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        rule = "must be a number: the standard deviation of the logarithm of lengths"
        raise JobError("job/bad-value", "--rl spread", shown(text), rule, legal=[SPREAD]) from None
