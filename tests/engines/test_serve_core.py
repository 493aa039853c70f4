"""The engine process seen from its socket: commands in order, refusals, last words, bad folders."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.serving import ServeRates
from phalanx.drive import drive
from phalanx.engines.serve import core, start
from phalanx.engines.serve.core import SocketInbox, main
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits, kv_tokens, sliding_bytes, token_bytes
from phalanx.engines.serve.settings import ServeSettings, require_servable
from phalanx.engines.serve.start import describe, limits_of, make_engine
from phalanx.engines.serve.wire import encode, read_message
from phalanx.engines.serve.world import EngineWorld
from phalanx.errors import JobError, PlanError, WorldError
from phalanx.models.peft_folder import save_adapter
from phalanx.models.spec import LoraSpec, lora_tensors
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import CONFIG, GREEDY, prompt_of, write_model
from tests.engines.serve_cases import make_engine as tiny_engine
from tests.models.families import tiny_config

SHORT = replace(GREEDY, max_new=3)
LORA = LoraSpec(rank=3, alpha=9.0, targets=("q_proj",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tone(tmp_path_factory):
    factors = {
        name: torch.full(spec.shape, 0.1) for name, spec in lora_tensors(CONFIG, LORA).items()
    }
    target = tmp_path_factory.mktemp("adapters") / "tone"
    return save_adapter(target, CONFIG, LORA, factors.items())


def settings_of(folder, **options) -> ServeSettings:
    limits = {"max_running": 4, "max_tokens": 96, "max_step_tokens": 32}
    return ServeSettings(
        folder=str(folder), scheduler="continuous", name="tiny", **limits | options
    )


def add(id_: int, length: int = 9, **more):
    sampling = asdict(SHORT)
    return {"kind": "add", "request": id_, "tokens": prompt_of(length), "sampling": sampling} | more


class Lines:
    """Messages that all lie there before the engine looks; what it says, as the socket has it."""

    def __init__(self, messages) -> None:
        self._messages = [read_message(encode(each)) for each in messages]
        self.said: list[dict] = []

    def receive(self, wait: bool):
        found, self._messages = self._messages, []
        return found if found or not wait else None

    def send(self, message) -> bool:
        self.said.append(read_message(encode(message)))
        return True

    long_work = nullcontext


def answers(engine, settings, messages) -> list[dict]:
    lines = Lines(messages)
    drive(EngineWorld(engine, SocketInbox(lines, engine, settings)), reacts=[Continuous()])
    return lines.said


def command(kind: str, number: int, **fields):
    return {"kind": kind, "number": number} | fields


def test_commands_are_answered_by_number_and_in_order(folder, tone):
    """Each finds what the messages before it left; what fails is refused and the next goes on."""
    engine, settings = tiny_engine(), settings_of(folder)
    messages = [
        command("load_adapter", 1, name="tone", folder=str(tone), version=0),
        command("load_adapter", 2, name="tone", folder=str(folder), version=1),
        command("load_adapter", 3, name="tiny", folder=str(tone), version=0),
        add(0, adapter="tone"),
        add(1),
        command("unload_adapter", 4, name="tone"),
        add(2, adapter="tone"),
        {"kind": "cancel", "request": 0},
        {"kind": "cancel", "request": 1},
        command("sleep", 5, level=1),
        add(3),
        command("wake", 6),
        command("load_adapter", 7, name="tone", folder=str(tone), version=8),
        command("load_adapter", 8, name="tone", folder=str(tone), version=9),
    ]
    said = answers(engine, settings, messages)
    replies = {each["number"]: each for each in said if "number" in each}
    assert {number: each["kind"] for number, each in replies.items()} == {
        1: "done", 2: "refused", 3: "refused", 4: "done", 5: "done",
        6: "done", 7: "done", 8: "done",
    }  # fmt: skip
    assert [replies[n]["adapters"] for n in (1, 4, 7, 8)] == [
        {"tone": "tone@0"}, {}, {"tone": "tone@8"}, {"tone": "tone@9"},
    ]  # fmt: skip
    assert (replies[5]["asleep"], replies[6]["asleep"]) == (1, 0)
    rejected = {each["request"]: each["error"]["code"] for each in said if "request" in each}
    assert rejected == {2: "serve/adapter", 3: "serve/asleep"}
    order = [each.get("number", each.get("request")) for each in said if each["kind"] != "step"]
    assert order == [1, 2, 3, 4, 2, 5, 3, 6, 7, 8]


def test_sleep_waits_for_no_request_and_deep_sleep_wakes_from_the_folder(folder):
    engine, settings = tiny_engine(seed=9), settings_of(folder)
    messages = [add(0), command("sleep", 1, level=1), add(1)]
    said = answers(engine, settings, messages)
    refusal = next(each for each in said if each.get("number") == 1)
    assert refusal["kind"] == "refused" and refusal["error"]["code"] == "serve/asleep"
    messages = [command("sleep", 1, level=2), command("wake", 2), add(0, 40)]
    said = answers(engine, settings, messages)
    rows = [row for each in said if each["kind"] == "step" for row in each["outputs"]]
    fresh = answers(tiny_engine(), settings, [add(0, 40)])  # seed 0: what the folder holds
    assert rows == [row for each in fresh if each["kind"] == "step" for row in each["outputs"]]


def test_a_step_tells_its_tokens_and_what_they_cost(folder):
    said = answers(tiny_engine(), settings_of(folder), [add(4), add(7)])
    steps = [each for each in said if each["kind"] == "step"]
    assert [each["requests"] for each in steps] == [[4, 7]] * 3
    assert all(0 < each["step_s"] < 5 for each in steps)
    assert [row[0] for row in steps[0]["outputs"]] == [4, 7]
    assert {row[5] for each in steps for row in each["outputs"]} == {"tiny@0"}
    assert steps[-1]["counters"] == {
        "steps": 3, "live": 0, "free_blocks": 50, "num_blocks": 50,
        "prompt_tokens": 18, "output_tokens": 6, "preempted": 0,
    }  # fmt: skip


def test_an_update_of_another_model_changes_nothing(folder, tmp_path):
    other = write_model(tmp_path / "other", config=replace(CONFIG, hidden_size=36))
    damaged = write_model(tmp_path / "damaged", seed=3)
    weights = next(damaged.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-9])
    engine = tiny_engine()
    before = {name: place.view.clone() for name, place in engine.model.weights._places.items()}
    messages = [
        command("update", n, folder=str(each), version="tiny@1")
        for n, each in enumerate((other, damaged, tmp_path / "nowhere"))
    ]
    said = answers(engine, settings_of(folder), messages)
    assert [each["kind"] for each in said] == ["refused"] * 3
    assert engine.weight_version == "tiny@0"
    after = engine.model.weights._places
    assert all(torch.equal(value, after[name].view) for name, value in before.items())


def test_weights_of_two_models_never_answer(folder, tmp_path, monkeypatch):
    """A disk that fails in the middle of an update: refused, and then the process ends."""

    def breaking(weights):
        yield from itertools.islice(read_whole(weights), 3)
        raise JobError("model/tensor", "weights file", "model.safetensors", "cannot be read")

    read_whole = start.read_whole
    monkeypatch.setattr(start, "read_whole", breaking)
    new = write_model(tmp_path / "new", seed=3)
    lines = Lines([add(0), command("update", 1, folder=str(new), version="tiny@1"), add(1)])
    inbox = SocketInbox(lines, tiny_engine(), settings_of(folder))
    with pytest.raises(WorldError, match=r"weights = tiny@0\+incomplete: an update broke off"):
        drive(EngineWorld(inbox._engine, inbox), reacts=[Continuous()])
    assert lines.said[-1]["kind"] == "refused"
    rows = [row for each in lines.said if each["kind"] == "step" for row in each["outputs"]]
    assert rows and all(row[5] == "tiny@0" for row in rows)


def run_main(settings: ServeSettings, messages=()) -> tuple[int, list[dict]]:
    """Exit code and words of an engine process that ends by itself, run here."""
    ours, theirs = socket.socketpair()
    ours.sendall(encode(settings.to_dict()) + b"".join(map(encode, messages)))
    code = main(theirs.detach())
    with ours.makefile("rb") as file:
        said = [json.loads(line) for line in file]
    ours.close()
    return code, [each for each in said if each["kind"] != "beat"]


@pytest.fixture
def quiet(monkeypatch):
    """No thread that beats: it would end this process when the socket closes."""
    monkeypatch.setattr(core, "Heartbeat", lambda lines: SimpleNamespace(watch=lambda counters: 0))


def test_a_step_that_fails_ends_the_process_with_its_reason(folder, quiet, monkeypatch, capfd):
    def failing(*_):
        raise RuntimeError("kernel gave up")

    engine = tiny_engine()
    monkeypatch.setattr(core, "make_engine", lambda settings: engine)
    monkeypatch.setattr(core, "describe", lambda *_: {"kind": "ready", "weight_version": "tiny@0"})
    monkeypatch.setattr(engine, "_forward", failing)
    code, said = run_main(settings_of(folder), [add(0)])
    assert code == 3
    assert [each["kind"] for each in said] == ["ready", "failed"]
    assert said[-1]["error"]["code"] == "serve/engine"
    words = capfd.readouterr().err
    assert "step 1 = RuntimeError: kernel gave up" in words and "Traceback" in words


def test_what_is_wrong_at_the_start_is_said_before_ready(folder, quiet, capfd):
    code, said = run_main(settings_of(folder, device="cuda:77"))
    assert code == 2
    assert [(each["kind"], each["error"]["where"]) for each in said] == [("failed", "serve.device")]
    assert "serve.device = 'cuda:77'" in capfd.readouterr().err


def test_ready_says_what_the_engine_can_hold(folder, tone):
    settings = settings_of(folder, adapters={"tone": str(tone)}, max_queued=7)
    engine = make_engine(settings)
    ready = describe(engine, settings)
    assert ready["adapters"] == {"tone": "tone@0"} and ready["weight_version"] == "tiny@0"
    assert [ready[name] for name in ("max_running", "max_tokens", "max_queued")] == [4, 96, 7]
    assert ready["kv_tokens"] == 4 * 96
    per_token = token_bytes(CONFIG, "float32")
    windows = sliding_bytes(CONFIG, 4 * 96, limits_of(settings), "float32")
    assert ready["kv_bytes"] == 4 * 96 * per_token + windows
    assert ServeRates.from_dict(ready["rates"]).decode_s(1, 48) > 0
    assert engine.num_steps == 0 and engine.kv.num_free == engine.kv.num_blocks


def broken(folder, tmp_path, how):
    """A copy of the model with something wrong."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = next(copy.glob("*.safetensors"))
    table = json.loads((copy / "config.json").read_text())
    if how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif how == "another shape":
        table["intermediate_size"] = 96
    elif how == "another family":
        table["model_type"] = "mamba"
    (copy / "config.json").write_text(json.dumps(table))
    return copy


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no weights", "holds no safetensors weights"),
        ("truncated", "the file is truncated: this tensor ends at byte"),
        ("another shape", r"mlp\.[a-z]+_proj\.weight = .* must have the shape"),
        ("another family", "mamba"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_any_process_starts(
    folder, tmp_path, how, words
):
    settings = settings_of(broken(folder, tmp_path, how))
    for act in (require_servable, make_engine):
        if how != "no weights" or act is require_servable:
            with pytest.raises(JobError, match=words):
                act(settings)


def test_settings_name_adapters_that_fit(folder, tone, tmp_path):
    factors = lora_tensors(tiny_config("llama3"), LORA).items()
    other = tmp_path / "other"
    save_adapter(other, tiny_config("llama3"), LORA, ((n, torch.ones(s.shape)) for n, s in factors))
    for options, words in (
        ({"adapters": {"tone": str(other)}}, r"q_proj\.lora_[AB]\.weight.* must have the shape"),
        ({"adapters": {"tiny": str(tone)}}, "'tiny': an adapter needs a name of its own"),
        ({"adapters": {"a": str(tone), "b": str(tone)}, "max_adapters": 1}, r"adapters = 2.*: 1"),
        ({"adapters": {"a": str(tone)}, "max_lora_rank": 2}, "rank = 3: must be at most 2"),
        ({"kv_tokens": 95}, "kv_tokens = 95: the KV cache must hold the longest request"),
    ):
        with pytest.raises(JobError, match=words):
            require_servable(settings_of(folder, **options))
    require_servable(settings_of(folder, adapters={"a": str(tone)}, kv_tokens=96))


def test_weights_that_do_not_fit_into_memory_are_refused(folder, monkeypatch):
    monkeypatch.setattr(start, "free_bytes", lambda device: 100e3)
    with pytest.raises(PlanError, match=r"weights take .* in float32; 97\.66 KiB are free on cpu"):
        make_engine(settings_of(folder))


# ---- the size of the cache -----------------------------------------------------------------------

LIMITS = KvLimits(max_tokens=100, max_running=8, max_step_tokens=64)


@given(free=st.floats(0, 64e6), running=st.integers(1, 40), tokens=st.integers(2, 900))
@settings(max_examples=60, deadline=None)
def test_a_cache_takes_at_most_half_of_what_is_free_and_holds_one_request(free, running, tokens):
    limits = KvLimits(max_tokens=tokens, max_running=running, max_step_tokens=64)
    try:
        held = kv_tokens(CONFIG, limits, free_bytes=free)
    except JobError as error:
        assert error.code == "job/bad-value"
        windows = sliding_bytes(CONFIG, running * tokens, limits, "float32")
        assert windows + tokens * token_bytes(CONFIG, "float32") > free / 2
        return
    assert tokens <= held <= running * tokens
    taken = held * token_bytes(CONFIG, "float32") + sliding_bytes(CONFIG, held, limits, "float32")
    assert taken <= free / 2
    PagedKv(CONFIG, held, limits, dtype=torch.float32)


def test_a_cache_is_as_large_as_asked_or_as_requests_can_use():
    assert kv_tokens(CONFIG, LIMITS, free_bytes=1e12) == 800
    assert kv_tokens(CONFIG, LIMITS, asked=5000, free_bytes=0) == 5000
    half = kv_tokens(CONFIG, LIMITS, free_bytes=0.9e6, kv_dtype="float32")
    assert 100 < half < kv_tokens(CONFIG, LIMITS, free_bytes=0.9e6, kv_dtype="bfloat16")


def test_a_cache_without_room_says_how_much_there_is():
    limits = KvLimits(max_tokens=5000, max_running=1, max_step_tokens=64)
    with pytest.raises(JobError) as caught:
        kv_tokens(CONFIG, limits, free_bytes=1e6)
    assert caught.value.where == "serve.max_tokens"
    nearest = int(caught.value.legal[0])
    fitting = KvLimits(max_tokens=nearest, max_running=1, max_step_tokens=64)
    assert kv_tokens(CONFIG, fitting, free_bytes=1e6) == nearest
    assert "half of the free memory" in str(caught.value)
