"""Trained = served: the proof holds for every family, and no seeded fault passes it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.engines.parity import proof as proof_module
from phalanx.engines.parity.observed import Observed, Sequences
from phalanx.engines.parity.proof import prove
from phalanx.engines.parity.rules import Pair, RoundedRule, add_exact_rows
from phalanx.engines.serve import model as serve_model
from phalanx.errors import JobError
from phalanx.models.hf import read_tensors, save_tuned
from phalanx.models.lora import merged_tensors
from phalanx.models.peft_folder import load_adapter
from phalanx.models.spec import read_config
from phalanx.report import Report
from tests.engines.parity_cases import NUM_NEW, prompts, write_run
from tests.models.families import FAMILIES

MODELS = [(family, "float32") for family in FAMILIES]
MODELS += [(family, "bfloat16") for family in ("gemma3", "gemma4", "gemma4_ple", "llama3")]
FORMS = "forms trainer, live adapter, merged, transformers, peft"


def proof(run: Path) -> Report:
    return prove(run, prompts(read_config(run / "export").vocab_size), NUM_NEW)


def missed(report: Report) -> list[str]:
    return [row.quantity.removeprefix("parity/") for row in report.missed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(family, dtype) -> a run folder of it, made once."""
    made: dict[tuple[str, str], Path] = {}

    def run_of(family: str, dtype: str) -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            made[family, dtype] = write_run(folder, family, dtype)
        return made[family, dtype]

    return run_of


@pytest.fixture
def run(request, runs, tmp_path) -> Path:
    """A copy of a gemma3 run, to be damaged."""
    return Path(shutil.copytree(runs("gemma3", request.param), tmp_path / "run"))


@pytest.mark.parametrize("family, dtype", MODELS)
def test_trained_is_served(family, dtype, runs):
    report = proof(runs(family, dtype))
    assert missed(report) == []
    said = report.notes["parity"]
    assert said == f"trained = served: 6 prompts x {NUM_NEW} tokens, {FORMS}"
    gates = {row.quantity: row for row in report.rows if row.passed is not None}
    assert len(gates) >= 9
    for row in report.rows[2:-1]:
        assert f"{6 * NUM_NEW} positions" in row.note and "torch 2" in row.note, row
    assert any("bfloat16" in quantity for quantity in gates) == (dtype == "bfloat16")


# ---- faults ------------------------------------------------------------------------------------


def edit_json(path: Path, change) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def scale_in_the_adapter(run: Path) -> None:
    def change(table):
        table["lora_alpha"] *= 1.1

    edit_json(run / "adapter" / "adapter_config.json", change)


def merge_again(run: Path, alpha: float, without: str = "no such layer") -> None:
    """Write the export anew, with another scale or without the adapters of some modules."""
    base = json.loads((run / "job.json").read_text())["sections"]["model"]["name"]
    lora, adapters = load_adapter(run / "adapter")
    adapters = {name: value for name, value in adapters.items() if without not in name}
    merged = merged_tensors(read_tensors(base), adapters, replace(lora, alpha=alpha))
    save_tuned(run / "export", base, merged, overwrite=True)


def scale_in_the_export(run: Path) -> None:
    merge_again(run, 7.7)


def layer_not_merged(run: Path) -> None:
    merge_again(run, 7.0, without="layers.2.")


def tensor_perturbed(run: Path) -> None:
    path = run / "export" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.post_attention_layernorm.weight"] += 0.1
    save_file(tensors, path, metadata={"format": "pt"})


def single_weight_perturbed(run: Path) -> None:
    path = run / "export" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.mlp.down_proj.weight"][5, 7] *= 1.02
    save_file(tensors, path, metadata={"format": "pt"})


def wrong_theta(run: Path) -> None:
    def change(table):
        assert "rope" in json.dumps(table)
        for key in ("rope_theta", "rope_local_base_freq"):
            if key in table:
                table[key] *= 30
        for kind in table.get("rope_parameters", {}).values():
            kind["rope_theta"] *= 30

    edit_json(run / "export" / "config.json", change)


