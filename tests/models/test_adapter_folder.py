"""PEFT folders in and out, and what a job takes from the adapter that it starts from."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.job.sections import TrainSection
from phalanx.models.adapter_folder import adapter_weights, lora_of, read_adapter
from phalanx.models.hf import save_folder
from phalanx.models.lora import inject
from phalanx.models.parameters import initial_values, load_sharded
from phalanx.models.peft_folder import load_adapter, save_adapter
from phalanx.models.spec import LoraSpec, lora_tensors
from tests.models.cases import CONFIGS, random_decoder, random_tokens

CONFIG = CONFIGS["grouped_queries"]
LORA = LoraSpec(rank=3, alpha=7, targets=("q_proj", "down_proj"))  # alpha != rank


def adapters(lora: LoraSpec = LORA) -> dict[str, torch.Tensor]:
    """Adapter tensors in which B is not zero."""
    drawn = dict(initial_values(4, lora_tensors(CONFIG, lora).values()))
    return {name: value if "lora_A" in name else value + 0.1 for name, value in drawn.items()}


@pytest.fixture
def folder(tmp_path):
    return save_adapter(tmp_path / "adapter", CONFIG, LORA, adapters().items(), base_model="a/b")


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adapted(folder):
    decoder = random_decoder(CONFIG)
    read = read_adapter(folder)
    inject(decoder, read.lora)
    names = [name for name, _ in decoder.named_parameters() if ".lora_" in name]
    load_sharded(decoder, read.weights, names=names)
    return decoder.eval()


def test_saved_adapter_is_read_back(folder):
    lora, tensors = load_adapter(folder)
    assert (lora.rank, lora.alpha, len(tensors)) == (3, 7, 4 * CONFIG.num_layers)
    assert all(torch.equal(tensors[name], value) for name, value in adapters().items())
    assert read_adapter(folder).base_model == "a/b"
    table = json.loads((folder / "adapter_config.json").read_text())
    assert table["target_modules"] == ["down_proj", "q_proj"]


def test_whole_names_are_written_where_short_ones_would_say_more(tmp_path):
    lora = LoraSpec(rank=2, alpha=2, targets=("model.layers.1.mlp.*",))
    drawn = initial_values(0, lora_tensors(CONFIG, lora).values())
    folder = save_adapter(tmp_path / "a", CONFIG, lora, drawn, prefix="model.language_model.")
    table = json.loads((folder / "adapter_config.json").read_text())
    start = "model.language_model.layers.1.mlp"
    wanted = [f"{start}.{name}_proj" for name in ("down", "gate", "up")]
    assert table["target_modules"] == wanted
    stored = load_file(folder / "adapter_model.safetensors")
    assert f"base_model.model.{start}.up_proj.lora_A.weight" in stored
    assert set(load_adapter(folder)[1]) == set(lora_tensors(CONFIG, lora))


def test_saved_adapter_gives_equal_logits_in_peft(tmp_path, folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_folder(tmp_path / "base", CONFIG, random_decoder(CONFIG).state_dict().items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs, ours = PeftModel.from_pretrained(base, folder), adapted(folder)
    tokens = random_tokens(CONFIG, 30)
    with torch.no_grad():
        mine = ours.logits(ours(tokens))
        torch.testing.assert_close(mine, theirs(tokens[None]).logits[0], rtol=0, atol=1e-4)
        plain = random_decoder(CONFIG)
        assert (mine - plain.logits(plain(tokens))).abs().max() > 1e-2


@pytest.mark.parametrize("init", [False, "gaussian"])
def test_adapter_saved_by_peft_gives_equal_logits_here(tmp_path, init):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_folder(tmp_path / "base", CONFIG, random_decoder(CONFIG).state_dict().items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = LoraConfig(
        r=2, lora_alpha=5, target_modules=["o_proj", "gate_proj"], init_lora_weights=init
    )
    theirs = get_peft_model(base, options).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours, tokens = adapted(tmp_path / "adapter"), random_tokens(CONFIG, 30)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(ours.logits(ours(tokens)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("use_rslora", True),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 9}),
        ("alpha_pattern", {"q_proj": 9}),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2]]),
        ("something_new", True),
    ],
)
def test_what_the_merge_would_not_honour_is_refused_by_name(folder, key, value):
    edit(folder, **{key: value})
    with pytest.raises(JobError, match=key) as caught:
        read_adapter(folder)
    assert caught.value.code == "model/unknown"


def test_what_peft_writes_by_default_is_read(folder):
    from peft import LoraConfig

    table = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"]).to_dict()
    edit(folder, **{k: sorted(v) if isinstance(v, set) else v for k, v in table.items()})
    assert read_adapter(folder).lora.alpha == 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"), "miss"),
        (lambda t: t.update({"x.lora_A.weight": torch.ones(3, 4)}), "x.lora_B"),
        (lambda t: t.update({name: torch.ones(4, 4) for name in t}), "rank 3"),
        (lambda t: t.clear(), "no adapter"),
    ],
)
def test_unpaired_and_misshapen_tensors_are_refused(folder, change, says):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(JobError, match=says) as caught:
        read_adapter(folder)
    assert caught.value.code == "model/tensor"


def test_adapter_of_another_model_is_refused_with_the_tensor(folder, tmp_path):
    lora = LoraSpec(rank=2, alpha=2, targets=("model.layers.3.mlp.up_proj",))
    drawn = initial_values(0, lora_tensors(CONFIG, lora).values())
    deeper = save_adapter(tmp_path / "deeper", CONFIG, lora, drawn)
    for path, says in ((folder, "must have the shape"), (deeper, "adapts no matrix")):
        with pytest.raises(JobError, match=says) as caught:
            adapter_weights(path, CONFIGS["one_kv_head_capped"])  # three layers, other sizes
        assert caught.value.code == "model/tensor" and "layers" in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "code"),
    [("adapter_config.json", "job/not-found"), ("adapter_model.safetensors", "environment/trust")],
)
def test_missing_files_and_pickles_are_told(folder, missing, code):
    (folder / missing).unlink()
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(JobError) as caught:
        read_adapter(folder)
    assert caught.value.code == code


def job(origin=(), **train) -> Job:
    given = {f"train.{key}": "flag" for key in origin}
    return Job(train=TrainSection(method="lora", **train), origin=given)


def test_keys_that_were_not_given_are_the_adapters(folder):
    lora = lora_of(job(adapter=str(folder)), CONFIG)
    assert (lora.rank, lora.alpha) == (3, 7.0)
    assert set(lora_tensors(CONFIG, lora)) == set(adapters())


def test_without_an_adapter_the_job_decides():
    lora = lora_of(job(lora_rank=5, lora_targets=("up_proj",)), CONFIG)
    assert (lora.rank, lora.alpha, lora.targets) == (5, 32.0, ("up_proj",))
    assert lora_of(Job(train=TrainSection(method="full")), CONFIG) is None


def test_keys_that_were_given_agree_or_are_refused(folder):
    fits = {"lora_rank": 3, "lora_alpha": 7.0, "lora_targets": ("*.q_proj", "down_proj")}
    assert lora_of(job(adapter=str(folder), **fits), CONFIG).rank == 3
    dropped = lora_of(job(adapter=str(folder), lora_dropout=0.1), CONFIG)
    assert dropped.dropout == 0.1  # no part of the weights
    for origin, wrong in (
        ((), {"lora_rank": 4}),  # in Python
        (("lora_rank",), {}),  # the default, but asked for
        ((), {"lora_alpha": 8.0}),
        ((), {"lora_targets": ("q_proj",)}),
    ):
        with pytest.raises(JobError, match="differs from the adapter") as caught:
            lora_of(job(origin, adapter=str(folder), **wrong), CONFIG)
        assert caught.value.code == "job/bad-value"
