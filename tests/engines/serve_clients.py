"""What tests of the server share: a model that has a tokenizer, a way to ask, a way to wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx.drive import drive
from phalanx.engines.serve.settings import Sampling
from phalanx.engines.serve.world import EngineWorld
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import VOCABULARY, ScriptedInbox, make_engine, request, write_model

OPTIONS = {"max_running": 3, "max_tokens": 128, "max_step_tokens": 32, "threads": 1}


def write_text_model(folder: Path) -> Path:
    """The tiny model with a byte tokenizer cut to its vocabulary."""
    path = write_model(folder)
    add_tokenizer(path)
    return path


def add_tokenizer(folder: Path) -> None:
    """A byte tokenizer cut to the model's vocabulary: printable ASCII and a few more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "", "chat_template": "{{ messages[-1].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def expected(prompt: list[int], num_new: int) -> list[int]:
    inbox = ScriptedInbox({0: [request(0, prompt, Sampling(max_new=num_new, ignore_eos=True))]})
    drive(EngineWorld(make_engine(), inbox), reacts=[Continuous()])
    return inbox.tokens()[0]


def ask(client: openai.OpenAI, prompt, num: int = 12, **options):
    extra = {"ignore_eos": True, "return_token_ids": True} | options.pop("extra_body", {})
    defaults = {"model": "tiny", "max_tokens": num, "temperature": 0}
    return client.completions.create(prompt=prompt, extra_body=extra, **defaults | options)


def wait_until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.05)