WEIGHT = "export/largest distance of a weight"
IN_FILES = {
    scale_in_the_adapter: "live adapter float32/tokens that differ",
    scale_in_the_export: WEIGHT,
    layer_not_merged: WEIGHT,
    tensor_perturbed: WEIGHT,
    single_weight_perturbed: WEIGHT,
    wrong_theta: "export/settings that differ from the base",
}
FAULTS = [("bfloat16", fault) for fault in IN_FILES]
FAULTS += [("float32", layer_not_merged), ("float32", wrong_theta)]


@pytest.mark.parametrize("run, fault", FAULTS, indirect=["run"])
def test_a_fault_in_the_files_is_a_missed_gate(run, fault):
    """Large ones are told by logits alone too, so also where nobody looks at the files."""
    fault(run)
    report = proof(run)
    assert IN_FILES[fault] in missed(report)
    assert report.notes["parity"].startswith("trained is NOT served: ")
    of_logits = [each for each in missed(report) if not each.startswith("export/")]
    assert of_logits or fault in (scale_in_the_export, single_weight_perturbed)


@pytest.mark.parametrize("run", ["bfloat16"], indirect=True)
def test_a_form_whose_tokens_are_shifted_is_a_missed_gate(run, monkeypatch):
    inputs = Sequences.inputs
    monkeypatch.setattr(Sequences, "inputs", lambda self, at: [3, *inputs(self, at)])
    assert "merged float32/tokens that differ" in missed(proof(run))


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_a_serving_decoder_that_computes_something_else_is_a_missed_gate(run, monkeypatch):
    rope = serve_model.kind_rope

    def wrong(kind, positions_S):
        return rope(kind, positions_S + 1)[0], rope(kind, positions_S)[1]

    monkeypatch.setattr(serve_model, "kind_rope", wrong)
    found = missed(proof(run))
    assert "merged float32/largest logit difference" in found
    assert "live adapter float32/largest logit difference" in found


# ---- without adapters --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_fine_tuning_has_no_adapter_forms(tmp_path, dtype):
    report = proof(write_run(tmp_path, "qwen3", dtype, method="full"))
    assert missed(report) == []
    said = report.notes["parity"]
    assert said.endswith("forms trainer, merged, transformers")
    quantity = "parity/export/largest distance of a weight"
    assert next(row for row in report.rows if row.quantity == quantity).value is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_transformers_our_own_decoder_reads_the_export(runs, monkeypatch, dtype):
    monkeypatch.setattr(proof_module, "_version", lambda package: "")
    report = proof(runs("gemma3", dtype))
    assert missed(report) == []
    assert report.notes["parity"].endswith("forms trainer, live adapter, merged")
    left_out = [row.quantity for row in report.rows if row.note.startswith("left out")]
    assert ("parity/merged bfloat16" in left_out) == (dtype == "bfloat16")
    assert "parity/peft" in left_out


def test_what_cannot_be_compared_is_refused(tmp_path, runs):
    run = runs("gemma3", "float32")
    with pytest.raises(JobError, match="at least one token"):
        prove(run, [])
    with pytest.raises(JobError, match="at least one token"):
        prove(run, [[3], []])
    unfinished = Path(shutil.copytree(run, tmp_path / "run"))
    (unfinished / "train.json").unlink()
    with pytest.raises(JobError, match="no finished training"):
        prove(unfinished, [[3]])


# ---- vLLM --------------------------------------------------------------------------------------


