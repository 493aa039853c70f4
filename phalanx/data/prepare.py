"""From a source to training and held-out samples: tokenise, keep to the limit, split, account.

Runs once off the devices; every process maps the same files from the cache. Many may call
`prepare` at once: one does the work, the others wait for it at a file lock, so no collective must
be open meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.data.cached import cache_folder, cached_folder, content_key
from phalanx.data.collect import collect
from phalanx.data.limits import DataSettings
from phalanx.data.sources import content_hash, distinct, read_examples
from phalanx.data.store import Prepared, read_prepared, write_account
from phalanx.data.tokenise import TextTokenizer, tokenizer_hash, train_tokenizer

__all__ = ["DataSettings", "Prepared", "prepare", "read_prepared", "small_tokenizer"]

FORMAT_VERSION = 2


def prepare(settings: DataSettings, tokenizer_folder: str | Path) -> Prepared:
    """The samples of a source, from the cache if they were prepared before.

    The tokenizer, which may take hundreds of megabytes, is built only to write new files.

    Args:
        tokenizer_folder: with tokenizer.json; where it has a config.json as well, the model's
            context is read from it unless the settings say it.

    Raises:
        JobError: `data/empty` when nothing can be learnt from what is left; `data/row` for rows
            that are too long (too_long = "error") or cannot be used; `data/cache` when the result
            cannot be written.
    """
    if not settings.context_tokens:
        settings = replace(settings, context_tokens=context_of(tokenizer_folder))
    made_of = (
        _set(settings),
        content_hash(settings.source),
        content_hash(settings.held_out_source) if settings.held_out_source else "",
        tokenizer_hash(tokenizer_folder, settings.chat_template),
    )
    path = cache_folder("data") / content_key(FORMAT_VERSION, *made_of)

    def fill(folder: Path) -> None:
        tokenizer = TextTokenizer(tokenizer_folder, settings.chat_template)
        write_account(folder, FORMAT_VERSION, collect(folder, settings, tokenizer))

    return read_prepared(cached_folder(path, fill))


def _set(settings: DataSettings) -> dict[str, Any]:
    """What is not at its default, so that files stay those of the same rows, and runs go on with
    them, when a later release has more settings."""
    default = DataSettings()
    return {key: x for key, x in asdict(settings).items() if x != getattr(default, key)}


def context_of(model_folder: str | Path) -> int:
    """Longest input of a model, from its config.json; 0 where it does not say."""
    path = Path(model_folder) / "config.json"
    if not path.is_file():
        return 0
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        return 0  # whoever loads the model refuses it by name
    inner = config.get("text_config", config) if isinstance(config, dict) else {}
    context = inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    return context if isinstance(context, int) and context > 1 else 0


def small_tokenizer(source: str, vocab_size: int) -> Path:
    """Folder of a byte-level BPE tokenizer trained on a source, for models from scratch."""
    key = content_key(FORMAT_VERSION, content_hash(source), vocab_size)

    def fill(folder: Path) -> None:
        texts = (
            part
            for example in distinct(read_examples(source))
            for part in (example.text, *(message.content for message in example.messages))
        )
        train_tokenizer(texts, vocab_size, folder)

    return cached_folder(cache_folder("tokenizers") / key, fill)
