"""The fit of three numbers finds those that rows were made with, and judges by rows left out."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from phalanx.cost.rl_efficiency import rl_efficiency
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.rl_rows import predict_rl, read_rl

script = import_module("benchmarks.fit_rl")


def test_rows_made_by_the_formula_give_its_numbers_back():
    truth = replace(rl_efficiency(), learning_factor=2.0, packed_bytes_per_s=10e9, apart_factor=2.0)
    rows = [row for row in read_rl(seen_table("training")) if row.is_complete]
    made = [
        replace(row, measured_step_s=step.total_s)
        for row, step in zip(rows, predict_rl(rows, truth))
    ]
    fit = script.Fit(made)
    found = fit.best(range(len(made)))
    assert found.learning_factor == pytest.approx(2.0, abs=0.26)
    assert found.packed_bytes_per_s == pytest.approx(10e9, rel=0.25)
    assert float(np.median(np.abs(script.left_out(fit)))) < 0.05
