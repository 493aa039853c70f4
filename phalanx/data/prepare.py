"""From a source to training and held-out samples: tokenise, keep to the limit, split, account.

Runs once off the devices; every rank reads the same file from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from phalanx.data.cached import cache_folder, cached_file, cached_folder, content_key
from phalanx.data.samples import Audit, Sample, Samples
from phalanx.data.sources import Example, content_hash, read_examples
from phalanx.data.tokenise import Encoded, TextTokenizer, tokenizer_hash, train_tokenizer
from phalanx.errors import JobError, nearest_names

FORMAT_VERSION = 1
TOO_LONG = ("error", "drop", "split", "truncate")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What decides the samples.

    Attributes:
        source: "python-docs" or the path of a .jsonl file.
        max_tokens: longest document.
        too_long: what to do with a longer row. "error": refuse it. "drop": leave it out. "split":
            cut a conversation where a user's turn begins (later parts do not see earlier ones) and
            text every `max_tokens`. "truncate": keep the turns that fit whole (a conversation whose
            first exchange does not fit is dropped), the first `max_tokens` of a text.
        held_out_frac: share of rows kept for evaluation, chosen by the hash of their content.
        max_rows: use at most so many rows, chosen by hash as well; 0: all.
    """

    source: str = "python-docs"
    max_tokens: int = 512
    too_long: str = "error"
    held_out_frac: float = 0.05
    max_rows: int = 0

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            legal = nearest_names(self.too_long, TOO_LONG)
            rule = "is no way to treat long rows"
            raise JobError("job/bad-value", "data.too_long", self.too_long, rule, legal=legal)
        if self.max_tokens < 2:
            rule = "must be >= 2: the first token of a document is never a target"
            raise JobError("job/bad-value", "data.max_tokens", self.max_tokens, rule, legal=[2])
        if not 0.0 <= self.held_out_frac < 1.0:
            rule = "must lie in 0 <= held_out_frac < 1"
            raise JobError("job/bad-value", "data.held_out_frac", self.held_out_frac, rule)


@dataclass(frozen=True)
class Prepared:
    """Training and held-out samples with their account.

    Attributes:
        path: the file they were read from.
    """

    train: Samples
    held_out: Samples
    audit: Audit
    path: Path


def prepare(settings: DataSettings, tokenizer_folder: str | Path) -> Prepared:
    """The samples of a source, from the cache if they were prepared before.

    The tokenizer, which may take hundreds of megabytes, is built only to write a new file.

    Raises:
        JobError: `data/empty` when nothing can be learnt from what is left, `data/row` for a row
            that is too long (too_long = "error") or cannot be rendered.
    """
    made_of = (asdict(settings), content_hash(settings.source), tokenizer_hash(tokenizer_folder))
    key = content_key(FORMAT_VERSION, *made_of)
    path = cache_folder("data") / f"{key}.npz"
    return read_prepared(cached_file(path, lambda new: _write(new, settings, tokenizer_folder)))


def read_prepared(path: str | Path) -> Prepared:
    """What `prepare` wrote."""
    with np.load(path, allow_pickle=False) as data:
        parts = [
            Samples(*(data[f"{part}_{name}"] for name in ("tokens", "counted", "bounds", "keys")))
            for part in ("train", "held_out")
        ]
        audit = Audit(**{name: int(data[f"audit_{name}"]) for name in Audit.__dataclass_fields__})
    return Prepared(parts[0], parts[1], audit, Path(path))


def small_tokenizer(source: str, vocab_size: int) -> Path:
    """Folder of a byte-level BPE tokenizer trained on a source, for models from scratch."""
    key = content_key(FORMAT_VERSION, content_hash(source), vocab_size)

    def fill(folder: Path) -> None:
        texts = (
            part
            for example in read_examples(source)
            for part in (example.text, *(message.content for message in example.messages))
        )
        train_tokenizer(texts, vocab_size, folder)

    return cached_folder(cache_folder("tokenizers") / key, fill)


