"""Rows into samples, one at a time, with the account of what became of each."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from phalanx.data.limits import TOO_LONG, Cut, DataSettings, cut_row
from phalanx.data.rows import Example
from phalanx.data.samples import Audit
from phalanx.data.sources import distinct, read_examples
from phalanx.data.store import PartWriter, part_writers
from phalanx.data.tokenise import Encoded, TextTokenizer
from phalanx.errors import JobError

_KEY_BITS = 64
_DUPLICATE = "duplicate"


def collect(folder: Path, settings: DataSettings, tokenizer: TextTokenizer) -> Audit:
    """Write the samples of a source and the list of what was dropped.

    Raises:
        JobError: `data/row` for rows that are too long and nothing says what to do with them, and
            for a row that cannot be used; `data/empty` when nothing can be learnt.
    """
    with part_writers(folder) as writers:
        with (folder / "dropped.jsonl").open("w", encoding="utf-8") as dropped:
            collector = _Collector(settings, writers, dropped)
            if settings.held_out_source:
                rows = read_examples(settings.held_out_source)
                for example, row in tokenizer.encode_examples(rows):
                    collector.add(example, row, "held_out")
                collector.end_of_held_out()
            examples, beyond = _at_most(settings)
            for example, row in tokenizer.encode_examples(examples):
                collector.add(example, row)
        return collector.audit(beyond)


class _Collector:
    """Decides on rows one after another and counts."""

    def __init__(
        self, settings: DataSettings, writers: dict[str, PartWriter], dropped: IO[str]
    ) -> None:
        self.settings, self.writers, self._dropped = settings, writers, dropped
        self._held_out_below = int(settings.held_out_frac * 2**_KEY_BITS)
        if settings.held_out_source:
            self._held_out_below = 0
        self._seen: set[int] = set()
        self._held_out_keys: set[int] = set()
        self._rows = Counter[str]()
        self._tokens = Counter[str]()
        self._refused: list[tuple[str, int, str]] = []  # first and longest row: where, tokens, why
        self._num_refused = 0
        self._reasons = Counter[str]()

    def end_of_held_out(self) -> None:
        """What was added so far is held out."""
        self._held_out_keys, self._seen = self._seen, set()

    def add(self, example: Example, row: Encoded, part: str = "") -> None:
        """Count a row, and write what it becomes."""
        key = example.key
        part = part or self._part_of(key)
        cut = self._decide(example, row, key)
        parts = self._parts(cut, row, part, key)
        self._rows[f"{part}/in"] += 1
        self._rows[f"{part}/dropped"] += not cut.ranges
        self._rows[f"{part}/cut"] += bool(cut.ranges) and bool(cut.reason)
        self._rows[f"{part}/duplicate"] += cut.reason == _DUPLICATE
        samples = cut.samples(row, [key for _, key in parts])
        for sample, (into, _) in zip(samples, parts):
            self.writers[into].add(sample, example.where)
        lost = len(row.tokens) - sum(end - start for start, end in cut.ranges)
        self._tokens[f"{part}/dropped"] += lost
        repeated = sum(len(each.tokens) for each in samples) + lost - len(row.tokens)
        self._tokens["repeated"] += repeated
        if cut.reason:
            self._note(example, row, part, lost, cut.reason)
        if cut.is_refused:
            self._refuse(example.where, len(row.tokens), cut.reason)

    def _part_of(self, key: int) -> str:
        return "held_out" if key < self._held_out_below else "train"

    def _decide(self, example: Example, row: Encoded, key: int) -> Cut:
        if key in self._seen:
            return Cut((), reason=_DUPLICATE)
        self._seen.add(key)
        if key in self._held_out_keys:
            return Cut((), reason="also in data.held_out_source")
        cut = cut_row(row, self.settings)
        has_answer = any(each.role == "assistant" for each in example.messages)
        if example.messages and not has_answer:
            return Cut((), reason="no assistant turn")
        return cut

    def _parts(self, cut: Cut, row: Encoded, part: str, key: int) -> list[tuple[str, int]]:
        """(part, key) of each document of a row.

        Those of a conversation stay together. Those of a text are as good as rows of their own:
        otherwise a source that is one long text would have no held-out part.
        """
        num = len(cut.ranges)
        if row.ends or num < 2 or self.settings.held_out_source:
            return [(part, key)] * num
        keys = [_mixed(key, index) for index in range(num)]
        return [(self._part_of(each), each) for each in keys]

    def _note(self, example: Example, row: Encoded, part: str, lost: int, reason: str) -> None:
        self._reasons[reason] += lost > 0
        line = {
            "where": example.where,
            "part": part,
            "tokens": len(row.tokens),
            "dropped_tokens": lost,
            "reason": reason,
        }
        self._dropped.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _refuse(self, where: str, tokens: int, reason: str) -> None:
        self._num_refused += 1
        found = (where, tokens, reason)
        if not self._refused:
            self._refused = [found, found]
        elif tokens > self._refused[1][1]:
            self._refused[1] = found

    def audit(self, rows_beyond_max: int) -> Audit:
        """The account, if there is something to learn and nothing was refused."""
        self._require_decided()
        train, held_out = self.writers["train"], self.writers["held_out"]
        if not train.num_samples:
            raise self._nothing(held_out.num_samples)
        dropped = self._tokens["train/dropped"]
        return Audit(
            rows_in=self._rows["train/in"],
            rows_dropped=self._rows["train/dropped"],
            rows_cut=self._rows["train/cut"],
            rows_duplicate=self._rows["train/duplicate"],
            rows_beyond_max=rows_beyond_max,
            samples=train.num_samples,
            longest_sample=train.longest,
            tokens_in=train.num_tokens + dropped,
            tokens_trained=train.num_counted,
            tokens_masked=train.num_tokens - train.num_counted,
            tokens_dropped=dropped,
            tokens_repeated=self._tokens["repeated"],
            rows_held_out=self._rows["held_out/in"],
            samples_held_out=held_out.num_samples,
            tokens_held_out=held_out.num_tokens,
            tokens_held_out_dropped=self._tokens["held_out/dropped"],
        )

    def _require_decided(self) -> None:
        if not self._refused:
            return
        (where, tokens, reason), (longest_where, longest, _) = self._refused
        rule = f"is {reason}; no other row is"
        if self._num_refused > 1:
            rule = f"is {reason}, the first of {self._num_refused} such rows; the longest has"
            rule += f" {longest} tokens ({longest_where})"
        rule += "; set data.too_long"
        legal = [each for each in TOO_LONG[1:] if each != self.settings.too_long]
        raise JobError("data/row", where, f"{tokens} tokens", rule, legal=legal)

    def _nothing(self, num_held_out: int) -> JobError:
        settings = self.settings
        if num_held_out and not settings.held_out_source:
            rule = f"all {num_held_out} samples fell into the held-out part"
            return JobError("data/empty", "data.held_out_frac", settings.held_out_frac, rule)
        rows = self._rows["train/in"] + self._rows["held_out/in"]
        why = ", ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common())
        rule = f"none of its {rows} rows has a token to learn ({why or 'they are empty'})"
        return JobError("data/empty", "data.source", settings.source, rule)


def _at_most(settings: DataSettings) -> tuple[Iterable[Example], int]:
    """A fixed choice of the rows, in their order, and how many distinct ones it leaves out.

    The choice is independent of the split by `key` itself. Rows are read twice for it.
    """
    if not settings.max_rows:
        return read_examples(settings.source), 0
    num_rows = 0
    largest: list[int] = []  # the max_rows smallest marks, negated: a heap of the largest
    for example in distinct(read_examples(settings.source)):
        num_rows += 1
        heapq.heappush(largest, -_mixed(example.key, 0))
        if len(largest) > settings.max_rows:
            heapq.heappop(largest)
    if num_rows <= settings.max_rows:
        return read_examples(settings.source), 0
    bound = -largest[0]
    return _chosen(settings.source, bound), num_rows - settings.max_rows


def _chosen(source: str, bound: int) -> Iterator[Example]:
    return (each for each in read_examples(source) if _mixed(each.key, 0) <= bound)


def _mixed(key: int, index: int) -> int:
    """64 other bits of a key, independent of it."""
    data = key.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
