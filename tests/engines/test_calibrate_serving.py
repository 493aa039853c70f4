"""Rates of an engine are measured once, in a process of their own, and kept if it was quiet."""

from __future__ import annotations

import pytest

from phalanx.cost.serving import ServeRates, windows_of
from phalanx.engines import calibrate_serving as module
from phalanx.engines.calibrate_serving import calibrate_serving
from phalanx.engines.serve.bench import random_engine
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.job.sections import ServeSection
from tests.engines.serve_cases import CONFIG


class Launched(Exception):
    """A process would have been started."""


SERVE = ServeSection(max_running=3, max_tokens=40, max_step_tokens=17)


@pytest.mark.dist
def test_rates_are_measured_once_and_anew_for_another_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_QUIET_FRAC", 0.0)
    table = calibrate_serving(CONFIG, SERVE, threads=1)
    rates = ServeRates.from_dict(table["rates"])
    assert rates.windows == windows_of(CONFIG) and rates.step_s(1, 0, 0) > 0
    assert table["made_of"]["limits"]["max_running"] == 3 and 0 < table["cores_frac"] <= 1.01

    def launched(*arguments, **options):
        raise Launched

    monkeypatch.setattr(module, "launch_local", launched)
    assert calibrate_serving(CONFIG, SERVE, threads=1) == table
    for other in (
        lambda: calibrate_serving(CONFIG, SERVE, threads=2),
        lambda: calibrate_serving(CONFIG, ServeSection(max_running=2, max_tokens=40), threads=1),
        lambda: calibrate_serving(CONFIG.with_dtype("bfloat16"), SERVE, threads=1),
    ):
        with pytest.raises(Launched):
            other()
    monkeypatch.setattr(module, "_QUIET_FRAC", 1.5)
    assert calibrate_serving(CONFIG, SERVE, threads=1) == table, "disturbed: good for this once"
    with pytest.raises(Launched):
        calibrate_serving(CONFIG, SERVE, threads=1)


def test_an_engine_without_sense_has_the_size_of_the_model():
    limits = KvLimits(max_tokens=40, max_running=3, max_step_tokens=17)
    engine = random_engine(CONFIG, limits)
    weights = engine.model.weights
    assert weights.embedding.shape == (CONFIG.vocab_size, CONFIG.hidden_size)
    assert weights.embedding.count_nonzero() == weights.embedding.numel()
    assert engine.kv.num_blocks == -(-3 * 40 // 16)
