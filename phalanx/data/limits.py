"""What decides the samples, and what a row that is too long becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.data.samples import Sample
from phalanx.data.tokenise import Encoded
from phalanx.errors import JobError, nearest_names

TOO_LONG = ("error", "drop", "split", "truncate")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What decides the samples.

    Attributes:
        source: "python-docs"; a .jsonl, .json, .parquet or .txt file; a folder of them; or a Hub
            name (owner/name, owner/name/path).
        chat_template: file with a template to use instead of the model's own ("": none).
        max_tokens: longest document; 0: `context_tokens`.
        context_tokens: what the model can take; 0: not known, and then there is no limit.
        too_long: what to do with a longer row. "error": refuse them all. "drop": leave it out.
            "split": cut a conversation where a user's turn begins (later parts do not see earlier
            ones) and text every so many tokens. "truncate": keep the turns that fit whole (a
            conversation whose first answer does not fit is dropped), the beginning of a text.
        held_out_frac: share of rows kept for evaluation, chosen by the hash of their content.
        held_out_source: rows for evaluation from here; then no share of `source` is held out, and
            rows that stand in both are not trained on.
        max_rows: use at most so many rows of `source`, chosen by hash as well; 0: all.
    """

    source: str = "python-docs"
    chat_template: str = ""
    max_tokens: int = 0
    context_tokens: int = 0
    too_long: str = "error"
    held_out_frac: float = 0.05
    held_out_source: str = ""
    max_rows: int = 0

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            legal = nearest_names(self.too_long, TOO_LONG)
            rule = "is no way to treat long rows"
            raise JobError("job/bad-value", "data.too_long", self.too_long, rule, legal=legal)
        if self.max_tokens != 0 and self.max_tokens < 2:
            rule = "must be >= 2, or 0 for the model's context: a first token is never a target"
            raise JobError("job/bad-value", "data.max_tokens", self.max_tokens, rule, legal=[0, 2])
        if not 0.0 <= self.held_out_frac < 1.0:
            rule = "must lie in 0 <= held_out_frac < 1"
            raise JobError("job/bad-value", "data.held_out_frac", self.held_out_frac, rule)

    @property
    def limit(self) -> int:
        """Tokens of the longest document; a number beyond any row where there is no limit."""
        return self.max_tokens or self.context_tokens or 1 << 62

    @property
    def limit_name(self) -> str:
        """The limit as an error names it."""
        if self.max_tokens:
            return f"data.max_tokens = {self.max_tokens}"
        return f"the model's context of {self.context_tokens} tokens"


class Cut(NamedTuple):
    """What a row becomes.

    Attributes:
        ranges: token ranges of its documents.
        begin: token put before every document but one that starts the row; None: none.
        reason: why something was dropped or cut; "" when nothing was.
        is_refused: the settings do not say what to do with the row.
    """

    ranges: tuple[tuple[int, int], ...]
    begin: int | None = None
    reason: str = ""
    is_refused: bool = False

    def samples(self, row: Encoded, keys: list[int]) -> list[Sample]:
        """The documents."""
        return [self._sample(row, *range_, key) for range_, key in zip(self.ranges, keys)]

    def _sample(self, row: Encoded, start: int, end: int, key: int) -> Sample:
        tokens, counted = row.tokens[start:end], row.counted[start:end].copy()
        if start > 0 and self.begin is not None:
            tokens = np.concatenate([np.asarray([self.begin], dtype=tokens.dtype), tokens])
            counted = np.concatenate([np.zeros(1, dtype=np.bool_), counted])
        counted[:1] = False  # nothing stands before the first token of a part
        return Sample(tokens, counted, key)


def cut_row(row: Encoded, settings: DataSettings) -> Cut:
    """The documents that a row becomes; each has something to learn.

    A conversation ends a document with whole turns; plain text may be cut anywhere.
    """
    limit, length = settings.limit, len(row.tokens)
    if not row.counted.any():
        return Cut((), reason="nothing in it is learnt")
    if length <= limit:
        return Cut(((0, length),))
    if settings.too_long == "error":
        return Cut((), reason=f"longer than {settings.limit_name}", is_refused=True)
    if settings.too_long == "drop":
        return Cut((), reason="too long")
    if settings.too_long == "truncate":
        return _truncated(row, limit)
    return _split(row, limit)


def _truncated(row: Encoded, limit: int) -> Cut:
    end = limit if not row.ends else max((end for end in row.ends if end <= limit), default=0)
    if not row.counted[1:end].any():
        return Cut((), reason="too long, and nothing that is learnt fits")
    return Cut(((0, end),), reason="truncated")


def _split(row: Encoded, limit: int) -> Cut:
    ranges, refused = (
        _split_conversation(row, limit) if row.ends else (_split_text(row, limit), False)
    )
    if refused:
        return Cut((), reason="too long, and one exchange alone is", is_refused=True)
    kept = tuple((start, end) for start, end in ranges if _learns(row, start, end))
    if not kept:
        return Cut((), reason="too long, and nothing that is learnt fits")
    return Cut(kept, row.begin, f"split into {len(kept)}")


def _learns(row: Encoded, start: int, end: int) -> bool:
    first = start if start > 0 and row.begin is not None else start + 1
    return bool(row.counted[first:end].any())


def _split_text(row: Encoded, limit: int) -> list[tuple[int, int]]:
    length, ranges, start = len(row.tokens), [], 0
    while start < length:
        room = limit - (start > 0 and row.begin is not None)
        ranges.append((start, min(start + room, length)))
        start += room
    return ranges


def _split_conversation(row: Encoded, limit: int) -> tuple[list[tuple[int, int]], bool]:
    """As many whole exchanges as fit; whether one alone does not."""
    edges, ranges, start = [*row.cuts, len(row.tokens)], [], 0
    for index, edge in enumerate(edges):
        room = limit - (start > 0 and row.begin is not None)
        if edge - start > room:
            return [], True
        if index + 1 == len(edges) or edges[index + 1] - start > room:
            ranges.append((start, edge))
            start = edge
    return ranges, False
