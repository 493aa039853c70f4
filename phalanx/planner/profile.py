"""What a data file holds, for a plan: rows, lengths, what counts. No torch.

The samples are those that training would see (`data.prepare`), from the same cache. Where the
model's own tokenizer is not here, another one of its family counts, or the bytes of the text do,
and the profile says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from phalanx.data.cached import cache_folder, cached_folder, content_key
from phalanx.data.collect import collect
from phalanx.data.limits import DataSettings
from phalanx.data.prepare import prepare
from phalanx.data.rows import Example
from phalanx.data.samples import Audit, Samples
from phalanx.data.sources import content_hash
from phalanx.data.store import Prepared, read_prepared, write_account
from phalanx.data.tokenise import Encoded, TextTokenizer
from phalanx.models.config import DecoderConfig
from phalanx.models.demo import DEMO_MODEL
from phalanx.models.file_head import demo_tokenizer_folder

FORMAT_VERSION = 2
# python-docs of Python 3.11 by Gemma 3's tokenizer: 4.3 bytes of content a token beside 5 tokens of
# markers a turn (measured)
BYTES_PER_TOKEN = 4.3
TOKENS_PER_TURN = 5
_ROLES_LEARNT = ("assistant",)


@dataclass(frozen=True, kw_only=True)
class DataProfile:
    """Samples to train on and what they are like.

    Attributes:
        source: as the user named it.
        samples: of training, after the limit on their length.
        held_out: samples that are kept for evaluation.
        audit: what became of every row.
        counted_by: whose tokenizer counted.
        is_assumption: it was not the model's own.
    """

    source: str
    samples: Samples
    audit: Audit
    counted_by: str
    is_assumption: bool
    held_out: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.samples.lengths.max())

    def quantile(self, share: float) -> int:
        """Tokens that this share of samples does not exceed."""
        return int(np.quantile(self.samples.lengths, share))

    @property
    def counted_frac(self) -> float:
        """Share of tokens that are targets."""
        return self.samples.num_counted / self.samples.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "rows": self.audit.rows_in,
            "rows_dropped": self.audit.rows_dropped,
            "samples": len(self.samples),
            "held_out_samples": self.held_out,
            "tokens": self.samples.num_tokens,
            "p50_tokens": self.quantile(0.5),
            "p99_tokens": self.quantile(0.99),
            "longest_tokens": self.longest,
            "counted_frac": self.counted_frac,
            "counted_by": self.counted_by,
            "is_assumption": self.is_assumption,
        }


class Worded(Protocol):
    """A model whose tokenizer may be here."""

    @property
    def config(self) -> DecoderConfig | None: ...
    @property
    def tokenizer_folder(self) -> Path | None: ...


def profile_of(model: Worded, settings: DataSettings) -> DataProfile:
    """Read, count and remember the samples of a source.

    Args:
        settings: with the model's context as the limit, where the job has none.

    Raises:
        JobError: from `data.prepare.prepare`.
    """
    own = model.tokenizer_folder
    if own is not None:
        return _profile(settings, own, "the model's own tokenizer", is_assumption=False)
    is_gemma = model.config is not None and "gemma" in model.config.family
    if is_gemma and (relative := demo_tokenizer_folder()) is not None:
        text = f"the tokenizer of {DEMO_MODEL}; this model's is not here"
        return _profile(settings, relative, text, is_assumption=True)
    text = (
        f"bytes, {BYTES_PER_TOKEN} a token and {TOKENS_PER_TURN} tokens a turn; "
        "this model's tokenizer is not here"
    )
    return _profile(settings, None, text, is_assumption=True)


def _profile(
    settings: DataSettings, folder: Path | None, counted_by: str, *, is_assumption: bool
) -> DataProfile:
    if folder is None:
        found = read_prepared(_estimated(settings))
    else:
        found = prepare(settings, folder)
    return profile_of_prepared(found, settings.source, counted_by, is_assumption=is_assumption)


def profile_of_prepared(
    prepared: Prepared, source: str, counted_by: str, *, is_assumption: bool = False
) -> DataProfile:
    """The profile of samples that a run has prepared already."""
    return DataProfile(
        source=source,
        samples=prepared.train,
        held_out=len(prepared.held_out),
        audit=prepared.audit,
        counted_by=counted_by,
        is_assumption=is_assumption,
    )


def _estimated(settings: DataSettings) -> Path:
    """Prepared samples whose tokens were counted from bytes, and have no ids."""
    settings = replace(settings, chat_template="")
    sources = [each for each in (settings.source, settings.held_out_source) if each]
    key = content_key(
        "from bytes", FORMAT_VERSION, asdict(settings), [content_hash(each) for each in sources]
    )

    counter = cast(TextTokenizer, ByteCounter())  # it has all that is used here

    def fill(folder: Path) -> None:
        write_account(folder, FORMAT_VERSION, collect(folder, settings, counter))

    return cached_folder(cache_folder("data") / key, fill)


class ByteCounter:
    """Stands in for a tokenizer where there is none: lengths from bytes, every id 0."""

    def encode_examples(self, examples: Iterable[Example]) -> Iterator[tuple[Example, Encoded]]:
        """As `data.tokenise.TextTokenizer.encode_examples`."""
        for example in examples:
            yield example, _conversation(example) if example.messages else _text(example.text)


def _num_tokens(text: str) -> int:
    return max(1, round(len(text.encode()) / BYTES_PER_TOKEN))


def _text(text: str) -> Encoded:
    counted = np.ones(_num_tokens(text) + 2, dtype=np.bool_)  # begin and end
    counted[:1] = False
    return Encoded(np.zeros(len(counted), dtype=np.int32), counted, (), (), 0)


def _conversation(example: Example) -> Encoded:
    """Markers, content and the token that ends the turn, which is learnt with it."""
    parts: list[np.ndarray] = [np.zeros(1, dtype=np.bool_)]
    length, cuts, ends, before = 1, [], [], ""
    if example.tools:  # their definitions stand before the first turn
        parts += [np.zeros(_num_tokens(example.tools), dtype=np.bool_)]
        length += len(parts[-1])
    for turn in example.messages:
        learnt = turn.role in _ROLES_LEARNT and turn.learnt
        if turn.role == "user" and before == "assistant":
            cuts.append(length)
        inside = _num_tokens(turn.content + turn.extra) + 1
        parts += [np.zeros(TOKENS_PER_TURN - 1, dtype=np.bool_), np.full(inside, learnt)]
        length += TOKENS_PER_TURN - 1 + inside
        if learnt:
            ends.append(length)
        before = turn.role
    counted = np.concatenate(parts)
    return Encoded(np.zeros(length, dtype=np.int32), counted, tuple(cuts), tuple(ends), 0)
