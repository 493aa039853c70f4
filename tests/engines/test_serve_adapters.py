"""Adapters beside their base in one batch give what each merged model gives alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engines.serve.adapters import BASE, AdapterSlots
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.world import Cancel
from phalanx.errors import JobError, PlanError
from phalanx.models.decoder import Decoder
from phalanx.models.lora import merged_tensors
from phalanx.models.peft_folder import save_adapter
from phalanx.models.spec import DecoderConfig, LoraSpec, lora_tensors
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import GREEDY, make_engine, prompt_of, request, write_model
from tests.engines.test_serve_engine import run
from tests.models.cases import random_decoder, random_tokens
from tests.models.families import FAMILIES, tiny_config

LIMITS = KvLimits(max_tokens=96, max_running=8, max_step_tokens=33)
# alpha != rank; different ranks and modules, one for a single layer only
SPECS = {
    "wide": LoraSpec(rank=5, alpha=8.0, targets=("*",)),
    "queries": LoraSpec(rank=3, alpha=24.0, targets=("q_proj", "down_proj")),
    "one_layer": LoraSpec(
        rank=7, alpha=30.0, targets=("model.layers.1.mlp.*", "model.layers.1.*.o_proj")
    ),
}
LENGTHS = (1, 19, 40)


def adapter(config: DecoderConfig, lora: LoraSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random factors that change the output of every adapted matrix by about a tenth of it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator) * (spec.init_std or 0.03)
        for name, spec in lora_tensors(config, lora).items()
    }


def engine_of(config: DecoderConfig, weights, **options) -> ServeEngine:
    model = PackedDecoder(config)
    model.update(weights.items())
    dtype = getattr(torch, config.dtype)
    kv = PagedKv(config, LIMITS.max_running * LIMITS.max_tokens, LIMITS, dtype=dtype)
    return ServeEngine(model, kv, LIMITS, "tiny@0", **options)


def base_of(config: DecoderConfig) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in random_decoder(config, 4).state_dict().items()}


def merged(weights, config, name: str) -> dict[str, torch.Tensor]:
    seed = 11 + list(SPECS).index(name)
    return dict(merged_tensors(weights.items(), adapter(config, SPECS[name], seed), SPECS[name]))


def with_adapters(config: DecoderConfig, weights, folder) -> ServeEngine:
    """An engine of the base with every adapter of `SPECS`, read from PEFT folders."""
    engine = engine_of(config, weights)
    for at, (name, lora) in enumerate(SPECS.items()):
        tensors = adapter(config, lora, 11 + at)
        path = save_adapter(folder / name, config, lora, tensors.items())
        engine.load_adapter(name, path)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_three_adapters_and_the_base_in_one_batch_are_four_merged_models(family, tmp_path):
    """Tokens of all; then log probabilities of the last row of each, against whole passes."""
    config = tiny_config(family)
    weights, names = base_of(config), ["", *SPECS]
    engine = with_adapters(config, weights, tmp_path)
    prompts = [random_tokens(config, n, seed=n).tolist() for n in LENGTHS]
    sampling = replace(GREEDY, max_new=8, num_logprobs=0)
    requests = [
        request(i, prompt, sampling, names[i % 4])
        for i, prompt in enumerate(each for each in prompts for _ in range(4))
    ]
    inbox = run(engine, {0: requests[:7], 2: requests[7:]}, Continuous(chunk=16))
    told = {each.adapter: inbox.outputs[each.id][0].weight_version for each in requests}
    assert told == {"": "tiny@0"} | {name: f"tiny@0+{name}@0" for name in SPECS}
    first = set()
    for at, name in enumerate(names):
        decoder = Decoder(config)
        decoder.load_state_dict(merged(weights, config, name) if name else weights)
        for each in requests[at::4]:
            outputs = inbox.outputs[each.id]
            tokens = [one.token for one in outputs]
            prompt = prompts[each.id // 4]
            logits = decoder.logits(decoder(torch.tensor([*prompt, *tokens[:-1]])))
            logp = logits.log_softmax(-1)[len(prompt) - 1 :]
            assert tokens == logp.argmax(-1).tolist()
            own = torch.tensor([one.score[0] for one in outputs])
            torch.testing.assert_close(own, logp.max(-1).values, rtol=1e-5, atol=1e-5)
        first.add(tuple(each.score[0] for each in inbox.outputs[requests[at].id]))
    assert len(first) == 4  # they differ: each adapter does something


def test_a_folder_that_peft_wrote_gives_the_tokens_of_peft(tmp_path):
    """Another implementation of reading, scaling and adding; base and adapter in one batch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = LoraConfig(r=3, lora_alpha=20, target_modules=["q_proj", "v_proj", "gate_proj"])
    model = get_peft_model(base, asked)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(tmp_path / "tone")
    engine = make_engine(folder)
    engine.load_adapter("tone", tmp_path / "tone")
    prompt = prompt_of(37)
    got = run(engine, {0: [request(0, prompt, adapter="tone"), request(1, prompt)]}).tokens()
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": GREEDY.max_new, "do_sample": False, "eos_token_id": None}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    assert got[0] == model.generate(input_ids=ids, **options)[0, 37:].tolist()
    with model.disable_adapter():
        assert got[1] == model.generate(input_ids=ids, **options)[0, 37:].tolist()
    assert got[0] != got[1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
@torch.no_grad()
def test_bfloat16_rows_are_within_its_rounding_of_the_merged_model(family):
    """Teacher-forced: one forward of adapters beside the base against float32 merged models."""
    config = tiny_config(family)
    weights = base_of(config)
    engine = engine_of(config.with_dtype("bfloat16"), weights)
    names = ["", *SPECS]
    for at, (name, lora) in enumerate(SPECS.items()):
        engine.update_adapter(name, lora, adapter(config, lora, 11 + at))
    prompt = random_tokens(config, 30, seed=3)
    hidden = one_forward(engine, prompt, names)
    for at, name in enumerate(names):
        exact, rounded = Decoder(config), Decoder(config.with_dtype("bfloat16"))
        own = merged(weights, config, name) if name else weights
        exact.load_state_dict(own)
        rounded.load_state_dict(own)
        want = exact.logits(exact(prompt))
        allowed = (rounded.logits(rounded(prompt)).float() - want).abs().mean()
        got = engine.model.logits(hidden[at * 30 : (at + 1) * 30]).float()
        assert (got - want).abs().mean() < 1.5 * allowed
        assert not name or (got - want).abs().mean() < 0.3 * difference(weights, config, name)


def one_forward(engine: ServeEngine, prompt: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Hidden states of the same prompt under each adapter, in one step."""
    count, rows = len(prompt), list(range(len(names)))
    slots = [engine.adapters.acquire(name) for name in names]
    engine.kv.extend(rows, [count] * len(rows))
    steps = engine.kv.step(rows, [count] * len(rows))
    batch = engine.adapters.batch(slots, [count] * len(rows))
    positions = torch.arange(count).repeat(len(rows))
    tokens = prompt.repeat(len(rows))
    return engine.model.forward(tokens, positions, steps, engine.kv.pools, batch)


def difference(weights, config: DecoderConfig, name: str) -> torch.Tensor:
    """How much an adapter changes the logits."""
    prompt = random_tokens(config, 30, seed=3)
    base, changed = Decoder(config), Decoder(config)
    base.load_state_dict(weights)
    changed.load_state_dict(merged(weights, config, name))
    return (base.logits(base(prompt)) - changed.logits(changed(prompt))).abs().mean()


def tokens_of(config, weights, prompt, name: str = "") -> list[int]:
    """Greedy tokens of a merged model served alone."""
    engine = engine_of(config, merged(weights, config, name) if name else weights)
    return run(engine, {0: [request(0, prompt)]}).tokens()[0]


def test_adapters_come_and_go_while_others_run(tmp_path):
    """An adapter in use is served to its end; new requests for it are refused at once."""
    config = tiny_config("gemma3")
    weights, prompt = base_of(config), random_tokens(config, 21, seed=2).tolist()
    engine = engine_of(config, weights, max_adapters=2)
    tensors = {name: adapter(config, lora, 11 + i) for i, (name, lora) in enumerate(SPECS.items())}
    for name in ("wide", "queries"):
        engine.update_adapter(name, SPECS[name], tensors[name])

    class Changes(Continuous):
        """Commands between steps, as the engine process carries them out."""

        def on(self, state, events, view):
            if engine.num_steps == 4 and "wide" in engine.adapters.versions:
                engine.unload_adapter("wide")
                with pytest.raises(JobError, match="slots are taken"):
                    engine.update_adapter("one_layer", SPECS["one_layer"], tensors["one_layer"])
            if engine.num_steps == 6 and "queries" in engine.adapters.versions:
                engine.unload_adapter("queries")  # nobody uses it: its slot is free at once
                engine.update_adapter("one_layer", SPECS["one_layer"], tensors["one_layer"])
            return super().on(state, events, view)

    script = {
        0: [request(0, prompt, adapter="wide"), request(1, prompt)],
        5: [request(2, prompt, adapter="wide")],
        7: [request(3, prompt, adapter="one_layer"), request(4, prompt, adapter="queries")],
    }
    inbox = run(engine, script, Changes())
    assert sorted(inbox.refused) == [2, 4]
    assert all(error.code == "serve/adapter" for error in inbox.refused.values())
    assert inbox.tokens() == {
        0: tokens_of(config, weights, prompt, "wide"),
        1: tokens_of(config, weights, prompt),
        3: tokens_of(config, weights, prompt, "one_layer"),
    }
    assert engine.adapters.versions == {"one_layer": "one_layer@0"}


def test_a_name_can_be_loaded_again_while_its_old_weights_still_answer():
    config = tiny_config("gemma3")
    weights, prompt = base_of(config), random_tokens(config, 21, seed=2).tolist()
    engine, lora = engine_of(config, weights), SPECS["wide"]
    engine.update_adapter("tone", lora, adapter(config, lora, 11))

    class Reload(Continuous):
        def on(self, state, events, view):
            if engine.num_steps == 3 and engine.adapters.versions["tone"] == "tone@0":
                engine.unload_adapter("tone")
                engine.update_adapter(
                    "tone", SPECS["queries"], adapter(config, SPECS["queries"], 12)
                )
            return super().on(state, events, view)

    script = {i: [request(i, prompt, adapter="tone")] for i in (0, 5)}
    inbox = run(engine, script, Reload())
    assert inbox.tokens() == {
        0: tokens_of(config, weights, prompt, "wide"),
        5: tokens_of(config, weights, prompt, "queries"),
    }
    told = {i: {each.weight_version for each in inbox.outputs[i]} for i in (0, 5)}
    assert told == {0: {"tiny@0+tone@0"}, 5: {"tiny@0+tone@1"}}


def test_a_slot_that_was_given_back_is_used_again_cleanly():
    """No trace of the adapter before, also when it adapted more; its versions count on."""
    config = tiny_config("qwen3")
    weights, prompt = base_of(config), random_tokens(config, 9, seed=5).tolist()
    engine = engine_of(config, weights, max_adapters=1)
    versions = []
    for name in ("wide", "queries", "wide", "one_layer"):
        tensors = adapter(config, SPECS[name], 11 + list(SPECS).index(name))
        engine.update_adapter(name, SPECS[name], tensors)
        inbox = run(engine, {0: [request(0, prompt, adapter=name)]})
        assert inbox.tokens()[0] == tokens_of(config, weights, prompt, name)
        versions.append(inbox.outputs[0][0].weight_version)
        engine.unload_adapter(name)
    assert versions == [
        "tiny@0+wide@0", "tiny@0+queries@0", "tiny@0+wide@1", "tiny@0+one_layer@0",
    ]  # fmt: skip


def test_cancelled_and_preempted_requests_let_their_adapter_go():
    config = tiny_config("gemma3")
    weights, prompt = base_of(config), random_tokens(config, 40, seed=8).tolist()
    engine = engine_of(config, weights)
    engine.update_adapter("wide", SPECS["wide"], adapter(config, SPECS["wide"], 11))
    script = {0: [request(i, prompt, adapter="wide") for i in range(3)], 3: [Cancel(1)]}
    inbox = run(engine, script)
    assert inbox.tokens()[0] == inbox.tokens()[2] == tokens_of(config, weights, prompt, "wide")
    engine.unload_adapter("wide")
    assert engine.adapters.batch([BASE, BASE], [3, 1]) is None
    engine.update_adapter("wide", SPECS["wide"], adapter(config, SPECS["wide"], 11))


def test_new_weights_of_an_adapter_take_over_in_place():
    """What a trainer does between two rollouts; tokens say which weights chose them."""
    config = tiny_config("gemma3")
    weights, prompt = base_of(config), random_tokens(config, 12, seed=6).tolist()
    engine, lora = engine_of(config, weights), SPECS["wide"]
    engine.update_adapter("policy", lora, adapter(config, lora, 99))
    first = run(engine, {0: [request(0, prompt, adapter="policy")]})
    engine.update_adapter("policy", lora, adapter(config, lora, 11))
    second = run(engine, {0: [request(0, prompt, adapter="policy")]})
    assert first.outputs[0][0].weight_version == "tiny@0+policy@0"
    assert second.outputs[0][0].weight_version == "tiny@0+policy@1"
    assert second.tokens()[0] == tokens_of(config, weights, prompt, "wide")
    assert first.tokens() != second.tokens()


def test_rows_of_one_adapter_share_their_products():
    config = tiny_config("llama3")
    slots = AdapterSlots(config, 2, 8, torch.float32)
    slots.put("wide", SPECS["wide"], adapter(config, SPECS["wide"], 1))
    batch = slots.batch([BASE, 0, 0, BASE, 0], [1, 1, 1, 5, 7])
    assert [group[1:] for group in batch._groups] == [(1, 3), (8, 15)]


def test_a_plan_with_another_slot_than_the_requests_is_refused():
    config = tiny_config("gemma3")
    engine = engine_of(config, base_of(config))
    engine.update_adapter("wide", SPECS["wide"], adapter(config, SPECS["wide"], 11))
    engine.add(request(0, [5, 6, 7], adapter="wide"))
    plan = BatchPlan((0,), (3,), (0,), (0,), (-1,), (-1,))
    with pytest.raises(PlanError, match=r"adapter = -1: .* nearest legal values: 0"):
        engine.step(plan)
    assert len(engine.step(plan._replace(adapter=(0,))).outputs) == 1
