"""`phalanx run`: calibrate -> plan -> train -> export -> serve -> load test -> report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from phalanx.bench_load import load_test
from phalanx.data.prepare import Prepared
from phalanx.engines.serve.handle import start_server
from phalanx.engines.whole.processes import run_module
from phalanx.engines.whole.summary import Summary, write_report
from phalanx.engines.whole.train_job import Asked, make_ready, train_ready, trained
from phalanx.errors import JobError
from phalanx.report import Report

_EXPORTED = "huggingface"
_PARITY_ROWS, _PARITY_TOKENS = 4, 128


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder and its report."""

    folder: Path
    report: Report


def run_job(asked: Asked, say: Callable[[str], None], live: bool) -> RunResult:
    """Do the whole way on this machine.

    Args:
        asked: the job and its folder.
        say: progress, one line at a time.
        live: whether `say` goes to a terminal that redraws its last line.

    Returns:
        The report, also written to the folder; missed gates are its, not errors.

    Raises:
        PhalanxError: whatever stops the run; what was done before stays in the folder.
    """
    return _WholeWay(asked, say, live).go()


class _WholeWay:
    def __init__(self, asked: Asked, say: Callable[[str], None], live: bool) -> None:
        self.job, self.folder = asked.job, asked.folder
        self.asked, self.say, self.live = asked, say, live

    def go(self) -> RunResult:
        """The stages in order; each writes into the run folder."""
        start_s = perf_counter()
        if _EXPORTED not in self.job.plan.exports:
            rule = "what is served and compared has to be exported"
            exports = list(self.job.plan.exports)
            raise JobError("job/bad-value", "plan.exports", exports, rule, legal=[_EXPORTED])
        ready = make_ready(self.asked, self.say)
        result = train_ready(ready, self.say, live=self.live)
        parity = self._parity(ready.data)
        load, sentence = self._serve(ready.data)
        summary = Summary(
            trained=trained(ready, result),
            parity=parity,
            load=load,
            serving=sentence,
            total_s=perf_counter() - start_s,
        )
        return RunResult(self.folder, write_report(summary))

    def _held_out(self, data: Prepared, count: int) -> list[list[int]]:
        return [data.held_out[at].tokens.tolist() for at in range(min(count, len(data.held_out)))]

    def _parity(self, data: Prepared) -> Mapping[str, Any]:
        self.say("comparing the exported folder with transformers")
        rows = [row[:_PARITY_TOKENS] for row in self._held_out(data, _PARITY_ROWS)]
        export = str(self.folder / "export")
        return run_module("phalanx.engines.whole.parity", [export], json.dumps(rows))

    def _serve(self, data: Prepared) -> tuple[Report | None, str]:
        serve = self.job.serve
        if not serve.load_requests:
            return None, ""
        with start_server(
            str(self.folder / "export"),
            host=serve.host,
            scheduler=self.job.plan.serve,
            max_running=serve.max_running,
            max_tokens=serve.max_tokens,
        ) as server:
            self.say(f"serving on {server.url}: {server.sentence}")
            load = load_test(
                server.url,
                self._prompts(data, serve.load_requests),
                output_tokens=serve.load_output_tokens,
            )
            return load, server.sentence

    def _prompts(self, data: Prepared, count: int) -> Sequence[Sequence[int]]:
        """Questions of held-out rows, repeated if there are fewer."""
        room = self.job.serve.max_tokens - self.job.serve.load_output_tokens
        prompts = []
        for at in range(min(count, len(data.held_out))):
            row = data.held_out[at]
            prompts.append(row.tokens[: max(1, int(row.counted.argmax()))].tolist()[:room])
        return [prompts[at % len(prompts)] for at in range(count)]
