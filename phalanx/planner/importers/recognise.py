"""Which program a file is for, by what stands in it; and the plan that it says."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path, PurePath

from phalanx.errors import JobError
from phalanx.planner.importers.entries import (
    AMBIGUOUS,
    MOST_BYTES,
    UNREADABLE,
    Document,
    Entry,
    is_toml,
    toml_document,
    unreadable,
    yaml_document,
)
from phalanx.planner.importers.foreign import ForeignPlan
from phalanx.planner.importers.merge import merged
from phalanx.planner.importers.shell import Word, assigned_options, commands, options

# program -> keys of which one is enough to know it by, in YAML and TOML
YAML_KEYS = {
    "accelerate": ("distributed_type", "compute_environment", "fsdp_config.fsdp_version"),
    "axolotl": ("base_model",),
    "trl": ("model_name_or_path",),
}
_OTHERS = {
    "actor_rollout_ref": "a verl configuration: it is written (--emit verl), not read",
    "architectures": "a model's config.json: give it as MODEL",
    "resources": "a SkyPilot task: it is written (--emit skypilot), not read",
    "format_version": "a lockfile of Phalanx: give it to `phalanx train --plan`",
}
_TITAN = ("parallelism", "activation_checkpoint", "training.local_batch_size", "training.seq_len")
_MEGATRON_SCRIPTS = ("pretrain_", "finetune_", "train_gpt")
KINDS = ("accelerate", "axolotl", "megatron", "torchtitan", "trl", "vllm")


def read_foreign(path: str | Path) -> ForeignPlan:
    """The plan of another program's configuration, or of two that belong together.

    Args:
        path: a file; or two, separated by a comma: how a model is spread (accelerate) and what is
            trained (TRL).

    Raises:
        JobError: `job/not-found`; `foreign/unreadable`, `foreign/ambiguous` and `foreign/value`,
            each with file and line.
    """
    if "," in str(path) and not Path(path).is_file():
        parts = [each.strip() for each in str(path).split(",")]
        if len(parts) == 2:
            return merged(*(read_foreign(each) for each in parts))
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or str(error)
        raise JobError("job/not-found", "--from", str(path), rule) from None
    if len(content) > MOST_BYTES:
        raise JobError(UNREADABLE, str(path), None, f"is larger than {MOST_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise unreadable(str(path), line, "is not UTF-8") from None
    return read_text(text, str(path))


def read_text(text: str, path: str) -> ForeignPlan:
    """The plan of a configuration that is already in memory; `path` is for messages."""
    if not text.strip():
        raise unreadable(path, 0, "is empty")
    if PurePath(path).suffix == ".toml" or (PurePath(path).suffix == "" and is_toml(text)):
        return _from_toml(text, path)
    if PurePath(path).suffix in (".yaml", ".yml", ".json"):
        document = yaml_document(text, path)
        if document is None:
            raise unreadable(path, 1, "must hold keys and values")
        return _from_keys(document)
    return _from_words(text, path)


def importer(kind: str) -> Callable[..., ForeignPlan]:
    """The reader of a program's documents."""
    return import_module(f"phalanx.planner.importers.{kind}").read


def _from_toml(text: str, path: str) -> ForeignPlan:
    document = toml_document(text, path)
    if document.has(*_TITAN) or (document.has("model.flavor") and document.has("training")):
        return importer("torchtitan")(document)
    if document.has("data", "train", "plan", "serve"):
        rule = "is a job of Phalanx: `phalanx plan FILE` reads it"
        raise JobError(AMBIGUOUS, path, None, rule)
    rule = "is TOML, but not of torchtitan: it has neither [training] nor [parallelism]"
    raise JobError(AMBIGUOUS, path, None, rule, legal=KINDS)


def _from_keys(document: Document) -> ForeignPlan:
    found = {
        kind: next(key for key in keys if document.has(key))
        for kind, keys in YAML_KEYS.items()
        if document.has(*keys)
    }
    if "axolotl" in found or "trl" in found:
        found = {kind: key for kind, key in found.items() if "fsdp_config" not in key}
    if len(found) > 1:
        told = " and ".join(f"{key} of {kind}" for kind, key in found.items())
        place = document.place(next(iter(found.values())))
        raise JobError(AMBIGUOUS, place, None, f"the file has {told}; split it in two files")
    if found:
        return importer(next(iter(found)))(document)
    for key, rule in _OTHERS.items():
        if document.has(key):
            raise JobError(AMBIGUOUS, document.path, None, f"is {rule}")
    if document.has("per_device_train_batch_size", "gradient_accumulation_steps"):
        return importer("trl")(document)
    told = ", ".join(key for keys in YAML_KEYS.values() for key in keys[:1])
    rule = f"is of no program that is known here: none of {told} is in it"
    raise JobError(AMBIGUOUS, document.path, None, rule, legal=KINDS)


