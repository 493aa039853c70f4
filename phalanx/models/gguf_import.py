"""Gemma 3 GGUF files as canonical tensors, a config and a tokenizer. Needs the `gguf` package.

What llama.cpp's conversion changed is undone here: names, norms stored as 1 + w, and space runs in
the vocabulary, which the file spells with real spaces. Facts: the GGUF specification (ggml
repository, docs/gguf.md) and llama.cpp's convert_hf_to_gguf.py, Gemma3Model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.spec import DecoderConfig, canonical_tensors, small_config

_ROWS_AT_ONCE = 16_384  # of a quantised matrix, to keep the float32 copy small
_SPACE = "\u2581"  # how sentencepiece vocabularies write a space

_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KNOWN_KEYS = (
    "context_length embedding_length block_count feed_forward_length attention.head_count "
    "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length "
    "attention.value_length attention.sliding_window rope.freq_base"
).split()


class _Piece(IntEnum):
    """Kinds of vocabulary entries (tokenizer.ggml.token_type)."""

    CONTROL = 3
    USER_DEFINED = 4


def gguf_name(canonical: str) -> str:
    """The name that llama.cpp gives a canonical tensor."""
    module = canonical.removesuffix(".weight")
    if module in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.weight"


class GgufModel:
    """A Gemma 3 text model in a GGUF file.

    Args:
        path: the file.

    Raises:
        JobError: `model/unknown` for another architecture, `model/tensor` for missing tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = gguf.GGUFReader(self.path)
        architecture = self._value("general.architecture")
        if architecture != "gemma3":
            where = f"{self.path}: general.architecture"
            raise JobError("model/unknown", where, architecture, "is not read", legal=["gemma3"])
        self._require_known_keys()
        self._tokens = [bytes(part).decode() for part in self._parts("tokenizer.ggml.tokens")]
        self.config = self._config()
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for name in canonical_tensors(self.config):
            if gguf_name(name) not in self._tensors:
                raise JobError("model/tensor", str(self.path), gguf_name(name), "is missing")

    def _require_known_keys(self) -> None:
        """A size or option that `_config` does not read would silently change the model."""
        for key in self._reader.fields:
            if key.startswith("gemma3.") and key.removeprefix("gemma3.") not in _KNOWN_KEYS:
                rule = "is a key that this reader cannot honour"
                raise JobError("model/unknown", str(self.path), key, rule)
        if (theta := self._value("gemma3.rope.freq_base", 1e6)) != 1e6:
            where = f"{self.path}: rope.freq_base"
            raise JobError("model/unknown", where, theta, "is not Gemma 3's", legal=[1e6])

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _parts(self, key: str) -> list:
        field = self._reader.fields[key]
        return [field.parts[at] for at in field.data]

    def _config(self) -> DecoderConfig:
        def size(key: str) -> int:
            return int(self._value(f"gemma3.{key}"))

        # The file has no local RoPE base, layer pattern or query scale: Gemma 3's own, which differ
        # from these only for the 27B (a query scale that is not the head size).
        return small_config(
            vocab_size=len(self._tokens),
            hidden_size=size("embedding_length"),
            intermediate_size=size("feed_forward_length"),
            num_layers=size("block_count"),
            num_heads=size("attention.head_count"),
            num_kv_heads=size("attention.head_count_kv"),
            head_dim=size("attention.key_length"),
            window=size("attention.sliding_window"),
            max_positions=size("context_length"),
            # float32 in the file, a decimal in configs: 9.99999997e-07 is 1e-06
            norm_eps=float(f"{self._value('gemma3.attention.layer_norm_rms_epsilon'):.6g}"),
            bos_token=self._value("tokenizer.ggml.bos_token_id"),
            eos_tokens=(self._value("tokenizer.ggml.eos_token_id"),),
            pad_token=self._value("tokenizer.ggml.padding_token_id"),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole tensor in the config's dtype), one at a time."""
        for name, spec in canonical_tensors(self.config).items():
            stored = self._tensors[gguf_name(name)]
            dtype = getattr(torch, spec.dtype)
            whole = torch.empty(spec.shape, dtype=dtype)
            if len(spec.shape) == 1:
                # llama.cpp keeps norms in float32 as 1 + w
                whole.copy_(torch.from_numpy(stored.data - 1))
            else:
                for at in range(0, spec.shape[0], _ROWS_AT_ONCE):
                    rows = gguf.dequantize(stored.data[at : at + _ROWS_AT_ONCE], stored.tensor_type)
                    whole[at : at + _ROWS_AT_ONCE] = torch.from_numpy(rows)
            yield name, whole

    def tokenizer(self) -> Tokenizer:
        """Gemma's byte-fallback BPE, with its merges recovered from the vocabulary."""
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in self._tokens]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        unknown = self._value("tokenizer.ggml.unknown_token_id")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=recovered_merges(vocabulary),
                unk_token=tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        first = tokens[self.config.bos_token]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first}:1 $B:1",
            special_tokens=[(first, self.config.bos_token)],
        )
        kinds = [int(part[0]) for part in self._parts("tokenizer.ggml.token_type")]
        control = [token for token, kind in zip(tokens, kinds) if kind == _Piece.CONTROL]
        # a run of spaces is left to the merges: normalisation rewrites it before they see it
        user_defined = [
            token
            for token, kind in zip(tokens, kinds)
            if kind == _Piece.USER_DEFINED and token.strip(_SPACE)
        ]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in user_defined])
        return tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and the tokenizer_config.json that transformers wants beside it."""
        self.tokenizer().save(str(folder / "tokenizer.json"))
        special = {
            f"{name}_token": self._tokens[self._value(f"tokenizer.ggml.{key}_token_id")]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
        }
        table = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(table, indent=2) + "\n")


def recovered_merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """BPE merges that a sentencepiece vocabulary implies: every split of a token into two tokens.

    Ordered by the token that results, then longest left part first.
    """
    return [
        (token[:at], token[at:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
