"""The words of `phalanx plan --serve` as a question."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

from phalanx.errors import JobError
from phalanx.planner.models import PricedModel
from phalanx.planner.question import row_count
from phalanx.planner.request_trace import read_requests
from phalanx.planner.serve_plan import ServeQuestion
from phalanx.units import parse_quantity


def serve_question(words: Mapping[str, str]) -> ServeQuestion:
    """What is to be served, as it was typed.

    Raises:
        JobError: `job/syntax` for a trace beside lengths or a rate, `job/bad-value`; from
            `read_requests`.
    """
    requests = read_requests(words["trace"]) if words["trace"] else None
    own = [name for name in ("prompt", "answer", "rate", "shared-prefix") if words.get(name)]
    if requests is not None and own:
        flags = ", ".join(f"--{name}" for name in ("trace", *own))
        rule = "contradict each other: a trace has its own times, lengths and prefixes"
        raise JobError("job/syntax", flags, words["trace"], rule)
    lengths = {"prompt": 1024.0, "answer": 256.0}
    for name in lengths:
        if words[name]:
            lengths[name] = float(row_count(words[name], f"--{name}"))
    if requests is not None:
        lengths = {
            "prompt": float(requests.prompt_tokens.mean()),
            "answer": float(requests.output_tokens.mean()),
        }
    shared = words.get("shared-prefix", "")
    return ServeQuestion(
        prompt_tokens=lengths["prompt"],
        output_tokens=lengths["answer"],
        rate_per_s=_rate(words["rate"]) if words["rate"] else 0.0,
        requests=requests,
        ttft_s=_seconds(words["ttft"], "--ttft"),
        tpot_s=_seconds(words["tpot"], "--tpot"),
        precision=words["precision"],
        software=words["software"] or "vllm",
        shared_tokens=_shared(shared, int(lengths["prompt"])) if shared else 0,
        reuses_prefixes=not words.get("no-prefix-cache"),
    )


def require_positions(model: PricedModel, question: ServeQuestion) -> None:
    """Refuse requests that are longer than the model's context.

    Raises:
        JobError: `job/bad-value`.
    """
    longest, most = int(question.longest_tokens), model.most_tokens
    if 0 < most < longest:
        where = "--trace" if question.requests is not None else "--prompt, --answer"
        rule = f"is the longest request, and {model.name} has positions for {most:,} tokens"
        raise JobError("job/bad-value", where, longest, rule, legal=[most])


def _shared(text: str, prompt: int) -> int:
    shared = row_count(text, "--shared-prefix")
    if shared >= prompt:
        rule = f"must be fewer tokens than a prompt has, {prompt:,}"
        legal = [prompt - 1] if prompt > 1 else ()
        raise JobError("job/bad-value", "--shared-prefix", text, rule, legal=legal)
    return shared


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise JobError("job/bad-value", "--rate", text, "must be requests a second above 0")
    return value


def _seconds(text: str, flag: str) -> float:
    if not text:
        return inf
    value = parse_quantity(text, "s", flag)
    if not (isfinite(value) and value > 0):
        raise JobError("job/bad-value", flag, text, "must be a time above 0", legal=["0.5 s"])
    return value
