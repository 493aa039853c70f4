"""What a server is told, and what a request asks for. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.engines.serve.adapter_fit import read_fitting
from phalanx.engines.serve.kv_room import require_one_request
from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import DTYPE_BYTES, DecoderConfig, read_config
from phalanx.models.weight_names import model_weights
from phalanx.registry import build

MAX_LOGPROBS = 20
_PACKAGES = {
    "torch": "torch",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}  # package -> extra


def require_packages() -> None:
    """Raise `environment/missing` for a package that serving needs and this machine lacks."""
    for package, extra in _PACKAGES.items():
        if find_spec(package) is None:
            rule = f"serving needs it; run: pip install 'phalanx-parallel[{extra}]'"
            raise JobError("environment/missing", "package", package, rule)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """One server.

    Attributes:
        folder: model folder (config.json, safetensors, tokenizer.json).
        scheduler: policy of the family "serve": a name, or a table with its options.
        name: what clients call the model ("" = the folder's name).
        host, port: where to listen (port 0: one that is free).
        max_running: requests in one batch.
        max_tokens: longest prompt plus output of one request.
        max_step_tokens: tokens computed in one step (at least max_running).
        max_queued: requests that may wait before new ones are refused (429).
        kv_tokens: tokens that the KV pool holds (0: max_running * max_tokens, or what half of the
            free memory holds if that is less).
        dtype, kv_dtype: of weights and cache ("": as the model's config; the weights' dtype).
        device: "cpu" or "cuda".
        threads: of the engine process (0: as torch decides).
        stall_s: a step that takes longer makes the server unhealthy.
        admin: whether clients may replace weights, load adapters, and send the engine to sleep.
        adapters: name -> PEFT folder, loaded at the start; clients ask for them as a model.
        max_adapters: adapters that are loaded at the same time.
        max_lora_rank: largest rank of an adapter.
        restarts: how often an engine process that died is started again.
    """

    folder: str
    scheduler: str | Mapping[str, Any]
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    max_running: int = 16
    max_tokens: int = 2048
    max_step_tokens: int = 512
    max_queued: int = 256
    kv_tokens: int = 0
    dtype: str = ""
    kv_dtype: str = ""
    device: str = "cpu"
    threads: int = 0
    stall_s: float = 60.0
    admin: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int = 4
    max_lora_rank: int = 64
    restarts: int = 3

    def __post_init__(self) -> None:
        lows = {
            "max_running": 1,
            "max_tokens": 2,
            "max_step_tokens": self.max_running,
            "max_queued": 0,
            "kv_tokens": 0,
            "threads": 0,
            "port": 0,
            "max_adapters": 0,
            "max_lora_rank": 1,
            "restarts": 0,
        }
        for name, low in lows.items():
            if (value := getattr(self, name)) < low:
                rule = f"must be at least {low}"
                raise JobError("job/bad-value", f"serve.{name}", value, rule, legal=[low])
        if self.port > 65535:
            rule = "must be at most 65535"
            raise JobError("job/bad-value", "serve.port", self.port, rule, legal=[65535])
        for name in ("dtype", "kv_dtype"):
            if (value := getattr(self, name)) and value not in DTYPE_BYTES:
                legal = nearest_names(value, DTYPE_BYTES)
                raise JobError(
                    "job/bad-value", f"serve.{name}", value, "no such dtype", legal=legal
                )

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.name or Path(self.folder).resolve().name

    def to_dict(self) -> dict[str, Any]:
        """For the engine process."""
        return asdict(self)


def require_adapters(settings: ServeSettings, config: DecoderConfig) -> None:
    """Look at the adapters of the settings, headers only.

    Raises:
        JobError: `serve/adapter` for more than there are slots, one that does not fit, or one with
            the name of the model itself.
    """
    if len(settings.adapters) > settings.max_adapters:
        where, rule = "serve.adapters", "must be at most serve.max_adapters"
        legal = [settings.max_adapters]
        raise JobError("serve/adapter", where, len(settings.adapters), rule, legal=legal)
    for name, folder in settings.adapters.items():
        if not name or name == settings.model_name:
            rule = "an adapter needs a name of its own, other than the model's"
            raise JobError("serve/adapter", "serve.adapters", repr(name), rule)
        read_fitting(config, folder, settings.max_lora_rank)


def require_lengths(settings: ServeSettings, config: DecoderConfig) -> None:
    """Refuse requests that are longer than the model or its cache.

    Raises:
        JobError: `job/bad-value`.
    """
    if settings.max_tokens > config.max_positions:
        rule, legal = "the model was not made for such positions", [config.max_positions]
        raise JobError("job/bad-value", "serve.max_tokens", settings.max_tokens, rule, legal=legal)
    if settings.kv_tokens:
        require_one_request(settings.kv_tokens, settings.max_tokens)


def require_servable(settings: ServeSettings) -> DecoderConfig:
    """The config of the folder, looked at before any process starts.

    Raises:
        JobError: `job/not-found` for a folder without config.json or weights, `model/unknown` for a
            model that is not supported, `model/tensor` for weights that are damaged or do not fit,
            `job/bad-value` for more tokens than positions or cache, `serve/adapter` as
            `require_adapters`, `registry/unknown` and `job/unknown-key` for the scheduler.
    """
    build("serve", settings.scheduler, "plan.serve")
    config = read_config(settings.folder)
    config.require_computable()
    if not any(Path(settings.folder).glob("*.safetensors")):
        rule = "holds no safetensors weights"
        raise JobError("job/not-found", "model folder", settings.folder, rule)
    require_lengths(settings, config)
    model_weights(settings.folder, config)
    require_adapters(settings, config)
    return config


# name -> least and largest value
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "seed": (1 - 2**63, 2**63 - 1 + 2**16),  # choices of one request count on from its seed
    "num_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_new": (0, 2**31 - 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of a request are chosen.

    Attributes:
        max_new: output tokens at most.
        temperature: 0 is greedy.
        top_p: smallest set of most probable tokens with at least this probability; 1: all.
        seed: with the position of a token it decides every draw, whatever shares the batch.
        ignore_eos: go on after an end-of-sequence token (load tests).
        stop_tokens: ids that end the output, like an end-of-sequence token.
        num_logprobs: most probable tokens reported per position (None: no probabilities at all).
        prompt_logprobs: the same for the prompt's tokens (None: not scored).
        top_k: draw among so many most probable tokens; 0: all.
        min_p: draw among tokens at least so probable, of the most probable one's probability.
        presence_penalty, frequency_penalty: subtracted from logits of output tokens, once and per
            occurrence.
        repetition_penalty: divides positive and multiplies negative logits of known tokens.
        logit_bias: (token, added to its logit).
        min_new: output tokens before an end-of-sequence or stop token may be chosen.

    Raises:
        JobError: `serve/request` for a value outside `SAMPLING_RANGES`.
    """

    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                rule = f"must lie in {low}..{high}"
                raise JobError("serve/request", name, value, rule, legal=[low, high])


# (log probability of the token, the most probable ids, their log probabilities)
TokenScore = tuple[float, list[int], list[float]]


@dataclass(slots=True)
class Request:
    """A request in the engine.

    Attributes:
        tokens: prompt and output so far.
        adapter: name of the adapter that computes it ("": the base).
        prompt_scores: of the prompt's tokens from the second on, as far as computed.
        rules: what the choice of tokens keeps of it, as counts for penalties.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    adapter: str = ""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    rules: Any = field(default=None, repr=False, compare=False)

    @property
    def num_new(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt
