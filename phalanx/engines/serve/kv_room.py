"""How many tokens a KV cache holds, and what they take: shapes and bytes alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.engines.serve.blocks import BLOCK_TOKENS, num_blocks_of
from phalanx.errors import JobError
from phalanx.models.spec import DecoderConfig, kv_token_bytes
from phalanx.units import format_bytes

FREE_FRAC = 0.5  # of the free memory that the cache may take by default


@dataclass(frozen=True, kw_only=True)
class KvLimits:
    """What the cache is made for: longest request, requests at once, tokens of one step."""

    max_tokens: int
    max_running: int
    max_step_tokens: int


def kv_tokens(
    config: DecoderConfig,
    limits: KvLimits,
    *,
    kv_dtype: str = "",
    asked: int = 0,
    free_bytes: float,
) -> int:
    """Tokens that the pool of full attention holds.

    As asked; else min(max_running * max_tokens, T), where T tokens of all layers, windows for all
    requests included, take half of the free memory.

    Args:
        kv_dtype: of keys and values; "": the config's.
        asked: `serve.kv_tokens`; 0: what memory allows.
        free_bytes: memory that is free once the weights are there.

    Raises:
        JobError: `job/bad-value` when not even one request of full length fits.
    """
    kv_dtype = kv_dtype or config.dtype
    if asked:
        require_one_request(asked, limits.max_tokens)
        return asked
    wanted = limits.max_running * limits.max_tokens
    allowed_bytes = FREE_FRAC * free_bytes
    window_bytes = sliding_bytes(config, wanted, limits, kv_dtype)
    per_token = token_bytes(config, kv_dtype)
    left_bytes = allowed_bytes - window_bytes
    if per_token:
        wanted = min(wanted, int(max(0.0, left_bytes) // per_token))
    if left_bytes < 0 or wanted < limits.max_tokens:
        rule = (
            f"one request of full length does not fit: its KV cache takes "
            f"{format_bytes(limits.max_tokens * per_token)}, windows of {limits.max_running} "
            f"requests {format_bytes(window_bytes)}; the cache may have "
            f"{format_bytes(allowed_bytes)}, half of the free memory"
        )
        legal = [wanted] if left_bytes > 0 and wanted > 1 else []
        where = "serve.max_tokens" if left_bytes > 0 else "serve.max_running"
        value = limits.max_tokens if left_bytes > 0 else limits.max_running
        raise JobError("job/bad-value", where, value, rule, legal=legal)
    return wanted


def require_one_request(num_tokens: int, max_tokens: int) -> None:
    """Raise `job/bad-value` for a pool that cannot hold the longest request."""
    if num_tokens < max_tokens:
        rule, legal = "the KV cache must hold the longest request", [max_tokens]
        raise JobError("job/bad-value", "serve.kv_tokens", num_tokens, rule, legal=legal)


def num_sliding_blocks(window: int, num_blocks: int, limits: KvLimits) -> int:
    """Blocks that the windows of all running requests and the tokens of one step can need.

    A request holds the window - 1 tokens before its new ones; both ends may lie inside a block.
    """
    per_request = num_blocks_of(window - 1) + 2
    most = limits.max_running * per_request + num_blocks_of(limits.max_step_tokens)
    return min(num_blocks, most)


def token_bytes(config: DecoderConfig, kv_dtype: str) -> int:
    """Bytes that one more token takes in the layers that keep every token: 2 L K C itemsize."""
    kinds = (kind for kind in config.kinds if kind.window is None)
    return sum(kv_token_bytes(config, kind.name, kv_dtype) for kind in kinds)


def sliding_bytes(config: DecoderConfig, num_tokens: int, limits: KvLimits, kv_dtype: str) -> int:
    """Bytes of the sliding pools beside a full pool of `num_tokens`."""
    total = 0
    for kind in config.kinds:
        if kind.window is not None:
            blocks = num_sliding_blocks(kind.window, num_blocks_of(num_tokens), limits)
            total += blocks * BLOCK_TOKENS * kv_token_bytes(config, kind.name, kv_dtype)
    return total
