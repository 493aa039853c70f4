"""Export: one tensor at a time, the base repository's names, and no rank left waiting."""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.data.chat import PLAIN_TEMPLATE
from phalanx.engines import trainer_export
from phalanx.engines.trainer_export import export, require_exports
from phalanx.errors import JobError, WorldError
from phalanx.job import Job
from phalanx.job.sections import DataSection, ModelSection, PlanSection, TrainSection
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.source import ModelSource, model_source
from phalanx.models.spec import LoraSpec, canonical_tensors, lora_tensors
from tests.models.families import tiny_config

CONFIG = tiny_config("qwen3")
LORA = LoraSpec(rank=2, alpha=6, targets=("down_proj", "q_proj"))


def values() -> dict[str, torch.Tensor]:
    return dict(initial_values(1, canonical_tensors(CONFIG).values()))


@pytest.fixture
def base(tmp_path):
    return save_folder(tmp_path / "base", CONFIG, values().items())


def job(base, method: str, **data) -> Job:
    return Job(
        model=ModelSection(name=str(base), dtype="float32"),
        train=TrainSection(method=method),
        data=DataSection(**data),
    )


def exported(tmp_path, trained, source: ModelSource, of: Job, lora=None, leads: bool = True):
    model = SimpleNamespace(whole_trainable=lambda: trained, lora=lora)
    process = SimpleNamespace(leads=leads, sum=float)
    return export(model, source, tmp_path, process, of)


def gathered(alive: list[int], seen: list[weakref.ref]):
    """Trained tensors, noting how many earlier ones are still held when the next one comes."""
    for name, value in values().items():
        alive.append(sum(each() is not None for each in seen))
        tensor = value * 2
        seen.append(weakref.ref(tensor))
        yield name, tensor
        del tensor


def test_full_fine_tuning_holds_one_tensor_at_a_time(tmp_path, base):
    of = job(base, "full")
    alive: list[int] = []
    names = exported(tmp_path, gathered(alive, []), model_source(of, str), of)
    assert names == {"export": "export"}
    assert max(alive) <= 1 and len(alive) == len(values())
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(written[name], value * 2) for name, value in values().items())


def test_rank_that_cannot_write_gathers_to_the_end_with_the_others(tmp_path, base, monkeypatch):
    of, alive = job(base, "full"), []
    monkeypatch.setattr(trainer_export, "save_tuned", refuse)
    with pytest.raises(WorldError, match="no room"):
        exported(tmp_path, gathered(alive, []), model_source(of, str), of)
    assert len(alive) == len(values())


def refuse(*_arguments, **_options):
    raise JobError("environment/disk", "export", None, "no room")


def test_other_ranks_gather_and_write_nothing(tmp_path, base):
    of, alive = job(base, "full"), []
    exported(tmp_path, gathered(alive, []), model_source(of, str), of, leads=False)
    assert len(alive) == len(values()) and not (tmp_path / "export").exists()


def adapters() -> dict[str, torch.Tensor]:
    drawn = initial_values(4, lora_tensors(CONFIG, LORA).values())
    return {name: v if "lora_A" in name else v + 0.1 for name, v in drawn}


def test_adapters_are_merged_under_the_names_of_a_multimodal_base(tmp_path, base):
    """Other towers are copied, the adapter fits the base's own class, the template is the job's."""
    prefix, tower = "model.language_model.", {"model.vision_tower.w": torch.randn(3)}
    path = base / "model.safetensors"
    text = {n if n.startswith("lm_head") else prefix + n[6:]: v for n, v in values().items()}
    save_file(text | tower, path)
    (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0] }}")
    of = job(base, "lora", chat_template=str(template))
    names = exported(tmp_path, iter(adapters().items()), model_source(of, str), of, LORA)
    assert names == {"export": "export", "adapter": "adapter"}
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert set(written) == set(text | tower)
    down = "layers.1.mlp.down_proj"
    a, b = (adapters()[f"model.{down}.lora_{part}.weight"] for part in "AB")
    expected = text[f"{prefix}{down}.weight"] + 3.0 * b @ a
    torch.testing.assert_close(written[f"{prefix}{down}.weight"], expected)
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert f"{prefix}{down}" in table["target_modules"] and table["lora_alpha"] == 6
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == "{{ messages[0] }}"


@pytest.mark.parametrize(("method", "end", "is_written"), [
    ("lora", "</s>", True), ("pretrain", "</s>", False), ("lora", "", False),
])  # fmt: skip
def test_a_base_without_template_is_exported_with_the_one_it_was_tuned_with(
    base, tmp_path, method, end, is_written
):
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    of = job(base, method)
    trained = adapters() if method == "lora" else values()
    lora = LORA if method == "lora" else None
    exported(tmp_path, iter(trained.items()), model_source(of, str), of, lora)
    path = tmp_path / "export" / "chat_template.jinja"
    assert path.exists() == is_written
    assert not is_written or path.read_text() == PLAIN_TEMPLATE


def test_formats_are_checked_before_training(base):
    source = model_source(job(base, "full"), str)
    for formats, says in ((("ggfu",), "gguf"), (("gguf",), "tokenizer.json")):
        of = Job(plan=PlanSection(exports=formats))
        with pytest.raises(JobError, match=says):
            require_exports(of, source)
