"""`tokenizer.model` written from a vocabulary: llama.cpp's converter knows such tokenizers by it.

It reads which tokens are never split from `added_tokens_decoder`. The model file is a protocol
buffer. Facts: sentencepiece_model.proto of the sentencepiece repository (field numbers),
developers.google.com/protocol-buffers/docs/encoding.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from phalanx.models.gguf_vocabulary import SPACE, GgufVocabulary, Piece, vocabulary_of

_VARINT, _BYTES, _FLOAT = 0, 2, 5  # wire types
_BPE = 2  # TrainerSpec.model_type


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def sentencepiece_model(vocabulary: GgufVocabulary, special: dict[str, int]) -> bytes:
    """The content of tokenizer.model.

    Args:
        vocabulary: of the kind "llama", with scores.
        special: "bos", "eos", "unk", "pad" -> number of the token.
    """
    pieces = bytearray()
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds):
        text = token.replace(" ", SPACE) if kind == Piece.USER_DEFINED else token
        # exactly one piece has to be the unknown one
        kind = Piece.UNKNOWN if token == vocabulary.tokens[special["unk"]] else kind
        piece = _bytes(1, text.encode()) + _varint(2 << 3 | _FLOAT) + struct.pack("<f", score)
        pieces += _bytes(1, piece + _number(3, int(kind)))
    trainer = _number(3, _BPE) + _number(4, len(vocabulary.tokens)) + _number(35, 1)
    for field, name in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")):
        if name in special:
            trainer += _number(field, special[name])
    # no prefix, no removal of white space, spaces as SPACE
    normalizer = _bytes(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return bytes(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def complete_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.model beside a tokenizer.json that is a sentencepiece BPE and has none.

    Tokens that are never split are named in tokenizer_config.json, where it does not do so. Other
    tokenizers are left as they are.
    """
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if (folder / "tokenizer.model").exists() or not (path.is_file() and config.is_file()):
        return
    table = json.loads(path.read_bytes())
    if table["model"].get("type") != "BPE" or not table["model"].get("byte_fallback"):
        return
    vocabulary = vocabulary_of(folder, vocab_size)
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    named = json.loads(config.read_bytes())
    special = {}
    for name in ("bos", "eos", "unk", "pad"):
        token = named.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in numbers:
            special[name] = numbers[text]
    special.setdefault("unk", numbers.get(table["model"].get("unk_token"), 0))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(vocabulary, special))
    if "added_tokens_decoder" not in named:
        named["added_tokens_decoder"] = _added_tokens(vocabulary)
        config.write_text(json.dumps(named, indent=2, ensure_ascii=False) + "\n")


def _added_tokens(vocabulary: GgufVocabulary) -> dict[str, dict[str, Any]]:
    whole = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        str(number): {
            "content": token.replace(" ", SPACE),
            "special": kind == Piece.CONTROL,
            **whole,
        }
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds))
        if kind in (Piece.CONTROL, Piece.USER_DEFINED)
    }