def _from_words(text: str, path: str) -> ForeignPlan:
    """A script or a line: the command of it that belongs to a known program."""
    found: list[tuple[str, list[Word]]] = []
    for words in commands(text, path):
        kind = _kind_of(words)
        if kind:
            found.append((kind, words))
    loose = [] if found else assigned_options(text, path)
    if loose and (kind := _kind_of(loose)):
        found.append((kind, loose))
    kinds = sorted({kind for kind, _ in found})
    if len(kinds) > 1:
        first = found[0][1][0].line
        rule = f"has commands of {' and '.join(kinds)}; keep one"
        raise JobError(AMBIGUOUS, f"{path}:{first}", None, rule)
    if not found:
        document = yaml_document_or_none(text, path)
        if document is not None and len(document.entries) > 1:
            return _from_keys(document)
        rule = "has no command of a program that is known here"
        raise JobError(AMBIGUOUS, path, None, rule, legal=KINDS)
    kind, words = max(found, key=lambda each: len(each[1]))
    if len({tuple(word.text for word in each) for _, each in found}) > 1 and kind == "vllm":
        lines = ", ".join(str(each[0].line) for _, each in found)
        rule = f"starts several servers (lines {lines}); keep one"
        raise JobError(AMBIGUOUS, path, None, rule)
    return _from_command(kind, words, path)


def yaml_document_or_none(text: str, path: str) -> Document | None:
    """For files without an ending that says what they are."""
    try:
        return yaml_document(text, path)
    except JobError:
        return None


def _kind_of(words: list[Word]) -> str:
    texts = [word.text for word in words]
    names = {text[2:].partition("=")[0] for text in texts if text.startswith("--")}
    programs = [PurePath(text).name for text in texts[:12]]
    if "vllm" in programs and "serve" in texts:
        return "vllm"
    if any(text.startswith("vllm.entrypoints") for text in texts):
        return "vllm"
    if {"tensor-model-parallel-size", "micro-batch-size", "num-attention-heads"} & names:
        return "megatron"
    if any(name.startswith(_MEGATRON_SCRIPTS) and name.endswith(".py") for name in programs):
        return "megatron"
    if "trl" in programs or "model_name_or_path" in names:
        return "trl"
    if {"tensor-parallel-size", "max-model-len"} <= names:
        return "vllm"
    return ""


def _from_command(kind: str, words: list[Word], path: str) -> ForeignPlan:
    if kind == "vllm":
        from phalanx.planner.importers.vllm import SHORT

        texts = [word.text for word in words]
        at = texts.index("serve") if "serve" in texts else len(texts)
        model = texts[at + 1] if at + 1 < len(texts) and texts[at + 1][:1] != "-" else ""
        dashed = [Word(_dashed(word.text), word.line, word.quoted) for word in words]
        return importer(kind)(options(dashed, path, SHORT), model)
    document = options(words, path)
    if kind == "trl":
        document = _with_command(document, words)
    config = document.entries.get("config")
    if kind == "trl" and config and isinstance(config.value, str):
        return _with_config(document, Path(path).parent / config.value, path)
    return importer(kind)(document)


def _dashed(text: str) -> str:
    """vLLM takes options with underscores too."""
    name, has_value, value = text.partition("=")
    return name.replace("_", "-") + has_value + value if text.startswith("--") else text


def _with_command(document: Document, words: list[Word]) -> Document:
    """`trl dpo`: what kind of training the words behind the program ask for."""
    for word, after in pairwise(words):
        if PurePath(word.text).name == "trl" and not after.text.startswith("-"):
            entry = Entry("command", after.text, after.line)
            return document._replace(entries={**document.entries, "command": entry})
    return document


def _with_config(document: Document, config: Path, path: str) -> ForeignPlan:
    """`trl sft --config FILE`: the command's own options win over the file's."""
    try:
        text = config.read_text(encoding="utf-8") if config.is_file() else ""
    except (OSError, ValueError):
        text = ""
    below = yaml_document(text, str(config)) if text else None
    if below is None:
        rule = "names a file that cannot be read"
        raise unreadable(path, document.entries["config"].line, f"{rule}: {config}")
    own = {key: each for key, each in document.entries.items() if key != "config"}
    return importer("trl")(Document(path, {**below.entries, **own}))
