"""What a monitoring system asks a server for, in the text format of Prometheus.

Times are those of the front end: from a request's arrival there to its tokens' arrival there. Each
server has a registry of its own, so a program may hold several.

    queue                   arrival to the start of the step that first computes it
    time to first token     arrival to the first output token
    inter-token             between neighbouring output tokens
    time per output token   (last token - first token) / (tokens - 1); none for a single token
    request                 arrival to the last token
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_QUEUE_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class ServeMetrics:
    """The metrics of one server.

    Attributes:
        content_type: of `text()`.
        running, waiting: requests that the last step computed, and the other open ones.
        kv_usage: part of the KV blocks that is held, 0..1.
        refused: by error code; a request that was never accepted.
        finished: by reason: stop, length, cancelled (its client went), error.
    """

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.running = self._gauge("requests_running", "Requests computed in the last step.")
        self.waiting = self._gauge("requests_waiting", "Accepted requests that are not computed.")
        self.kv_usage = self._gauge("kv_usage_ratio", "Part of the KV cache's blocks in use.")
        self.is_up = self._gauge("engine_up", "1 while the engine makes progress.")
        self.restarts = self._counter("engine_restarts", "Engine processes started again.")
        self.preemptions = self._counter("preemptions", "Requests that lost their KV cache.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self.output_tokens = self._counter("generation_tokens", "Output tokens delivered.")
        self.finished = self._counter("requests_finished", "Requests that ended.", "reason")
        self.refused = self._counter("requests_refused", "Requests that were refused.", "code")
        self.queue_s = self._times("queue_seconds", "Waiting before the first step.", _QUEUE_S)
        self.first_s = self._times("time_to_first_token_seconds", "To the first token.", _FIRST_S)
        self.between_s = self._times("inter_token_seconds", "Between two tokens.", _TOKEN_S)
        self.per_token_s = self._times(
            "time_per_output_token_seconds", "Mean time between the tokens of a request.", _TOKEN_S
        )
        self.whole_s = self._times("request_seconds", "From arrival to last token.", _WHOLE_S)
        self._seen: dict[str, int] = {}
        for reason in ("stop", "length", "cancelled", "error"):
            self.finished.labels(reason)  # 0 from the start, so that rates see the first one

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"phalanx_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"phalanx_{name}", text, labels, registry=self._registry)

    def _times(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"phalanx_{name}", text, buckets=buckets, registry=self._registry)

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)

    def new_engine(self) -> None:
        """The engine process is gone; the next one counts from 0."""
        self._seen = {}
        self.kv_usage.set(0.0)

    def absorb(self, counters: Mapping[str, int], num_running: int, num_open: int) -> None:
        """What an engine says of itself.

        Args:
            counters: "prompt_tokens" and "preempted" since it started, "free_blocks", "num_blocks".
            num_running: requests of its last step that are still open.
            num_open: open requests.
        """
        for name, metric in (
            ("prompt_tokens", self.prompt_tokens),
            ("preempted", self.preemptions),
        ):
            value = counters.get(name, 0)
            metric.inc(max(0, value - self._seen.get(name, 0)))
            self._seen[name] = value
        if num_blocks := counters.get("num_blocks", 0):
            self.kv_usage.set(1 - counters["free_blocks"] / num_blocks)
        self.running.set(num_running)
        self.waiting.set(num_open - num_running)


class RequestTimes:
    """The times of one request, from now on.

    Args:
        metrics: gets what is observed.
        now_s: a monotonic clock.
    """

    def __init__(self, metrics: ServeMetrics, now_s: float | None = None) -> None:
        self._metrics = metrics
        self._arrival_s = time.monotonic() if now_s is None else now_s
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._has_started = False

    def start(self, now_s: float) -> None:
        """A step that computes it began; later ones change nothing."""
        if not self._has_started:
            self._has_started = True
            self._metrics.queue_s.observe(max(0.0, now_s - self._arrival_s))

    def token(self, now_s: float) -> None:
        """An output token came."""
        metrics = self._metrics
        if self._num_tokens:
            metrics.between_s.observe(now_s - self._last_s)
        else:
            self._first_s = now_s
            metrics.first_s.observe(now_s - self._arrival_s)
        self._num_tokens, self._last_s = self._num_tokens + 1, now_s
        metrics.output_tokens.inc()

    def end(self, reason: str) -> None:
        """It ended; only those that came to their end count for times of whole requests."""
        metrics = self._metrics
        metrics.finished.labels(reason).inc()
        if reason in ("stop", "length") and self._num_tokens:
            metrics.whole_s.observe(self._last_s - self._arrival_s)
            if self._num_tokens > 1:
                mean_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
                metrics.per_token_s.observe(mean_s)
