"""The proof that what is served is what was trained: all forms of a model on the same tokens.

    trainer         the training decoder: base and adapter, as a training process loads them
    live adapter    the serving engine on the base, the adapter in a slot
    merged          the serving engine on the exported folder: what users get
    transformers    on the exported folder
    peft            transformers on the base with the adapter
    vllm            on the exported folder, where it is installed

The served form continues the prompts greedily; the others are given the same tokens and asked, at
every position, what they would have chosen. Forms without adapters do without `live adapter` and
`peft`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import phalanx
from phalanx.engines.parity.observed import Observed
from phalanx.engines.parity.rules import Pair, RoundedRule, add_exact_rows, add_token_row
from phalanx.engines.parity.served import generate, observe_live, observe_merged
from phalanx.engines.parity.subject import Subject, read_subject
from phalanx.engines.parity.unserved import (
    observe_export,
    observe_peft,
    observe_trainer,
    observe_transformers,
)
from phalanx.engines.parity.vllm import vllm_choices, vllm_interpreter
from phalanx.engines.parity.weights import weight_distance
from phalanx.errors import JobError
from phalanx.report import Report

NUM_NEW = 32
_NO_MEASURE = "transformers, whose own rounding is the measure, is not installed"
_ORDER = ("trainer", "live adapter", "merged", "transformers", "peft", "vllm")


def prove(folder: str | Path, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW) -> Report:
    """Compare all forms of the model in a run folder.

    One model is in memory at a time. A missed gate is a row of the report, not an error.

    Args:
        folder: of a run that has ended.
        prompts: token ids of held-out text, each with at least one; equal ones count once.
        num_new: tokens that each is continued by.

    Returns:
        Gated rows "parity/..."; note "parity" is the sentence for people.

    Raises:
        JobError: `job/not-found` for a folder without a finished run; `data/empty` without prompts.
    """
    if not prompts or not all(prompts):
        rule = "needs prompts of at least one token"
        raise JobError("data/empty", "parity", f"{len(prompts)} prompts", rule)
    different = [list(each) for each in dict.fromkeys(map(tuple, prompts))]
    return _Proof(read_subject(folder), different, num_new).report()


class _Proof:
    def __init__(self, subject: Subject, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self.subject, self.num_new = subject, num_new
        self.served, self.exact = subject.served.dtype, subject.exact_dtype
        self.has_adapter = subject.lora is not None
        self.has_transformers = _version("transformers") != ""
        self._report = Report("Trained = served")
        self._forms = {"trainer"}
        self.sequences, self.generated = generate(subject, prompts, num_new, self.served)
        num = len(prompts)
        self._extent = f"{num} prompts x {num_new} tokens, {num * num_new} positions"

    def report(self) -> Report:
        """All rows."""
        self._add_files()
        trainer = self._see(observe_trainer, self.exact)
        gc.collect()  # torch's first use of the meta device leaves a cycle that holds the decoder
        exported = self._see(self._outside, self.exact)
        self._add_exact(trainer, exported)
        rule = self._add_rounded(trainer, exported) if self.subject.is_rounded else None
        self._add_vllm(exported, rule)
        self._report.notes["parity"] = self._sentence()
        return self._report

    @property
    def _outside(self):
        """Who else reads the exported folder."""
        return observe_transformers if self.has_transformers else observe_export

    @property
    def _outside_name(self) -> str:
        return "transformers" if self.has_transformers else "the training decoder on the export"

    def _see(self, observe, dtype: str) -> Observed:
        return observe(self.subject, self.sequences, dtype)

    def _pair(self, form: str, dtype: str, against: str, *packages: str) -> Pair:
        installed = [each for each in ("torch", *packages) if _version(each)]
        self._forms |= {form, *installed} & set(_ORDER)
        versions = [f"{each} {_version(each)}" for each in installed]
        note = (
            f"{dtype}, {self._extent}, {', '.join((f'phalanx {phalanx.__version__}', *versions))}"
        )
        return Pair(f"{form} {dtype}", against, note)

    # ---- files ---------------------------------------------------------------------------------

    def _add_files(self) -> None:
        """Config and weights of the export, beside those of the base."""
        subject, report = self.subject, self._report
        source = subject.source.config.with_dtype(self.served)
        differ = [
            name for name, value in vars(subject.served).items() if value != getattr(source, name)
        ]
        report.add(
            "parity/export/settings that differ from the base",
            float(len(differ)),
            "1",
            "measured",
            note=", ".join(differ) or "config.json, dtype aside",
            target=0.0,
        )
        quantity = "parity/export/largest distance of a weight"
        if not self.has_adapter:
            reason = "the run keeps no other copy of its trained weights to compare with"
            report.add(quantity, None, "1", "measured", note=reason)
            return
        found = weight_distance(subject)
        report.add(
            quantity,
            found.distance,
            "1",
            "measured",
            note=(
                "from base + scale * B A, over what one rounding moves it; 0: equal bits; "
                f"{found.num_tensors} tensors, {found.num_adapted} adapted; largest: {found.tensor}"
            ),
            target=0.0,
            tolerance=1.0,
        )

    # ---- exact dtype ---------------------------------------------------------------------------

    def _add_exact(self, trainer: Observed, exported: Observed) -> None:
        """Forms of the merged model against transformers, of the unmerged one against the trainer.

        Where the export is rounded, the two references differ by what that costs.
        """
        dtype, report, outside = self.exact, self._report, self._outside_name
        rounded = self.subject.is_rounded
        merged = self._see(observe_merged, dtype) if rounded else self.generated
        pair = self._pair("merged", dtype, outside, "transformers")
        add_exact_rows(report, pair, merged, exported)
        if not self.has_adapter:
            pair = self._pair("trainer", dtype, outside, "transformers")
            add_exact_rows(report, pair, trainer, exported)
            return
        if not rounded:
            add_exact_rows(report, self._pair("trainer", dtype, "merged"), trainer, merged)
        pair = self._pair("live adapter", dtype, "trainer")
        add_exact_rows(report, pair, self._see(observe_live, dtype), trainer)
        if self.has_transformers and _version("peft"):
            pair = self._pair("peft", dtype, "trainer", "transformers", "peft")
            add_exact_rows(report, pair, self._see(observe_peft, dtype), trainer)
        else:
            self._leave_out("peft", "transformers and peft are not installed (the hf extra)")

    # ---- served dtype --------------------------------------------------------------------------

    def _add_rounded(self, trainer: Observed, exported: Observed) -> RoundedRule | None:
        """What is served is in a narrower dtype: as good as transformers in it."""
        if not self.has_transformers:
            self._leave_out(f"merged {self.served}", _NO_MEASURE)
            return None
        rule = RoundedRule(self._see(observe_transformers, self.served), exported, self.num_new)
        report, exact = self._report, f"transformers in {self.exact}"
        pair = self._pair("merged", self.served, exact, "transformers")
        rule.add_rows(report, pair, self.generated, exported)
        reference, unmerged = exported, {"trainer": observe_trainer}
        if self.has_adapter:
            reference, exact = trainer, f"the trainer in {self.exact}"
            unmerged["live adapter"] = observe_live
            pair = self._pair("transformers", self.exact, exact, "transformers")
            rule.add_error_row(report, pair, exported, trainer)
        for form, observe in unmerged.items():
            pair = self._pair(form, self.served, exact, "transformers")
            rule.add_rows(report, pair, self._see(observe, self.served), reference)
        return rule

    # ---- vLLM, and the sentence ----------------------------------------------------------------

    def _add_vllm(self, exported: Observed, rule: RoundedRule | None) -> None:
        interpreter, reason = vllm_interpreter()
        if not reason and rule is None and self.subject.is_rounded:
            reason = _NO_MEASURE
        if reason:
            self._leave_out("vllm", reason)
            return
        choice_P, used = vllm_choices(interpreter, self.subject, self.sequences, self.served)
        if choice_P is None:
            self._leave_out("vllm", used)
            return
        pair = self._pair("vllm", self.served, f"{self._outside_name} in {self.exact}")
        pair = replace(pair, note=f"{pair.note}, vllm {used}")
        if rule is not None:
            rule.add_agreement_row(self._report, pair, choice_P, exported)
        else:
            add_token_row(self._report, pair, choice_P, exported)

    def _leave_out(self, form: str, reason: str) -> None:
        self._report.add(f"parity/{form}", None, "1", "measured", note=f"left out: {reason}")

    def _sentence(self) -> str:
        report, num = self._report, len(self.sequences.prompts)
        forms = ", ".join([each for each in _ORDER if each in self._forms])
        extent = f"{num} prompts x {self.num_new} tokens, forms {forms}"
        missed = report.missed
        if not missed:
            return f"trained = served: {extent}"
        gates = [row for row in report.rows if row.passed is not None]
        first = missed[0].quantity.removeprefix("parity/")
        return (
            f"trained is NOT served: {len(missed)} of {len(gates)} comparisons missed, the first: "
            f"{first} = {missed[0].value:g}; {extent}"
        )


@cache
def _version(package: str) -> str:
    """Its version; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