def install_vllm(folder: Path, monkeypatch, shift: int) -> None:
    """A `vllm` on PATH whose interpreter has a module of that name: our decoder in its interface.

    With `shift`, its choices are those of another position.
    """
    (folder / "modules").mkdir()
    (folder / "modules" / "vllm.py").write_text(STAND_IN.format(root=ROOT, shift=shift))
    script = folder / "vllm"
    script.write_text(f"#!/usr/bin/env -S PYTHONPATH={folder / 'modules'} {sys.executable}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import sys
from types import SimpleNamespace
sys.path.insert(0, "{root}")
import torch
from phalanx.models.hf import load_decoder

__version__ = "0.0"
SamplingParams = lambda **options: SimpleNamespace(**options)


class LLM:
    def __init__(self, model, dtype, **options):
        self.decoder = load_decoder(model, dtype=dtype)

    def generate(self, prompts, sampling):
        return [self.scored(each["prompt_token_ids"]) for each in prompts]

    @torch.inference_mode()
    def scored(self, tokens):
        logits = self.decoder.logits(self.decoder(torch.tensor(tokens)))
        best = logits.argmax(-1).roll({shift}).tolist()
        scores = [{{t: SimpleNamespace(rank=7), b: SimpleNamespace(rank=1)}}
                  for t, b in zip(tokens[1:], best)]
        return SimpleNamespace(prompt_logprobs=[None, *scores])
"""


@pytest.mark.dist
@pytest.mark.parametrize("shift", [0, 1])
def test_vllm_is_asked_where_its_own_interpreter_is_found(runs, tmp_path, monkeypatch, shift):
    install_vllm(tmp_path, monkeypatch, shift)
    report = proof(runs("gemma3", "float32"))
    name = "vllm float32/tokens that differ"
    assert missed(report) == ([name] if shift else [])
    row = next(each for each in report.rows if each.quantity == f"parity/{name}")
    assert "vllm 0.0" in row.note
    assert report.notes["parity"].endswith(f"{FORMS}, vllm")


@pytest.mark.dist
def test_a_vllm_that_fails_is_left_out_with_its_last_words(runs, tmp_path, monkeypatch):
    install_vllm(tmp_path, monkeypatch, 0)
    (tmp_path / "modules" / "vllm.py").write_text("raise RuntimeError('no such device')")
    report = proof(runs("gemma3", "float32"))
    row = next(each for each in report.rows if each.quantity == "parity/vllm")
    assert row.note == "left out: vllm failed: RuntimeError: no such device"
    assert missed(report) == [] and report.notes["parity"].endswith(FORMS)


# ---- rules -------------------------------------------------------------------------------------


def observed(logits_PV: torch.Tensor) -> Observed:
    best = logits_PV.topk(2)
    gap_P = best.values[:, 0] - best.values[:, 1]
    return Observed(best.indices[:, 0], best.values[:, 0], gap_P, logits_PV[:, 0], logits_PV)


@pytest.mark.parametrize("gap, num_wrong", [(0.5e-3, 0), (1.5e-3, 1)])
def test_another_token_is_allowed_at_near_ties_of_the_reference_only(gap, num_wrong):
    reference = torch.zeros(4, 5)
    reference[:, 2] = 1.0
    reference[1, 3] = 1.0 - gap
    form = reference.clone()
    form[1, 3] = 1.0001
    report = Report("")
    add_exact_rows(report, Pair("form", "reference", "note"), observed(form), observed(reference))
    tokens = report.rows[0]
    assert tokens.value == num_wrong and tokens.passed == (num_wrong == 0)
    assert f"{1 - num_wrong} more at near-ties" in tokens.note


@pytest.mark.parametrize("times, passes", [(0.9, True), (1.0, True), (1.5, False)])
def test_an_error_may_not_exceed_that_of_transformers(times, passes):
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(200, 50, generator=generator)
    noise, other = (0.01 * torch.randn(200, 50, generator=generator) for _ in range(2))
    rule = RoundedRule(observed(exact + noise), observed(exact), num_new=10)
    report = Report("")
    form = observed(exact + times * other)
    rule.add_rows(report, Pair("form", "reference", "note"), form, observed(exact))
    assert report.rows[0].passed is passes
    assert report.rows[0].value == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize("num_worse, passes", [(0, True), (2, True), (30, False)])
def test_agreement_may_be_one_point_and_two_standard_errors_lower(num_worse, passes):
    exact = torch.zeros(1000, 8)
    exact[:, 1] = 1.0
    form = exact.clone()
    form[:num_worse, 2] = 2.0
    rule = RoundedRule(observed(exact + 0.01), observed(exact), num_new=10)
    report = Report("")
    pair = Pair("form", "reference", "note")
    rule.add_agreement_row(report, pair, observed(form).choice_P, observed(exact))
    assert report.rows[0].value == pytest.approx(-num_worse / 1000)
    assert report.rows[0].passed is passes
