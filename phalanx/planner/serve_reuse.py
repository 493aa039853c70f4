"""What of a prompt formulas may take as cached: the shared prefix, or what a trace finds again."""

from __future__ import annotations

import numpy as np

from phalanx.planner.request_trace import RequestTrace
from phalanx.planner.serve_answers import Engines, ServeQuestion
from phalanx.worlds.sim_prefixes import PrefixCache
from phalanx.worlds.sim_serving import BLOCK_TOKENS


def expected_reuse(question: ServeQuestion, best: Engines) -> float:
    """Tokens of a prompt, on average, that the prefix caches of these engines hold.

    Of a prefix that all share: its whole blocks, at least one token left to compute. Of a trace:
    what its requests find, one after another, in the room that those leave that run in the mean.
    """
    if question.requests is None:
        most = min(question.shared_tokens, int(question.prompt_tokens) - 1)
        return float(max(most, 0) // BLOCK_TOKENS * BLOCK_TOKENS)
    in_flight = min(best.loaded * best.latency_s.value / best.replicas, best.max_running)
    context = question.prompt_tokens + question.output_tokens / 2
    room = max(0.0, best.kv_tokens - in_flight * context)
    return found_again(question.requests, engines=best.replicas, room_tokens=room)


def found_again(requests: RequestTrace, *, engines: int, room_tokens: float) -> float:
    """Tokens of a prompt, on average, that are cached where one request ends before the next.

    Engines take turns; each keeps what was used last, up to `room_tokens`.
    """
    found, most = 0, int(room_tokens // BLOCK_TOKENS)
    for first in range(min(engines, len(requests))):
        its = requests.every(engines, first)
        if its.prefixes is None:
            return 0.0
        all_keys = its.prefixes.block_keys(its.prompt_tokens, BLOCK_TOKENS)
        cache = PrefixCache(1 + max(int(keys.max(initial=-1)) for keys in all_keys))
        for keys, tokens in zip(all_keys, its.prompt_tokens.tolist()):
            again = cache.num_leading(keys[: (tokens - 1) // BLOCK_TOKENS])
            cache.hold(keys[:again])
            cache.release(np.concatenate([keys[:again], cache.add(keys[again:])]))
            cache.drop(max(0, cache.num_idle - most))
            found += again
    return found * BLOCK_TOKENS / len(requests)
