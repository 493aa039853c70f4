"""An engine that sleeps gives its memory back, refuses work, and wakes as it was."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from phalanx.engines.serve.adapters import BASE
from phalanx.errors import JobError, WorldError
from phalanx.models.spec import LoraSpec, lora_tensors, weight_bytes
from tests.engines.serve_cases import CONFIG, make_engine, prompt_of, request, tensors
from tests.engines.test_serve_engine import run

MIB = 1 << 20


def answer(engine, adapter: str = "") -> list[int]:
    return run(engine, {0: [request(0, prompt_of(40), adapter=adapter)]}).tokens()[0]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def kv_bytes(engine) -> int:
    pools = engine.kv.pools.values()
    return sum(each.nbytes for pool in pools for each in (pool.keys, pool.values))


def touch(engine) -> None:
    """Give every page of the cache memory of its own, as weeks of serving do."""
    for pool in engine.kv.pools.values():
        pool.keys.fill_(1.0)
        pool.values.fill_(1.0)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_wakes_with_the_answers_it_had(level):
    engine = make_engine()
    lora = LoraSpec(rank=3, alpha=9.0, targets=("q_proj", "up_proj"))
    generator = torch.Generator().manual_seed(2)
    factors = {
        name: torch.randn(spec.shape, generator=generator)
        for name, spec in lora_tensors(CONFIG, lora).items()
    }
    engine.update_adapter("tone", lora, factors)
    before = answer(engine), answer(engine, "tone")
    for _ in range(2):
        engine.sleep(level)
        assert engine.sleep_level == level
        if level == 2:
            engine.update_weights(tensors(0), "tiny@0")
            assert engine.sleep_level == 1
        engine.wake()
        assert engine.sleep_level == 0 and engine.adapter_slot(0) == BASE
        assert (answer(engine), answer(engine, "tone")) == before
    assert before[0] != before[1]


def test_new_weights_after_deep_sleep_are_those_that_answer():
    engine = make_engine()
    engine.sleep(2)
    engine.update_weights(tensors(5), "tiny@5")
    engine.wake()
    inbox = run(engine, {0: [request(0, prompt_of(40))]})
    assert inbox.tokens()[0] == answer(make_engine(seed=5))
    assert inbox.outputs[0][0].weight_version == "tiny@5"


def course_of_memory() -> dict[str, int]:
    """Resident bytes at work, asleep at level 1 and 2, and at work again."""
    config = replace(CONFIG, vocab_size=200_000)  # 38 MB of embedding
    engine = make_engine(config, kv_tokens=96_000, max_tokens=500)
    touch(engine)
    seen = {"kv": kv_bytes(engine), "weights": weight_bytes(config), "at work": resident_bytes()}
    for level in (1, 2):
        engine.sleep(level)
        seen[f"level {level}"] = resident_bytes()
    engine.update_weights(tensors(0, config), "tiny@0")
    engine.wake()
    touch(engine)
    return seen | {"awake": resident_bytes()}


@pytest.mark.dist
def test_memory_goes_back_to_the_system():
    """Resident bytes fall by what the pools took, then by what the weights took. In a process of
    its own: a session of many tests holds freed memory that an engine takes first."""
    code = "import json; from tests.engines.test_serve_sleep import course_of_memory; "
    command = [sys.executable, "-c", code + "print(json.dumps(course_of_memory()))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    seen = json.loads(done.stdout)
    assert seen["kv"] > 40 * MIB
    assert seen["at work"] - seen["level 1"] > 0.9 * seen["kv"]
    assert seen["level 1"] - seen["level 2"] > 0.9 * seen["weights"]
    assert abs(seen["at work"] - seen["awake"]) < 0.2 * seen["kv"]


def test_requests_are_refused_while_it_sleeps_and_served_afterwards():
    engine = make_engine()
    engine.sleep(1)
    inbox = run(engine, {0: [request(0, prompt_of(7))]})
    assert inbox.refused[0].code == "serve/asleep" and not inbox.outputs
    engine.wake()
    assert run(engine, {0: [request(0, prompt_of(7))]}).tokens()


def test_it_does_not_fall_asleep_over_live_requests():
    engine = make_engine()
    engine.add(request(0, prompt_of(7)))
    with pytest.raises(WorldError, match=r"live requests = 1: .* cancel them"):
        engine.sleep(1)
    assert engine.sleep_level == 0
    engine.cancel(0)
    engine.sleep(1)


def test_levels_are_checked_and_never_lost():
    engine = make_engine()
    for level in (0, 3, -1):
        with pytest.raises(JobError, match=f"sleep level = {level}"):
            engine.sleep(level)
    engine.sleep(2)
    engine.sleep(1)  # it sleeps deeper already
    assert engine.sleep_level == 2
    with pytest.raises(WorldError, match="the weights were given back"):
        engine.wake()
    engine.update_weights(tensors(0), "tiny@0")
    engine.wake()
    engine.wake()
    assert engine.sleep_level == 0


def test_an_update_that_fails_leaves_it_asleep_and_without_weights():
    """Half of the weights would answer nonsense; strict whatever the caller says."""
    engine = make_engine()
    before = answer(engine)
    engine.sleep(2)
    with pytest.raises(JobError, match="tensors of the model are missing"):
        engine.update_weights(list(tensors(0))[:3], "tiny@1", strict=False)
    assert engine.sleep_level == 2 and engine.weight_version == "tiny@0"
    engine.update_weights(tensors(0), "tiny@2")
    engine.wake()
    assert answer(engine) == before and engine.weight_version == "tiny@2"
