"""Readers of a request's parameters, and the tables of them that the routes share. No torch.

A table gives each name a reader and the value that stands for "not given"; null is "not given" too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.engines.serve.settings import MAX_LOGPROBS, SAMPLING_RANGES
from phalanx.errors import JobError, nearest_names, shown

Reader = Callable[[str, Any], Any]
Table = dict[str, tuple[Reader, Any]]

MAX_CHOICES = 128
_MAX_SEED = 2**63 - 1
_MAX_TOKEN = 2**31 - 1
_MAX_ENTRIES = 1024
_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 1024


def wrong(where: str, value: object, rule: str, legal: Sequence[object] = ()) -> JobError:
    """`serve/request` that shows the value, however long, as text of one line."""
    told = None if value is None else shown(value)
    return JobError("serve/request", where, told, rule, legal=legal)


def read(body: Any, table: Table, *, where: str = "body") -> dict[str, Any]:
    """All parameters of the table, from the body or not given.

    Raises:
        JobError: `serve/request` naming the parameter; near misses of names are told.
    """
    if not isinstance(body, Mapping):
        raise wrong(where, body, "must be a JSON object")
    for name in body:
        if name not in table:
            place = str(name) if where == "body" else f"{where}.{name}"
            raise wrong(
                place[:100], None, "no such parameter", nearest_names(str(name)[:100], table)
            )
    return {
        name: default if body.get(name) is None else reader(name, body[name])
        for name, (reader, default) in table.items()
    }


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")
    return value


def number(low: float, high: float) -> Reader:
    """A number of this range; NaN lies in none."""

    def read_number(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise wrong(name, value, f"must be a number in {low:g}..{high:g}", [low, high])
        return float(value)

    return read_number


def whole(low: int, high: int) -> Reader:
    """A whole number of this range."""

    def read_whole(name: str, value: Any) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not low <= value <= high:
            upper = "" if high >= _MAX_TOKEN else f" and at most {high}"
            raise wrong(name, value, f"must be a whole number, at least {low}{upper}")
        return int(value)

    return read_whole


def text(name: str, value: Any) -> str:
    """A text without halves of surrogate pairs, which no tokenizer takes."""
    if not isinstance(value, str):
        raise wrong(name, value, "must be a text")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise wrong(name, value, "holds half a surrogate pair")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids; whether the model has them is seen when they are submitted."""
    is_list = isinstance(value, list)
    if not is_list or not all(type(each) is int and 0 <= each <= _MAX_TOKEN for each in value):
        raise wrong(name, value, "must be a list of token ids")
    return tuple(value)


def only(*values: Any) -> Reader:
    """A parameter of the interface that this server does not compute: values without effect."""

    def read_neutral(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            raise wrong(name, value, "is not supported by this server", values[:1])
        return value

    return read_neutral


def ignored(name: str, value: Any) -> None:
    """What a client may say about itself."""
    return


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise wrong(name, value, "must be a text or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS or any(len(each) > _MAX_STOP_CHARACTERS for each in stops):
        rule = f"must be at most {_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters"
        raise wrong(name, value, rule)
    return tuple(text(name, each) for each in stops)


def _stop_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = token_ids(name, value)
    if len(ids) > _MAX_ENTRIES:
        raise wrong(name, len(ids), f"must be at most {_MAX_ENTRIES} token ids")
    return ids


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    rule = "must map token ids to numbers in -100..100"
    if not isinstance(value, Mapping):
        raise wrong(name, value, rule)
    if len(value) > _MAX_ENTRIES:
        raise wrong(name, len(value), f"must have at most {_MAX_ENTRIES} entries")
    found: dict[int, float] = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= _MAX_TOKEN
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_id or int(key) in found or not is_number or not -100 <= bias <= 100:
            raise wrong(name, {key: bias}, rule)
        found[int(key)] = float(bias)
    return tuple(found.items())


def _top_k(name: str, value: Any) -> int:
    """0 and -1 both say: all."""
    return max(0, whole(-1, _MAX_TOKEN)(name, value))


def _number_of(name: str) -> Reader:
    """A number of the range that sampling has for it."""
    return number(*SAMPLING_RANGES[name])


def stream_options(name: str, value: Any) -> dict[str, Any]:
    """What a stream may be asked to tell."""
    return read(value, _STREAM_OPTIONS, where=name)


_STREAM_OPTIONS: Table = {
    "include_usage": (boolean, False),
    "include_obfuscation": (only(False), False),
}
tokens_to_make = whole(1, _MAX_TOKEN)
num_logprobs = whole(0, MAX_LOGPROBS)

SAMPLING: Table = {
    "temperature": (_number_of("temperature"), 1.0),
    "top_p": (_number_of("top_p"), 1.0),
    "top_k": (_top_k, 0),
    "min_p": (_number_of("min_p"), 0.0),
    "seed": (whole(-_MAX_SEED, _MAX_SEED), None),
    "stop_token_ids": (_stop_ids, ()),
    "ignore_eos": (boolean, False),
    "min_tokens": (whole(0, _MAX_TOKEN), 0),
    "presence_penalty": (_number_of("presence_penalty"), 0.0),
    "frequency_penalty": (_number_of("frequency_penalty"), 0.0),
    "repetition_penalty": (_number_of("repetition_penalty"), 1.0),
    "logit_bias": (_bias, ()),
    "prompt_logprobs": (num_logprobs, None),
}
# What all routes that generate text know.
COMMON: Table = SAMPLING | {
    "model": (text, None),
    "n": (whole(1, MAX_CHOICES), 1),
    "stop": (_stops, ()),
    "stream": (boolean, False),
    "stream_options": (stream_options, None),
    "include_stop_str_in_output": (boolean, False),
    "skip_special_tokens": (boolean, True),
    "spaces_between_special_tokens": (only(True), True),
    "truncate_prompt_tokens": (whole(-1, _MAX_TOKEN), None),
    "return_token_ids": (boolean, False),
    "best_of": (only(1), None),
    "use_beam_search": (only(False), False),
    "length_penalty": (only(1, 1.0), None),
    **dict.fromkeys(
        ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        (ignored, None),
    ),
}


def refuse_constant(constant: str) -> float:
    """For the reader of JSON: NaN and Infinity, which Python's takes, are none."""
    raise ValueError(f"{constant} is no JSON number")
