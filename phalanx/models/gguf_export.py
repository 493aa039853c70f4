"""Model folders written as GGUF files, tensor by tensor. Needs the `gguf` package.

Metadata has the keys of llama.cpp's own converter; matrices keep the folder's dtype, vectors are
float32. A file is read back bit for bit, but for norms of Gemma 3 (stored as 1 + w) below 2^-15.
Facts: `gguf_forms`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.config import to_huggingface
from phalanx.models.folders import require_free
from phalanx.models.gguf_forms import ROPE_FACTORS, GgufForm, form_of, llama3_factors
from phalanx.models.gguf_import import pairs_from_halves
from phalanx.models.gguf_vocabulary import BYTE_LEVEL, SENTENCEPIECE, vocabulary_of
from phalanx.models.hf import read_whole
from phalanx.models.spec import DecoderConfig, num_params, read_config
from phalanx.models.stored import StoredTensor, by_file
from phalanx.models.weight_names import model_weights

_RESERVE_BYTES = 64 * 2**20  # for metadata: the vocabulary
_BF16, _F16, _F32 = (getattr(gguf.GGMLQuantizationType, name) for name in ("BF16", "F16", "F32"))
_FILE_TYPES = {
    _BF16: gguf.LlamaFileType.MOSTLY_BF16,
    _F16: gguf.LlamaFileType.MOSTLY_F16,
    _F32: gguf.LlamaFileType.ALL_F32,
}
_TORCH = {_BF16: torch.bfloat16, _F16: torch.float16, _F32: torch.float32}


def require_gguf(config: DecoderConfig, tokenizer_folder: str | Path) -> None:
    """Refuse a model that cannot be written.

    Raises:
        JobError: `model/unknown` for a family, an option or a tokenizer that llama.cpp cannot be
            told of; `job/not-found` without a tokenizer.
    """
    form_of(config).metadata(config)
    vocabulary_of(Path(tokenizer_folder), config.vocab_size)


def export_gguf(
    folder: str | Path, target: str | Path, *, name: str = "", overwrite: bool = False
) -> Path:
    """Write a model folder as one GGUF file; it appears whole or not at all.

    Args:
        name: of the model, for the metadata; "": guessed from the folder as llama.cpp does.

    Raises:
        JobError: as `require_gguf`; `job/bad-value` when `target` exists and may not be
            overwritten; `environment/disk` when it would not fit.
    """
    folder, target = Path(folder), Path(target)
    if target.exists() and not overwrite:
        rule = "exists already and is not overwritten"
        raise JobError("job/bad-value", "output file", target, rule)
    config = read_config(folder)
    form, weights = form_of(config), model_weights(folder, config)
    matrices = _matrix_type(weights)
    part = target.with_name(f".{target.name}.part")
    writer = gguf.GGUFWriter(None, form.architecture)
    try:
        _add_metadata(writer, folder, config, form, name, matrices)
        _add_vocabulary(writer, folder, config)
        num_bytes = _add_infos(writer, config, form, weights, matrices)
        require_free(target.parent, num_bytes + _RESERVE_BYTES)
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in _written(config, form, weights, matrices):
            writer.write_tensor_data(tensor.view(_bits(tensor)).numpy())
        writer.close()
        _put(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _put(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def _matrix_type(weights: Mapping[str, StoredTensor]) -> gguf.GGMLQuantizationType:
    """The folder's dtype; float32 for wider ones and for a mixture."""
    kinds = {each.dtype for each in weights.values() if len(each.shape) > 1}
    return {"BF16": _BF16, "F16": _F16}.get("".join(sorted(kinds)), _F32)


def _add_metadata(
    writer: gguf.GGUFWriter,
    folder: Path,
    config: DecoderConfig,
    form: GgufForm,
    name: str,
    matrices: gguf.GGMLQuantizationType,
) -> None:
    total = num_params(config)
    general = gguf.Metadata.load(None, folder, name or None, total)
    general.name = general.name or folder.name
    general.size_label = general.size_label or gguf.size_label(total, total, 0, 0)
    writer.add_type(gguf.GGUFType.MODEL)
    general.set_gguf_meta_model(writer)
    for key, value in form.metadata(config).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{form.architecture}.{key}", value)
    writer.add_file_type(_FILE_TYPES[matrices])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: DecoderConfig) -> None:
    vocabulary = vocabulary_of(folder, config.vocab_size)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.model == SENTENCEPIECE:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(False)
    writer.add_token_types(vocabulary.kinds)
    has_merges = vocabulary.model == BYTE_LEVEL
    special = gguf.SpecialVocab(folder, load_merges=has_merges, n_vocab=len(vocabulary.tokens))
    special.add_to_gguf(writer)


def _add_infos(
    writer: gguf.GGUFWriter,
    config: DecoderConfig,
    form: GgufForm,
    weights: Mapping[str, StoredTensor],
    matrices: gguf.GGMLQuantizationType,
) -> int:
    """Announce every tensor, in the order of `_written`; the bytes of all."""
    total = 0
    shapes = {form.stored_name(name): each.shape for name, each in by_file(weights)}
    if factors := _rope_factors(config):
        shapes = {ROPE_FACTORS: (len(factors),)} | shapes
    for stored, shape in shapes.items():
        kind = matrices if len(shape) > 1 else _F32
        meta = torch.empty(shape, dtype=_TORCH[kind], device="meta")
        bits = {2: "uint16", 4: "float32"}[meta.element_size()]
        writer.add_tensor_info(stored, shape, np.dtype(bits), meta.nbytes, raw_dtype=kind)
        total += meta.nbytes
    return total


def _bits(tensor: Tensor) -> torch.dtype:
    """numpy has no bfloat16: 16-bit tensors travel as integers."""
    return torch.int16 if tensor.element_size() == 2 else torch.float32


def _rope_factors(config: DecoderConfig) -> list[float]:
    rope = to_huggingface(config)["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return []
    return llama3_factors(rope, config.attention(0).head_dim)


def _written(
    config: DecoderConfig,
    form: GgufForm,
    weights: Mapping[str, StoredTensor],
    matrices: gguf.GGMLQuantizationType,
) -> Iterator[Tensor]:
    """The tensors as llama.cpp holds them, one at a time, in the order of the folder's files."""
    if factors := _rope_factors(config):
        yield torch.tensor(factors, dtype=torch.float32)
    head_dim = config.attention(0).head_dim
    for name, tensor in read_whole(weights):
        if tensor.dim() == 1:
            yield tensor.float() + form.norm_offset
            continue
        if form.interleaves and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = pairs_from_halves(tensor, head_dim)
        yield tensor.to(_TORCH[matrices]).contiguous()
