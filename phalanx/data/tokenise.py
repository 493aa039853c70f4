"""Rows into tokens with the model's own tokenizer; a small tokenizer for models from scratch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import (
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from phalanx.data.chat import PLAIN_TEMPLATE, ChatTemplate
from phalanx.data.marks import Rendered, mark_turns
from phalanx.data.rows import Example
from phalanx.errors import JobError, shown

_BATCH_ROWS, _BATCH_CHARS = 1024, 1 << 22


@dataclass(frozen=True)
class Encoded:
    """A row as tokens, before the limit on its length.

    Attributes:
        tokens, counted: int32 ids; targets of the loss (never the first token).
        cuts: tokens at which a conversation may be split: where a user's turn begins behind an
            assistant's.
        ends: one past the last token of each learnt turn; () for plain text, which may be cut
            anywhere.
        begin: the token that begins every document, if the row begins with it.
    """

    tokens: np.ndarray
    counted: np.ndarray
    cuts: tuple[int, ...]
    ends: tuple[int, ...]
    begin: int | None


def tokenizer_hash(folder: str | Path, template_file: str = "") -> str:
    """Hash of everything that decides how text becomes tokens, without building the tokenizer."""
    template = ChatTemplate.from_folder(folder, template_file)
    digest = hashlib.sha256(_require_tokenizer(folder).read_bytes())
    digest.update(json.dumps([template.source, template.tokens]).encode())
    return digest.hexdigest()


def _require_tokenizer(folder: str | Path) -> Path:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise JobError("job/not-found", "model folder", folder, "has no tokenizer.json")
    return path


class TextTokenizer:
    """`tokenizer.json` with its chat template.

    Args:
        folder: model folder with tokenizer.json and tokenizer_config.json.
        template_file: a chat template to use instead of the folder's ("": none).

    Raises:
        JobError: `job/not-found` without tokenizer.json, `job/syntax` for one that cannot be read.
    """

    def __init__(self, folder: str | Path, template_file: str = "") -> None:
        path = _require_tokenizer(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            rule = f"is no tokenizer: {str(error).splitlines()[0]}"
            raise JobError("job/syntax", str(path), None, rule) from error
        # Nothing is added to a text here. What this leaves out as well: some tokenizers shorten the
        # offsets of tokens by the white space in them, and with that the loss would miss it.
        self._tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
        self.template = ChatTemplate.from_folder(folder, template_file)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {index: token.content for index, token in added.items() if token.special}
        if (end := self.token_id("eos_token")) is not None:
            special[end] = self.template.tokens["eos_token"]
        self._special = frozenset(special)
        self._special_texts = tuple(text for text in special.values() if text)

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, key: str) -> int | None:
        """Id of "bos_token", "eos_token" or "pad_token"; None when there is none."""
        text = self.template.tokens.get(key, "")
        return self._tokenizer.token_to_id(text) if text else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: nothing is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def encode_examples(self, examples: Iterable[Example]) -> Iterator[tuple[Example, Encoded]]:
        """Every row as tokens, in order.

        Raises:
            JobError: `data/row` for a conversation that the template refuses or whose turns cannot
                be told apart, or a turn that does not end in a special token.
        """
        for batch in _batches_of(examples):
            rendered = [self._rendered(example) for example in batch]
            encodings = self._tokenizer.encode_batch(
                [each.text for each in rendered], add_special_tokens=False
            )
            for example, text, encoding in zip(batch, rendered, encodings):
                marked = self._marked if example.messages else self._plain
                yield example, marked(example, text, encoding)

    def _rendered(self, example: Example) -> Rendered:
        if not example.messages:
            return Rendered(example.text, (), ())
        return mark_turns(self.template, example, self._special_texts)

    def _plain(self, example: Example, text: Rendered, encoding: Encoding) -> Encoded:
        """[begin] text [end], unless it has them; everything but the first token counts."""
        begin, end = self.token_id("bos_token"), self.token_id("eos_token")
        before = [] if begin is None or encoding.ids[:1] == [begin] else [begin]
        behind = [] if end is None or encoding.ids[-1:] == [end] else [end]
        ids = [*before, *encoding.ids, *behind]
        tokens = np.asarray(ids, dtype=np.int32)
        counted = np.full(len(tokens), bool(encoding.ids))
        counted[:1] = False
        return Encoded(tokens, counted, (), (), begin)

    def _marked(self, example: Example, text: Rendered, encoding: Encoding) -> Encoded:
        """A token counts when it lies wholly inside an assistant turn."""
        tokens = np.asarray(encoding.ids, dtype=np.int32)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        counted = np.zeros(len(tokens), dtype=np.bool_)
        ends = []
        for start, end in text.learnt:
            end = _reach(text.text, end, offsets)
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            inside &= offsets[:, 0] < offsets[:, 1]
            last = int(np.flatnonzero(inside)[-1]) if inside.any() else -1
            if last < 0 or offsets[last, 1] != end or encoding.ids[last] not in self._special:
                rule = "the chat template does not end an assistant turn in a special token"
                raise JobError("data/row", example.where, shown(text.text[start:end][-20:]), rule)
            counted |= inside
            ends.append(last + 1)
        counted[:1] = False
        cuts = np.searchsorted(offsets[:, 0], text.cuts)
        begin = self.token_id("bos_token")
        begin = begin if len(tokens) and tokens[0] == begin else None
        return Encoded(tokens, counted, tuple(int(cut) for cut in cuts), tuple(ends), begin)


def _reach(text: str, end: int, offsets: np.ndarray) -> int:
    """Where the token that ends a turn ends: some take the white space behind them along."""
    at = int(np.searchsorted(offsets[:, 0], end)) - 1
    reach = int(offsets[at, 1]) if at >= 0 else end
    return reach if text[end:reach].isspace() else end


def _batches_of(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    num_chars = 0
    for example in examples:
        batch.append(example)
        num_chars += len(example.text) + sum(len(each.content) for each in example.messages)
        if len(batch) == _BATCH_ROWS or num_chars > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


_SPECIAL = ("<pad>", "<eos>", "<bos>")
_SMALL_CONFIG = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "chat_template": PLAIN_TEMPLATE,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Path:
    """Train a byte-level BPE tokenizer and write it as a tokenizer folder.

    Args:
        texts: what it should compress well.
        vocab_size: ids in total; at least 256 bytes and 3 special tokens.

    Returns:
        `folder`, with tokenizer.json and tokenizer_config.json; ids 0, 1, 2 are pad, eos, bos.
    """
    smallest = 256 + len(_SPECIAL)
    if vocab_size < smallest:
        rule = f"needs room for 256 bytes and {len(_SPECIAL)} special tokens"
        raise JobError("job/bad-value", "vocab_size", vocab_size, rule, legal=[smallest])
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\w+| ?[^\s\w]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_SMALL_CONFIG, indent=1) + "\n")
    return folder
