"""What a request asks for, whichever route it came by; the completions interface. No torch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.engines.serve.parameters import (
    COMMON,
    MAX_CHOICES,
    SAMPLING,
    Table,
    boolean,
    num_logprobs,
    only,
    read,
    text,
    token_ids,
    tokens_to_make,
    whole,
    wrong,
)
from phalanx.engines.serve.settings import Sampling

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for tokens.

    Attributes:
        prompts: texts or token ids; each gives `num_each` choices.
        model: name that the client used (None: the base).
        sampling: its `max_new` holds where `max_new` is not None.
        max_new: output tokens at most (None: as many as fit; 0: only the prompt is echoed).
        stops: strings that end the output and, unless `include_stop`, are not part of it.
        add_special: whether the tokenizer adds its special tokens to a text.
        skip_special: whether special tokens are left out of the text.
        truncate: keep only so many tokens of the prompt's end (-1: as many as fit).
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    max_new: int | None
    model: str | None = None
    num_each: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_stop: bool = False
    add_special: bool = True
    skip_special: bool = True
    truncate: int | None = None
    prompt_logprobs: int | None = None

    def sampling_of(self, choice: int, max_new: int) -> Sampling:
        """Choices of one prompt draw from different seeds."""
        seed = self.sampling.seed + choice % self.num_each
        return replace(self.sampling, seed=seed, max_new=max_new)


COMPLETION: Table = COMMON | {
    "prompt": (lambda name, value: _prompts(name, value), None),
    "max_tokens": (whole(0, 2**31 - 1), 16),
    "logprobs": (num_logprobs, None),
    "echo": (boolean, False),
    "add_special_tokens": (boolean, True),
    "suffix": (only(""), None),
}
# Tokens in, tokens out.
_GENERATE_SAMPLING: Table = SAMPLING | {
    "max_tokens": (tokens_to_make, 16),
    "logprobs": (num_logprobs, None),
}
GENERATE: Table = {
    "prompt_token_ids": (token_ids, None),
    "sampling": (lambda name, value: read(value, _GENERATE_SAMPLING, where=name), None),
    "model": (text, None),
    "stream": (boolean, False),
}


def parse_completion(body: Any) -> Asked:
    """Read the body of `/v1/completions`.

    Args:
        body: what the JSON held.

    Raises:
        JobError: `serve/request` naming the parameter.
    """
    values = read(body, COMPLETION)
    prompts, echo, logprobs = values["prompt"], values["echo"], values["logprobs"]
    if prompts is None:
        raise wrong("prompt", None, _PROMPT_RULE)
    if not echo:
        tokens_to_make("max_tokens", values["max_tokens"])
    if len(prompts) * values["n"] > MAX_CHOICES:
        number = len(prompts) * values["n"]
        raise wrong("prompts times n", number, f"must be at most {MAX_CHOICES}", [MAX_CHOICES])
    return asked_of(
        values,
        prompts,
        values["max_tokens"],
        num_logprobs=logprobs,
        score_prompt=logprobs if echo else None,
        echo=echo,
        add_special=values["add_special_tokens"],
    )


def parse_generate(body: Any) -> Asked:
    """Read the body of `/generate`.

    Raises:
        JobError: `serve/request` naming the parameter.
    """
    values = read(body, GENERATE)
    if values["prompt_token_ids"] is None:
        raise wrong("prompt_token_ids", None, "must be a list of token ids")
    inner = values["sampling"] or read({}, _GENERATE_SAMPLING)
    of_text = {name: default for name, (_, default) in COMMON.items()}
    whole_body = of_text | inner | {"model": values["model"], "stream": values["stream"]}
    prompts, logprobs = (values["prompt_token_ids"],), inner["logprobs"]
    return asked_of(whole_body, prompts, inner["max_tokens"], num_logprobs=logprobs)


def asked_of(
    values: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    max_new: int | None,
    *,
    num_logprobs: int | None,
    score_prompt: int | None = None,
    echo: bool = False,
    add_special: bool = True,
) -> Asked:
    """The request, from parameters that are legal one by one.

    Args:
        values: of the table `COMMON`.
        num_logprobs: most probable tokens to report per output token.
        score_prompt: the same for an echoed prompt.

    Raises:
        JobError: `serve/request` for parameters that contradict each other.
    """
    options, least = values["stream_options"], values["min_tokens"]
    if options is not None and not values["stream"]:
        raise wrong("stream_options", None, "needs stream = true")
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise wrong("prompt_logprobs", values["prompt_logprobs"], "cannot be streamed")
    if max_new is not None and least > max(max_new, 1):
        raise wrong("min_tokens", least, f"must be at most max_tokens, {max_new}", [max_new])
    scored = [each for each in (values["prompt_logprobs"], score_prompt) if each is not None]
    seed = uuid.uuid4().int >> 65 if values["seed"] is None else values["seed"]
    sampling = Sampling(
        max_new=max(1, max_new or 1),
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        min_p=values["min_p"],
        seed=seed,
        ignore_eos=values["ignore_eos"],
        stop_tokens=values["stop_token_ids"],
        num_logprobs=num_logprobs,
        prompt_logprobs=max(scored) if scored else None,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logit_bias=values["logit_bias"],
        min_new=least,
    )
    return Asked(
        prompts=prompts,
        sampling=sampling,
        max_new=max_new,
        model=values["model"],
        num_each=values["n"],
        stops=values["stop"],
        stream=values["stream"],
        include_usage=bool(options and options["include_usage"]),
        echo=echo,
        return_token_ids=values["return_token_ids"],
        include_stop=values["include_stop_str_in_output"],
        add_special=add_special,
        skip_special=values["skip_special_tokens"],
        truncate=values["truncate_prompt_tokens"],
        prompt_logprobs=values["prompt_logprobs"],
    )


_PROMPT_RULE = "must be a text, a list of token ids, or a list of these"


def _prompts(name: str, value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (text(name, value),)
    if not isinstance(value, list) or not value:
        raise wrong(name, value, _PROMPT_RULE)
    if all(isinstance(each, int) for each in value):
        return (token_ids(name, value),)
    if not all(isinstance(each, str | list) for each in value):
        raise wrong(name, value, _PROMPT_RULE)
    readers = (text if isinstance(each, str) else token_ids for each in value)
    return tuple(reader(name, each) for reader, each in zip(readers, value))
