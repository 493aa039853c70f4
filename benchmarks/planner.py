"""How long `phalanx plan` takes from a cold start, and in how much memory.

    python benchmarks/planner.py --json FILE

Each row is the median of three processes of their own, from the start of the interpreter to its
end; the one with a data file finds its tokens counted, as from the second time on. Exits with 1
where a command takes more than 5 s or 1 GB, or 10,000 plans of Llama 3.1 405B on 16,384 devices
more than 3 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from gated import main

from phalanx.report import Report

COMMAND_S, PRICING_S, MEMORY_BYTES, PLANS = 5.0, 3.0, 1e9, 10_000
TIMES = 3
THREE = "2xH100,8xH100,v5p-8"
BUDGET = "--seq 8192 --global-tokens 16M"
COMMANDS = {
    "three clusters, a data file, LoRA of 31B": ("gemma-4-31b", "--lora", "16", "--on", THREE),
    "405B on 16,384 devices": ("llama-3.1-405b", "--on", "16384xh100", *BUDGET.split()),
    "a mixture of 671B on 2,048 devices": (
        *("deepseek-ai/DeepSeek-V3", "--on", "2048xh800", "--seq", "4k"),
        *("--global-tokens", "60M"),
    ),
}
PRICING = """
from phalanx.cost.training_step import training_step
from phalanx.hardware import parse_cluster
from phalanx.models.named import named_model
from phalanx.planner.sized import sized_plans
from phalanx.planner.training import Training
config = named_model("llama-3.1-405b").config
job = Training(config=config, seq_tokens=8192, batch_tokens=1 << 24, method="pretrain",
               epochs=0.0, steps=1)
cluster = parse_cluster("16384xh100")
plans = sized_plans(job, cluster)
times = training_step(job.shape, plans.plans, cluster.machine)
assert times.total_s.shape == (len(plans),)
print(len(plans))
"""


def measure() -> Report:
    """All rows."""
    report = Report("Planner, cold processes")
    with TemporaryDirectory() as folder:
        environment = dict(os.environ) | {"XDG_CACHE_HOME": folder}
        data = Path(folder) / "chat.jsonl"
        data.write_text("\n".join(map(_line, range(2000))) + "\n", encoding="utf-8")
        for name, words in COMMANDS.items():
            has_data = "--lora" in words
            command = [sys.executable, "-m", "phalanx", "plan", *words]
            command += ["--data", str(data)] if has_data else []
            if has_data:
                _run(command, environment)  # counts tokens
            report_name = f"phalanx plan, {name}"
            _add(report, report_name, command, environment, COMMAND_S)
        seconds = _add(
            report, "pricing, 405B", [sys.executable, "-c", PRICING], environment, PRICING_S
        )
        (output, _, _) = _run([sys.executable, "-c", PRICING], environment)
        report.add("plans priced", int(output), "1", "measured", target=PLANS, bound="above")
        report.add("plans per second", int(output) / seconds, "1/s", "measured")
    return report


def _line(at: int) -> str:
    answer = f"it is {at}. " * (1 + at % 60)
    return json.dumps({"prompt": f"what is {at}? ", "completion": answer})


def _add(
    report: Report, name: str, command: list[str], environment: dict[str, str], limit_s: float
) -> float:
    runs = [_run(command, environment) for _ in range(TIMES)]
    seconds = median(run[1] for run in runs)
    most = max(run[2] for run in runs)
    report.add(f"{name}/wall time", seconds, "s", "measured", target=limit_s, bound="below")
    report.add(f"{name}/peak memory", most, "bytes", "measured", target=MEMORY_BYTES, bound="below")
    return seconds


def _run(command: list[str], environment: dict[str, str]) -> tuple[str, float, float]:
    """(output, seconds, bytes at most) of a process."""
    start_s = perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ended with {child.returncode}")
    return output, perf_counter() - start_s, 1024.0 * usage.ru_maxrss


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
