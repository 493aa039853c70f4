"""What an engine step costs: a few measured numbers, and the prices a simulated engine asks for.

The layers of a step are matrix products over all its rows together, so their time is a curve of
the number of rows; so is that of the head, which runs only where a token is chosen. Attention reads
what is cached: a decoding row once per cached token, a prompt's chunk once per pair of its tokens
and the cached ones.

Legend: R decoding rows, P prompt tokens of a step, k tokens of a request in the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, Protocol

from phalanx.action import Action, Collective, Compute, Move, Send
from phalanx.errors import JobError, WorldError
from phalanx.models.spec import DecoderConfig, kv_token_bytes

Points = Sequence[tuple[int, float]]
ENGINE_STEP = "engine.step"


class Batch(Protocol):
    """What a price depends on: the rows of a step."""

    def rows(self) -> list[tuple[int, int, int]]:
        """(request, query_len, kv_len) per row."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServeRates:
    """Measured times of one engine: one model on one machine with so many threads.

    Attributes:
        layers_s: (rows, seconds) of a step without its head, rows rising; what lies between two
            points is interpolated, beyond the last one its slope goes on.
        head_s: (rows, seconds) of choosing the next token of so many rows.
        kv_token_s: seconds per cached token that a decoding row reads.
        pair_s: seconds per pair of a prompt token and a token cached before its chunk.
        windows: (tokens that a layer of this kind sees at most, 0 for all; share of these layers in
            the cached bytes of a token), one for each kind; shares sum to 1.

    Raises:
        JobError: `job/bad-value` for points that are none, not rising or negative.
    """

    layers_s: Points
    head_s: Points
    kv_token_s: float
    pair_s: float
    windows: Sequence[tuple[int, float]] = ((0, 1.0),)

    def __post_init__(self) -> None:
        for name in ("layers_s", "head_s"):
            points = tuple((int(count), float(seconds)) for count, seconds in getattr(self, name))
            counts = [count for count, _ in points]
            if not points or counts != sorted({*counts}) or min(counts) < 1:
                rule = "must be points of rising numbers of rows, from 1 on"
                raise JobError("job/bad-value", f"rates.{name}", points, rule)
            object.__setattr__(self, name, points)
        windows = tuple((int(window), float(share)) for window, share in self.windows)
        object.__setattr__(self, "windows", windows)
        times = [s for _, s in (*self.layers_s, *self.head_s)] + [self.kv_token_s, self.pair_s]
        if min(times) < 0:
            raise JobError("job/bad-value", "rates", min(times), "no time is negative", legal=[0])

    def to_dict(self) -> dict[str, Any]:
        """The form that JSON holds."""
        return asdict(self)

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> ServeRates:
        """What `to_dict` gave.

        Raises:
            JobError: as the constructor.
        """
        return ServeRates(**table)

    def read_tokens(self, kv_len: float) -> float:
        """Cached tokens that one row reads of kv_len: a layer with a window reads no more."""
        return sum(share * min(kv_len, window or kv_len) for window, share in self.windows)

    def step_s(
        self,
        num_decode: int,
        kv_tokens: float,
        num_prompt: int,
        *,
        num_pairs: float = 0.0,
        num_ended: int | None = None,
    ) -> float:
        """Seconds of a step.

        Args:
            num_decode: decoding rows, one token each.
            kv_tokens: cached tokens that they read, summed over them (`read_tokens` each).
            num_prompt: prompt tokens computed in the step.
            num_pairs: prompt tokens times the tokens cached before their chunk, summed.
            num_ended: prompts that end in the step (None: one if there are prompt tokens).
        """
        if not (rows := num_decode + num_prompt):
            return 0.0
        chosen = num_decode + (min(num_prompt, 1) if num_ended is None else num_ended)
        total_s = _on_curve(self.layers_s, rows)
        total_s += _on_curve(self.head_s, chosen) if chosen else 0.0
        return total_s + kv_tokens * self.kv_token_s + num_pairs * self.pair_s

    def batch_s(self, batch: Batch, prompt_lens: Mapping[int, int]) -> float:
        """Seconds of a batch plan; a row of one token within a prompt counts as a prompt's."""
        num_decode = num_prompt = num_ended = 0
        kv_tokens = num_pairs = 0.0
        for request, query_len, kv_len in batch.rows():
            ends = kv_len + query_len >= prompt_lens[request]
            if query_len == 1 and ends:
                num_decode += 1
                kv_tokens += self.read_tokens(kv_len + 1)
            else:
                num_prompt += query_len
                num_ended += ends
                num_pairs += query_len * self.read_tokens(kv_len)
        return self.step_s(
            num_decode, kv_tokens, num_prompt, num_pairs=num_pairs, num_ended=num_ended
        )

    def prompt_s(self, num_prompt: int, chunk: int) -> float:
        """Seconds from the start of a lone prompt to its first token, in chunks of that size."""
        total_s = 0.0
        for start in range(0, num_prompt, chunk):
            count = min(chunk, num_prompt - start)
            pairs = count * self.read_tokens(start)
            is_last = start + count == num_prompt
            total_s += self.step_s(0, 0.0, count, num_pairs=pairs, num_ended=int(is_last))
        return total_s

    def decode_s(self, num_running: int, kv_len: int) -> float:
        """Seconds between two tokens of requests that hold kv_len tokens each."""
        return self.step_s(num_running, num_running * self.read_tokens(kv_len), 0)


def _on_curve(points: Points, count: int) -> float:
    """Linear between two points and beyond the last; below the first its value."""
    if len(points) == 1 or count <= points[0][0]:
        return points[0][1]
    at = min(bisect_right([each for each, _ in points], count), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return max(0.0, low_s + (count - low) * (high_s - low_s) / (high - low))


def windows_of(config: DecoderConfig) -> tuple[tuple[int, float], ...]:
    """`ServeRates.windows` of a model."""
    all_bytes = kv_token_bytes(config)
    return tuple(
        (kind.window or 0, kv_token_bytes(config, kind.name) / all_bytes) for kind in config.kinds
    )


@dataclass(frozen=True)
class EngineCost:
    """Prices of a world in which one rank carries out engine steps.

    Args:
        batch_s: seconds of a batch plan.
        overhead_s: added to every step (what is around the engine).

    Raises:
        WorldError: `world/unbound` when asked for anything but an engine step.
    """

    batch_s: Callable[[Any], float] = field(repr=False)
    overhead_s: float = 0.0

    def compute_s(self, action: Compute, rank: int) -> float:
        """Of the step's batch plan."""
        if action.op != ENGINE_STEP:
            _refuse(action)
        return self.batch_s(action.batch) + self.overhead_s

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """An engine step has none of its own."""
        _refuse(action)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """An engine step has none of its own."""
        _refuse(action)

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """An engine step has none of its own."""
        _refuse(action)

    def move_s(self, action: Move, rank: int) -> float:
        """An engine step has none of its own."""
        _refuse(action)

    def rank_class(self, rank: int) -> Hashable:
        """All ranks are alike."""
        return 0


def _refuse(action: Action) -> NoReturn:
    where, rule = f"cost of {action.label or action.operator}", "an engine has prices of steps only"
    raise WorldError("world/unbound", where, action.operator, rule, legal=[ENGINE_STEP])
