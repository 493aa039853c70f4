"""The OpenAI completions interface: what a body may hold, what an answer looks like. No torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.engines.serve.settings import MAX_LOGPROBS, Sampling
from phalanx.errors import JobError, nearest_names

MAX_CHOICES = 128
_MAX_SEED = 2**63 - 1
# Parameters of the interface that this server does not compute: only these values are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
}
_WITHOUT_EFFECT = ("user", "store", "metadata")
_KNOWN = (
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream"),
    *("stream_options", "logprobs", "echo", "ignore_eos", "stop_token_ids", "return_token_ids"),
    *_NEUTRAL,
    *_WITHOUT_EFFECT,
)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request of `/v1/completions`.

    Attributes:
        prompts: texts or token ids; each gives `num_each` choices.
        stops: strings that end the output and are not part of it.
        wants_output: whether output tokens are part of the answer (max_tokens 0 with echo: not).
    """

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    num_each: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    wants_output: bool = True

    def sampling_of(self, choice: int) -> Sampling:
        """Choices of one prompt draw from different seeds."""
        return replace(self.sampling, seed=self.sampling.seed + choice % self.num_each)


def parse_completion(body: Any, served: str) -> Completion:
    """Read the body of a request.

    Args:
        body: what the JSON held.
        served: name of the model.

    Raises:
        JobError: `serve/request` naming the parameter.
    """
    if not isinstance(body, Mapping):
        raise _wrong("body", type(body).__name__, "must be a JSON object")
    for name, value in body.items():
        if name not in _KNOWN:
            raise _wrong(name, None, "no such parameter", nearest_names(name, _KNOWN))
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise _wrong(name, value, "is not supported by this server", _NEUTRAL[name][1:2])
    if body.get("model") not in (None, served):
        raise _wrong("model", body["model"], "is not served here", [served])
    echo, logprobs = _boolean(body, "echo"), _whole(body, "logprobs", None, 0, MAX_LOGPROBS)
    max_new = _whole(body, "max_tokens", 16, 0 if echo else 1, None)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, Mapping):
        raise _wrong("stream_options", stream_options, "must be an object")
    prompts, num_each = _prompts(body.get("prompt")), _whole(body, "n", 1, 1, MAX_CHOICES)
    if len(prompts) * num_each > MAX_CHOICES:
        number = len(prompts) * num_each
        raise _wrong("prompts times n", number, f"must be at most {MAX_CHOICES}", [MAX_CHOICES])
    return Completion(
        prompts=prompts,
        sampling=Sampling(
            max_new=max(1, max_new),
            temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
            top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
            seed=_seed(body),
            ignore_eos=_boolean(body, "ignore_eos"),
            stop_tokens=_ids(body.get("stop_token_ids") or (), "stop_token_ids"),
            num_logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        ),
        num_each=num_each,
        stops=_stops(body.get("stop")),
        stream=_boolean(body, "stream"),
        include_usage=_boolean(stream_options, "include_usage"),
        echo=echo,
        return_token_ids=_boolean(body, "return_token_ids"),
        wants_output=max_new > 0,
    )


def _wrong(where: str, value: object, rule: str, legal: Sequence[object] = ()) -> JobError:
    shown = None if value is None else repr(value)[:100]
    return JobError("serve/request", where, shown, rule, legal=legal)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "must be true or false")
    return bool(value)


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(name, value, f"must be a number in {low:g}..{high:g}")
    return float(value)


def _whole(
    body: Mapping[str, Any], name: str, default: int | None, low: int, high: int | None
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise _wrong(name, value, f"must be a whole number, at least {low}{upper}")
    return value


def _seed(body: Mapping[str, Any]) -> int:
    """The seed; without one every request draws differently."""
    seed = _whole(body, "seed", None, -_MAX_SEED, _MAX_SEED)
    return uuid.uuid4().int >> 65 if seed is None else seed


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _wrong("stop", value, "must be a text or a list of texts, none of them empty")
    return tuple(stops)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        raise _wrong(name, value, "must be a list of token ids")
    return tuple(value)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    rule = "must be a text, a list of token ids, or a list of these"
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", value, rule)
    if all(isinstance(each, int) for each in value):
        return (_ids(value, "prompt"),)
    if not all(isinstance(each, str | list) for each in value):
        raise _wrong("prompt", value, rule)
    return tuple(each if isinstance(each, str) else _ids(each, "prompt") for each in value)


# ---- answers -------------------------------------------------------------------------------------


def completion_head(model: str, weight_version: str) -> dict[str, Any]:
    """What all parts of one answer share; the fingerprint names the weights."""
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": weight_version,
    }


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    """Token counts of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def error_body(message: str, code: str, kind: str) -> dict[str, Any]:
    """An error as the official client reads it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
