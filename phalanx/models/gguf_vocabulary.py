"""Tokenizers in GGUF files: rebuilt as `tokenizer.json`, and written from it.

Two kinds: "llama" (sentencepiece BPE with byte fallback, as Gemma's) and "gpt2" (byte-level BPE, as
Llama 3's and Qwen's). Facts: llama.cpp's conversion/base.py and src/llama-vocab.cpp (expressions of
the pre-tokenizers).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as Processors

from phalanx.errors import JobError

SPACE = "\u2581"  # how sentencepiece vocabularies write a space
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # tokenizer.ggml.model
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# tokenizer.ggml.pre -> how text is cut into words before merging
PRE_TOKENIZERS = {
    "llama-bpe": rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}",
}
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPECIAL_SCORE = -1000.0
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Piece(IntEnum):
    """Kinds of vocabulary entries (tokenizer.ggml.token_type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer.

    Attributes:
        model, pre: "llama" or "gpt2", and the name of the pre-tokenizer.
        tokens, kinds: text and kind of each entry.
        scores: of "llama".
        merges: "left right" of "gpt2", in the order of their ranks.
        special: "bos", "eos", "unk", "pad" -> number of the token.
        adds_bos: every text begins with it.
        chat_template: "" when there is none.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    special: Mapping[str, int] = field(default_factory=dict)
    adds_bos: bool = True
    chat_template: str = ""

    @staticmethod
    def of_keys(keys: Mapping[str, Any]) -> GgufVocabulary:
        """What the keys of a file's head say."""

        def get(key: str, default: Any = None) -> Any:
            return keys.get(f"tokenizer.ggml.{key}", default)

        numbers = {name: get(f"{key}_token_id") for name, key in _SPECIAL.items()}
        return GgufVocabulary(
            model=get("model", ""),
            pre=get("pre", "default"),
            tokens=get("tokens", ()),
            kinds=get("token_type", ()),
            merges=get("merges", ()),
            special={name: number for name, number in numbers.items() if number is not None},
            adds_bos=get("add_bos_token", numbers["bos"] is not None),
            chat_template=keys.get("tokenizer.chat_template", ""),
        )

    def tokenizer(self, where: str) -> Tokenizer:
        """The tokenizer of the `tokenizers` library.

        Raises:
            JobError: `model/unknown` for another kind or an unknown pre-tokenizer.
        """
        if self.model == SENTENCEPIECE:
            return self._sentencepiece()
        if self.model != BYTE_LEVEL:
            rule, legal = "is a tokenizer that is not rebuilt here", [SENTENCEPIECE, BYTE_LEVEL]
            where = f"{where}: tokenizer.ggml.model"
            raise JobError("model/unknown", where, self.model, rule, legal=legal)
        if self.pre not in PRE_TOKENIZERS:
            rule, where = (
                "is a pre-tokenizer that is not known here",
                f"{where}: tokenizer.ggml.pre",
            )
            raise JobError("model/unknown", where, self.pre, rule, legal=PRE_TOKENIZERS)
        return self._byte_level()

    def _sentencepiece(self) -> Tokenizer:
        """Byte-fallback BPE, with its merges recovered from the vocabulary."""
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in self.tokens]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=recovered_merges(vocabulary),
                unk_token=tokens[self.special["unk"]],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        if self.adds_bos:
            tokenizer.post_processor = self._template(tokens)
        self._add_special(tokenizer, tokens)
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        named = zip(self.tokens, self.kinds)
        vocabulary = {token: at for at, (token, kind) in enumerate(named) if kind != Piece.UNUSED}
        merges = [tuple(merge.split(" ", 1)) for merge in self.merges]
        is_llama = self.pre == "llama-bpe"
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama))
        if not is_llama:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRE_TOKENIZERS[self.pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        if self.adds_bos and "bos" in self.special:
            template = self._template(self.tokens)
            tokenizer.post_processor = Processors([ByteLevel(trim_offsets=False), template])
        self._add_special(tokenizer, self.tokens)
        return tokenizer

    def _template(self, tokens: Sequence[str]) -> TemplateProcessing:
        first = tokens[self.special["bos"]]
        return TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first}:1 $B:1",
            special_tokens=[(first, self.special["bos"])],
        )

    def _add_special(self, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
        control = [t for t, kind in zip(tokens, self.kinds) if kind == Piece.CONTROL]
        # a run of spaces is left to the merges: normalisation rewrites it before they see it
        user_defined = [
            token
            for token, kind in zip(tokens, self.kinds)
            if kind == Piece.USER_DEFINED and token.strip(SPACE)
        ]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in user_defined])

    def save(self, folder: Path, where: str) -> None:
        """Write tokenizer.json, what transformers wants beside it, and the chat template."""
        self.tokenizer(where).save(str(folder / "tokenizer.json"))
        is_pieces = self.model == SENTENCEPIECE
        table: dict[str, Any] = {
            "tokenizer_class": "GemmaTokenizer" if is_pieces else "PreTrainedTokenizerFast",
            "add_bos_token": self.adds_bos,
            **{f"{name}_token": self.tokens[number] for name, number in self.special.items()},
        }
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text)
        if self.chat_template:
            (folder / "chat_template.jinja").write_text(self.chat_template)


