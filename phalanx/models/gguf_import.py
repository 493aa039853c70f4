"""GGUF files as canonical tensors, a config and a tokenizer. Needs the `gguf` package.

What llama.cpp's conversion changed is undone: names, norms stored as 1 + w, the order of rotated
channels, and space runs in vocabularies, which files spell with real spaces. Facts: `gguf_forms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.gguf_forms import FORMS, ROPE_FACTORS, llama3_rope
from phalanx.models.gguf_vocabulary import GgufVocabulary
from phalanx.models.spec import DecoderConfig, TensorSpec, canonical_tensors, parse_config

_ROWS_AT_ONCE = 16_384  # of a quantised matrix, to keep the float32 copy small
_HEAD = "output.weight"
_UNREAD = ("tokenizer.ggml.scores",)  # the order of the tokens says the same


class GgufModel:
    """A text model in a GGUF file.

    Args:
        path: the file.

    Raises:
        JobError: `model/unknown` for another architecture or a key that cannot be honoured,
            `model/tensor` for a damaged file, missing or misshapen tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._reader = gguf.GGUFReader(self.path)
            fields = {
                key: field.contents()
                for key, field in self._reader.fields.items()
                if key not in _UNREAD
            }
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            rule = f"cannot be read as a GGUF file: {error}"
            raise JobError("model/tensor", "model.name", path, rule) from error
        architecture = fields.get("general.architecture")
        if architecture not in FORMS:
            where = f"{self.path}: general.architecture"
            rule = "is an architecture that is not read from GGUF files"
            raise JobError("model/unknown", where, architecture, rule, legal=FORMS)
        self._form = FORMS[architecture]
        self._fields = fields
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.vocabulary = self._vocabulary()
        self.config = self._config()
        self._require_tensors()

    def _vocabulary(self) -> GgufVocabulary:
        get, prefix_key = self._fields.get, "tokenizer.ggml.add_space_prefix"
        if get(prefix_key, False) and get("tokenizer.ggml.model") == "llama":
            rule = "is not rebuilt here"
            raise JobError("model/unknown", f"{self.path}: {prefix_key}", True, rule, legal=[False])
        return GgufVocabulary.of_keys(self._fields)

    def _config(self) -> DecoderConfig:
        prefix = f"{self._form.architecture}."
        keys = {k.removeprefix(prefix): v for k, v in self._fields.items() if k.startswith(prefix)}
        table = self._form.config_table(keys, str(self.path))
        table["vocab_size"] = keys.get("vocab_size", len(self.vocabulary.tokens))
        if self._form.norm_offset == 0.0:
            table["tie_word_embeddings"] = _HEAD not in self._tensors
        if factors := self._tensors.get(ROPE_FACTORS):
            found = [float(each) for each in factors.data]
            table["rope_parameters"] = llama3_rope(found, table.pop("rope_theta"), str(self.path))
        for name, number in self.vocabulary.special.items():
            if name != "unk":
                table[f"{name}_token_id"] = number
        missing = {"bos", "eos", "pad"} - set(self.vocabulary.special)
        table |= {f"{name}_token_id": None for name in missing}
        return parse_config(table | {"dtype": self._dtype()}, str(self.path))

    def _dtype(self) -> str:
        """What the matrices are: a float dtype of torch, or dequantised to bfloat16."""
        kinds = {each.tensor_type.name for each in self._tensors.values() if each.shape.size > 1}
        return {"F32": "float32", "F16": "float16"}.get("".join(sorted(kinds)), "bfloat16")

    def _require_tensors(self) -> None:
        specs = canonical_tensors(self.config)
        for name, spec in specs.items():
            stored = self._form.stored_name(name)
            if stored not in self._tensors:
                raise JobError("model/tensor", str(self.path), stored, "is missing")
            shape = tuple(int(size) for size in reversed(self._tensors[stored].shape))
            if shape != spec.shape:
                rule = f"must have the shape {spec.shape}"
                raise JobError("model/tensor", f"{self.path}: {stored}", shape, rule)
        known = {self._form.stored_name(name) for name in specs} | {ROPE_FACTORS}
        if _HEAD not in known and _HEAD in self._tensors:
            raise JobError("model/tensor", str(self.path), _HEAD, "unties a head that is tied")
        for stored in self._tensors:
            if stored not in known:
                rule = "belongs to no part of the model that its metadata describes"
                raise JobError("model/tensor", str(self.path), stored, rule)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole tensor in the config's dtype), one at a time."""
        for name, spec in canonical_tensors(self.config).items():
            whole = self._whole(spec)
            if len(spec.shape) == 1:
                whole -= self._form.norm_offset
            elif self._form.interleaves and name.endswith(("q_proj.weight", "k_proj.weight")):
                kind = self.config.attention(0)
                whole = halves_from_pairs(whole, kind.head_dim)
            yield name, whole.to(getattr(torch, spec.dtype))

    def _whole(self, spec: TensorSpec) -> Tensor:
        """A tensor dequantised, norms in float32."""
        stored = self._tensors[self._form.stored_name(spec.name)]
        if len(spec.shape) == 1:
            return torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for at in range(0, spec.shape[0], _ROWS_AT_ONCE):
            rows = gguf.dequantize(stored.data[at : at + _ROWS_AT_ONCE], stored.tensor_type)
            whole[at : at + _ROWS_AT_ONCE] = torch.from_numpy(np.require(rows, requirements="W"))
        return whole

    def save_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and the tokenizer_config.json that transformers wants beside it."""
        self.vocabulary.save(folder, str(self.path))


def pairs_from_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head reordered from (first half, second half) to neighbouring pairs.

    Rotation of Hugging Face pairs channel c with c + C/2, that of llama.cpp's llama 2c with 2c + 1.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)


def halves_from_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `pairs_from_halves`."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)