def _write(path: Path, settings: DataSettings, tokenizer_folder: str | Path) -> None:
    kept, audit = _collect(settings, TextTokenizer(tokenizer_folder))
    train, held_out = _split(kept, settings)
    arrays: dict[str, np.ndarray] = {}
    for part, samples in (("train", Samples.of(train)), ("held_out", Samples.of(held_out))):
        arrays[f"{part}_tokens"], arrays[f"{part}_counted"] = samples.tokens_T, samples.counted_T
        arrays[f"{part}_bounds"], arrays[f"{part}_keys"] = samples.bounds, samples.keys
    arrays |= {f"audit_{name}": np.asarray(value) for name, value in asdict(audit).items()}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _collect(settings: DataSettings, tokenizer: TextTokenizer) -> tuple[list[Sample], Audit]:
    samples: list[Sample] = []
    rows = rows_dropped = rows_cut = tokens_in = 0
    examples = _at_most(read_examples(settings.source), settings.max_rows)
    for example, row in tokenizer.encode_examples(examples):
        rows, tokens_in = rows + 1, tokens_in + len(row.tokens)
        parts = list(_within_limit(row, settings, example.where))
        rows_dropped += not parts
        rows_cut += bool(parts) and sum(end - start for start, end in parts) < len(row.tokens)
        rows_cut += len(parts) > 1
        samples += [_sample(row, start, end, example.key) for start, end in parts]
    trained = sum(int(each.counted.sum()) for each in samples)
    kept = sum(len(each.tokens) for each in samples)
    if trained == 0:
        rule = f"none of its {rows} rows has a token to learn within {settings.max_tokens} tokens"
        raise JobError("data/empty", "data.source", settings.source, rule)
    audit = Audit(
        rows_in=rows,
        rows_dropped=rows_dropped,
        rows_cut=rows_cut,
        samples=len(samples),
        tokens_in=tokens_in,
        tokens_trained=trained,
        tokens_masked=kept - trained,
        tokens_dropped=tokens_in - kept,
    )
    return samples, audit


def _at_most(examples: list[Example], max_rows: int) -> list[Example]:
    """A fixed sample of the rows, in their order; independent of the split by `key` itself."""
    if not 0 < max_rows < len(examples):
        return examples
    chosen = sorted(examples, key=lambda each: content_key(each.key))[:max_rows]
    keys = {each.key for each in chosen}
    return [each for each in examples if each.key in keys]


def _sample(row: Encoded, start: int, end: int, key: int) -> Sample:
    counted = row.counted[start:end].copy()
    counted[:1] = False  # nothing stands before the first token of a part
    return Sample(row.tokens[start:end], counted, key)


def _within_limit(row: Encoded, settings: DataSettings, where: str) -> Iterator[tuple[int, int]]:
    """Token ranges of the documents that a row becomes; each has something to learn."""
    limit, length = settings.max_tokens, len(row.tokens)
    if length <= limit:
        ranges = [(0, length)]
    elif settings.too_long == "error":
        rule = f"has {length} tokens, more than data.max_tokens = {limit}; set data.too_long"
        raise JobError("data/row", where, f"{length} tokens", rule, legal=TOO_LONG[1:])
    elif settings.too_long == "drop":
        ranges = []
    elif settings.too_long == "truncate":
        ends = [end for end in row.ends if end <= limit] if row.cuts else [limit]
        ranges = [(0, ends[-1])] if ends else []
    else:
        ranges = _split_ranges(row, limit, where)
    return ((start, end) for start, end in ranges if row.counted[start + 1 : end].any())


def _split_ranges(row: Encoded, limit: int, where: str) -> list[tuple[int, int]]:
    length = len(row.tokens)
    if not row.cuts:
        return [(start, min(start + limit, length)) for start in range(0, length, limit)]
    edges, ranges, start = [*(cut for cut in row.cuts if cut > 0), length], [], 0
    for index, edge in enumerate(edges):
        if edge - start > limit:
            rule = f"one exchange has {edge - start} tokens, more than data.max_tokens = {limit}"
            raise JobError("data/row", where, f"{length} tokens", rule, legal=("drop", "truncate"))
        if index + 1 == len(edges) or edges[index + 1] - start > limit:
            ranges.append((start, edge))
            start = edge
    return ranges


def _split(samples: list[Sample], settings: DataSettings) -> tuple[list[Sample], list[Sample]]:
    """By the hash of the row's content: the same on every machine, stable when rows are added."""
    limit = int(settings.held_out_frac * 2**64)
    held_out = [each for each in samples if each.key < limit]
    train = [each for each in samples if each.key >= limit]
    if not train:
        rule = f"all {len(samples)} samples fell into the held-out part"
        raise JobError("data/empty", "data.held_out_frac", settings.held_out_frac, rule)
    return train, held_out