def recovered_merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """BPE merges that a sentencepiece vocabulary implies: every split of a token into two tokens.

    Ordered by the token that results, then longest left part first.
    """
    return [
        (token[:at], token[at:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]


def vocabulary_of(folder: Path, vocab_size: int) -> GgufVocabulary:
    """What a GGUF file says of the tokenizer of a model folder (without its special tokens).

    Args:
        vocab_size: rows of the embedding; numbers without a token become "[PADn]".

    Raises:
        JobError: `model/unknown` for a tokenizer that llama.cpp has no name for here.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise JobError("job/not-found", "tokenizer", path, "is absent, and GGUF files hold it")
    table = json.loads(path.read_bytes())
    model, added = table["model"], {each["id"]: each for each in table["added_tokens"]}
    where = f"{path}: model"
    if model.get("type") != "BPE":
        raise JobError("model/unknown", where, model.get("type"), "must be BPE", legal=["BPE"])
    named = {number: token for token, number in model["vocab"].items()}
    named |= {number: each["content"] for number, each in added.items()}
    is_pieces = bool(model.get("byte_fallback"))
    if is_pieces:
        _require_order(model, where)
    size = max(vocab_size, *(number + 1 for number in named))
    tokens = [named.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [_kind(number, named, added, is_pieces) for number in range(size)]
    if is_pieces:
        tokens = [
            token.replace(SPACE, " ") if kind == Piece.USER_DEFINED else token
            for token, kind in zip(tokens, kinds)
        ]
        return GgufVocabulary(SENTENCEPIECE, "default", tokens, kinds, _scores(kinds))
    return GgufVocabulary(BYTE_LEVEL, _pre_tokenizer(table, path), tokens, kinds)


def _kind(number: int, named: Mapping[int, str], added: Mapping, is_pieces: bool) -> Piece:
    if number not in named:
        return Piece.UNUSED
    if number in added:
        return Piece.CONTROL if added[number]["special"] else Piece.USER_DEFINED
    if is_pieces and len(named[number]) > 1 and not named[number].strip(SPACE):
        return Piece.USER_DEFINED  # runs of spaces
    return Piece.BYTE if is_pieces and _BYTE.fullmatch(named[number]) else Piece.NORMAL


def _scores(kinds: Sequence[Piece]) -> list[float]:
    """llama.cpp merges the pair whose result has the highest score: the earliest token's."""
    scores, rank = [], 0
    for kind in kinds:
        is_normal = kind == Piece.NORMAL
        scores.append(float(-rank) if is_normal else 0.0 if kind == Piece.BYTE else _SPECIAL_SCORE)
        rank += is_normal
    return scores


def _require_order(model: Mapping[str, Any], where: str) -> None:
    """Merges by rank must make tokens in the order of their numbers: GGUF keeps scores only."""
    vocabulary, before = model["vocab"], -1
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        made = vocabulary[left + right]
        if made < before:
            rule = "are not in the order of the tokens that they make, as scores would have it"
            raise JobError("model/unknown", f"{where}.merges", f"{left} {right}", rule)
        before = made


def _pre_tokenizer(table: Mapping[str, Any], path: Path) -> str:
    """llama.cpp's name of the expression that cuts words."""
    outer = table.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    found = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    for name, pattern in PRE_TOKENIZERS.items():
        if found == [pattern]:
            return name
    rule = "is a pre-tokenizer whose name in llama.cpp is not known here"
    legal = list(PRE_TOKENIZERS)
    raise JobError("model/unknown", f"{path}: pre_tokenizer", found[:1], rule, legal=legal)
