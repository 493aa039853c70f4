"""What published engines reach of the formulas of `cost.serving_step`: shares, starts and bars.

One table (`serving_efficiency.json`, written by `benchmarks/fit_serving.py`): each coefficient is a
value for all, times factors for the accelerator and its maker's generation, the engine and its
version, the precision and the load generator, all shrunk towards 1, so what was never seen gets the
value of its kind. Nothing is fitted per model, row or group of rows. `describe` says how many rows
stand behind each factor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from phalanx.cost.serving_plans import ServingPlans

FACTORS = ("accelerator", "hardware", "family", "generation", "precision", "load", "cell")
Keys = Mapping[str, np.ndarray]  # factor -> text [N]


class Coefficient(NamedTuple):
    """A fitted number.

    Attributes:
        start: where the fit begins, and what shrinkage pulls to.
        spread: how far `start` may be wrong, as a standard deviation of its logarithm.
        factors: by what it varies, with the standard deviation of each factor's logarithm.
        meaning: what it is, with its unit.
    """

    start: float
    spread: float
    factors: Mapping[str, float]
    meaning: str


_ENGINE = {"family": 0.4, "generation": 0.2, "hardware": 0.2, "accelerator": 0.15}
_SHARE = {"family": 0.2, "hardware": 0.2, "accelerator": 0.15, "precision": 0.2}
_LINK = {"hardware": 0.3, "accelerator": 0.2}
_LOAD = {"family": 0.5, "load": 0.7, "generation": 0.3}
COEFFICIENTS: Mapping[str, Coefficient] = {
    "weight_share": Coefficient(0.75, 0.2, _SHARE, "of memory bandwidth, reading weights"),
    "expert_share": Coefficient(0.8, 0.4, _SHARE, "of that and of products, in experts"),
    "cache_share": Coefficient(0.6, 0.3, _SHARE, "of memory bandwidth, reading the cache"),
    "product_share": Coefficient(0.7, 0.3, _SHARE, "of matrix products, decoding"),
    "prefill_share": Coefficient(0.6, 0.3, _SHARE, "of matrix products, in prompts"),
    "score_share": Coefficient(0.4, 0.4, _SHARE, "of scores"),
    "spread": Coefficient(0.8, 0.4, {}, "of tokens that choose experts as if at random"),
    "skew": Coefficient(0.5, 0.7, {"family": 0.3}, "of the skew that random choices have"),
    "step_s": Coefficient(1e-3, 0.7, _ENGINE, "seconds a step, of scheduling and sampling"),
    "row_s": Coefficient(1e-5, 1.0, _ENGINE, "seconds a step for each request of a replica"),
    "layer_s": Coefficient(2.5e-5, 0.5, _ENGINE, "seconds a layer, of starting kernels"),
    "expert_layer_s": Coefficient(2e-5, 0.7, _ENGINE, "more, with experts"),
    "latent_layer_s": Coefficient(1e-5, 0.7, _ENGINE, "more, with latent attention"),
    "linear_layer_s": Coefficient(1e-5, 0.7, _ENGINE, "more, with linear attention"),
    "index_layer_s": Coefficient(1e-5, 0.7, {"family": 0.3}, "more, with an index of keys"),
    "reduce_s": Coefficient(1e-5, 0.5, _ENGINE, "seconds of starting an all-reduce"),
    "gather_s": Coefficient(2e-5, 0.7, _ENGINE, "of gathering or scattering around experts"),
    "link_share": Coefficient(0.6, 0.4, _LINK, "of links' bandwidth"),
    "small_tokens": Coefficient(300.0, 0.7, {"family": 0.3}, "tokens at which products reach half"),
    "eager": Coefficient(1.5, 0.5, {"family": 0.3}, "starts in prompts over those in decoding"),
    "request_s": Coefficient(0.02, 0.7, _LOAD, "seconds of a request before its first step"),
    "request_token_s": Coefficient(2e-6, 1.0, _LOAD, "of it for each prompt token"),
    "hand_s": Coefficient(0.05, 0.7, {"family": 0.7}, "of handing a cache to another engine"),
    "warm_s": Coefficient(0.3, 1.0, _LOAD, "of the load's first requests, shared by all its rows"),
    "burst": Coefficient(0.1, 0.7, _LOAD, "of prompts that arrive with a full wave of others"),
    "queue": Coefficient(0.3, 0.8, _LOAD, "of the others' prompts met, by the share of prompts"),
    "stall": Coefficient(0.9, 0.3, _LOAD, "of others' prompts that delay a decoding request"),
    "together": Coefficient(0.5, 0.7, {"family": 0.4}, "of replicas that compute prompts at once"),
    "decode_level": Coefficient(1.0, 1e-3, {"cell": 0.15}, "times a decoding step"),
    "prefill_level": Coefficient(1.0, 1e-3, {"cell": 0.2}, "times a prompt"),
}
FIXED = {"chunk_tokens": 8192.0}
UNSEEN = "unseen"  # regime of accelerators and engine versions without fitted rows
_UNKNOWN_BAR = (0.5, 2.0)  # of a metric without cross-validated rows


@dataclass(frozen=True)
class ServingEfficiency:
    """Coefficients and bars.

    Attributes:
        values: coefficient -> value for all.
        factors: coefficient -> factor -> key -> multiplier.
        rows: factor -> key -> fitted rows behind it.
        bars: metric -> regime -> (4th, 96th percentile) of measured over predicted on folds that
            the fit did not see: 90 % bars, a little wider because further rows lie further off.
        sources: of the rows.
        cross_validation: by metric, what the fit misses on groups that it has not seen.
    """

    values: Mapping[str, float]
    factors: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    bars: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    cross_validation: Mapping[str, Any] = field(default_factory=dict)

    def rates(self, plans: ServingPlans, load: str = "") -> dict[str, np.ndarray]:
        """Columns that `cost.serving_step` multiplies with, [N] each."""
        return self.rates_of(self._keys(plans, load))

    def _keys(self, plans: ServingPlans, load: str) -> dict[str, np.ndarray]:
        """Keys of plans; engines without a version get the newest that has rows."""
        newest = {name: self.newest(name) for name in set(plans.family[plans.generation == ""])}
        generation = [
            each or newest[family]
            for family, each in zip(plans.family, plans.generation, strict=True)
        ]
        plans = replace(plans, generation=np.asarray(generation, dtype=object))
        return keys_of(plans, np.full(plans.tensor.shape, load, dtype=object))

    def newest(self, family: str) -> str:
        """The highest version of an engine that has rows; empty where none has."""
        names = [key.partition(" ")[2] for key in self.rows.get("generation", {})
                 if key.partition(" ")[0] == family]  # fmt: skip
        versions = [name for name in names if re.fullmatch(r"\d+(\.\d+)+", name)]
        return max(versions, key=lambda name: [int(part) for part in name.split(".")], default="")

    def has_rows(self, accelerator: str, family: str, generation: str) -> bool:
        """Whether both the accelerator and the engine's version have fitted rows."""
        is_known = accelerator in self.rows.get("accelerator", {})
        return is_known and f"{family} {generation}" in self.rows.get("generation", {})

    def rates_of(self, keys: Keys) -> dict[str, np.ndarray]:
        """As `rates`, by `keys_of`."""
        count = len(keys["family"])
        found = {}
        for name, value in self.values.items():
            column = np.full(count, value)
            for factor, table in self.factors.get(name, {}).items():
                column = column * _looked_up(table, keys[factor])
            found[name] = column
        return found | {name: np.full(count, value) for name, value in FIXED.items()}

    def bar(self, metric: str, *regimes: str) -> tuple[float, float]:
        """90 % bar of measured over predicted, of the first regime that has one."""
        table = self.bars.get(metric, {})
        return next((table[name] for name in regimes if name in table), _UNKNOWN_BAR)

    def describe(self, plans: ServingPlans) -> list[str]:
        """For the first plan: which rows its coefficients rest on."""
        keys = self._keys(plans, "")
        total = sum(self.sources.values())
        lines = [f"coefficients: fitted on {total:,} published rows of {len(self.sources)} sources"]
        for factor in ("accelerator", "hardware", "family", "generation", "precision"):
            key = keys[factor][0]
            if number := self.rows.get(factor, {}).get(key):
                lines.append(f"{factor} {key}: {number:,} rows")
            elif key:
                lines.append(f"{factor} {key}: no rows; the value for all is taken")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The form that JSON holds."""
        return {
            "what": "coefficients of cost.serving_step; see benchmarks/fit_serving.py",
            "values": self.values,
            "factors": self.factors,
            "rows": self.rows,
            "bars": self.bars,
            "sources": self.sources,
            "cross_validation": self.cross_validation,
        }

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> ServingEfficiency:
        """What `to_dict` gave."""
        bars = {
            metric: {regime: (float(low), float(high)) for regime, (low, high) in each.items()}
            for metric, each in table["bars"].items()
        }
        kept = {name: table[name] for name in ("rows", "sources", "cross_validation")}
        return ServingEfficiency(table["values"], table["factors"], bars=bars, **kept)


def keys_of(plans: ServingPlans, load: np.ndarray) -> dict[str, np.ndarray]:
    """Text that the tables are looked up by; a cell joins accelerator, precision and engine."""
    generation = _joined(plans.family, plans.generation)
    return {
        "accelerator": plans.accelerator,
        "hardware": plans.hardware,
        "precision": plans.precision,
        "family": plans.family,
        "generation": generation,
        "load": load,
        "cell": _joined(plans.accelerator, plans.precision, generation),
    }


@cache
def serving_efficiency() -> ServingEfficiency:
    """The table that comes with Phalanx."""
    path = files("phalanx.cost") / "serving_efficiency.json"
    return ServingEfficiency.from_dict(json.loads(path.read_text("utf-8")))


def _looked_up(table: Mapping[str, float], keys: np.ndarray) -> np.ndarray:
    known, inverse = np.unique(keys.astype(str), return_inverse=True)
    return np.asarray([table.get(key, 1.0) for key in known])[inverse]


def _joined(*columns: np.ndarray) -> np.ndarray:
    return np.asarray([" ".join(each) for each in zip(*columns, strict=True)], dtype=object)
