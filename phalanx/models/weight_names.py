"""Which stored tensor each canonical tensor is: prefixes undone, everything checked. No torch.

Folders of several modalities keep the text decoder under a prefix, and each version of transformers
has its own; what the decoder does not compute (a vision tower) stays in the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import DecoderConfig, TensorSpec, canonical_tensors, unused_names
from phalanx.models.stored import FLOAT_DTYPES, StoredTensor, stored_tensors

_BODY, _HEAD, _EMBEDDING = "model.", "lm_head.weight", "embed_tokens.weight"
# what the file calls "model." and "lm_head.weight"; a body saved by itself has no prefix at all
_PREFIXES = {
    "model.": "lm_head.weight",
    "model.language_model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "": "lm_head.weight",
}
_WITHOUT_EFFECT = ("rotary_emb.inv_freq",)  # computed from the config; old files store it


def stored_prefix(names: Iterable[str]) -> str:
    """What stands in for "model." in the names of a file."""
    known = set(names)
    return next((prefix for prefix in _PREFIXES if prefix + _EMBEDDING in known), _BODY)


def stored_name(canonical: str, prefix: str) -> str:
    """The name that a file with this prefix gives a canonical tensor."""
    if canonical == _HEAD:
        return _PREFIXES[prefix]
    return prefix + canonical.removeprefix(_BODY)


def canonical_name(stored: str, prefix: str) -> str | None:
    """The canonical name of a stored tensor; None when it is no part of the text decoder."""
    if stored == _PREFIXES[prefix]:
        return _HEAD
    if not stored.startswith(prefix):
        return None
    return _BODY + stored.removeprefix(prefix)


def model_weights(folder: str | Path, config: DecoderConfig) -> dict[str, StoredTensor]:
    """Canonical name -> stored tensor of a model folder, for `parameters.load_sharded`.

    Reads headers only, so everything that does not fit is said before memory is taken.

    Raises:
        JobError: as `stored_tensors`; `model/tensor` for a tensor that is missing, has another
            shape, is quantised, or belongs to no part of the model.
    """
    specs, stored = canonical_tensors(config), stored_tensors(folder)
    return matched(specs, stored, folder, unused=unused_names(config))


def matched(
    specs: Mapping[str, TensorSpec],
    stored: Mapping[str, StoredTensor],
    folder: str | Path,
    *,
    unused: Collection[str] = (),
) -> dict[str, StoredTensor]:
    """As `model_weights`, for tensors and a listing at hand.

    Args:
        unused: canonical names that may be stored although nothing reads them.
    """
    prefix = stored_prefix(stored)
    weights: dict[str, StoredTensor] = {}
    for name, spec in specs.items():
        found = stored.get(stored_name(name, prefix))
        if found is None:
            wanted = stored_name(name, prefix)
            rule, near = "is missing in these weights", nearest_names(wanted, stored)
            raise JobError("model/tensor", str(folder), wanted, rule, legal=near)
        _require_fit(found, spec)
        weights[name] = found
    _refuse_unknown(weights, stored, prefix, unused)
    return weights


def _require_fit(found: StoredTensor, spec: TensorSpec) -> None:
    where = f"{found.path}: {found.name}"
    if found.shape != spec.shape:
        rule = f"must have the shape {spec.shape}, as config.json says"
        raise JobError("model/tensor", where, found.shape, rule)
    if found.dtype not in FLOAT_DTYPES:
        rule = "is a dtype that weights are not read from: quantised models are not supported"
        raise JobError("model/tensor", where, found.dtype, rule, legal=FLOAT_DTYPES)


def _refuse_unknown(
    weights: Mapping[str, StoredTensor],
    stored: Mapping[str, StoredTensor],
    prefix: str,
    unused: Collection[str],
) -> None:
    for name in stored:
        canonical = canonical_name(name, prefix)
        if canonical is None and "language_model" in prefix:  # another modality
            continue
        # a head: tied, and stored all the same
        if canonical in {_HEAD, *weights, *unused} or name.endswith(_WITHOUT_EFFECT):
            continue
        wanted = [stored_name(each, prefix) for each in weights]
        rule = "is stored here but belongs to no part of the model that config.json describes"
        near = nearest_names(name, wanted)
        raise JobError("model/tensor", str(stored[name].path), name, rule, legal=near)
