"""Are the exported weights base + scale * B A, rounded once? Tensor by tensor, without a model.

Logits of a merged model in bfloat16 differ from the unmerged one's by what rounding the sums costs,
which hides small faults; the sums themselves do not.

Legend: O outputs, I inputs of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engines.parity.subject import Subject
from phalanx.models.adapter_folder import adapter_weights
from phalanx.models.stored import StoredTensor
from phalanx.models.stored_read import TensorReader
from phalanx.models.weight_names import model_weights

_EPS = torch.finfo(torch.float32).eps
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class WeightDistance:
    """The largest distance of a stored weight from the exact sum.

    Attributes:
        distance: over what one rounding to the stored dtype (and a sum in float32) may move it; 0
            where the bits are equal.
        tensor: where.
        num_tensors, num_adapted: compared, and those of them that have an adapter.
    """

    distance: float
    tensor: str
    num_tensors: int
    num_adapted: int


@torch.inference_mode()
def weight_distance(subject: Subject) -> WeightDistance:
    """Compare every tensor of the export with the base's and the adapter's; one in memory.

    Raises:
        JobError: `model/tensor` for tensors that are missing, misshapen or unknown.
    """
    assert subject.lora is not None and subject.adapter is not None
    exported = model_weights(subject.export, subject.served)
    adapters = adapter_weights(subject.adapter, subject.source.config)
    worst, where = 0.0, ""
    modules = {name.rpartition(".lora_")[0] for name in adapters}
    with TensorReader() as reader:
        for name, stored in subject.source.weights.items():
            base, found = reader.whole(stored), reader.whole(exported[name])
            module = name.removesuffix(".weight")
            if module in modules:
                low_rank = _low_rank(reader, adapters, module)
                distance = _of_adapted(found, base, *low_rank, subject.lora.scale)
            else:
                distance = _of_plain(found, base)
            if distance > worst or not where:
                worst, where = distance, name
    return WeightDistance(worst, where, len(subject.source.weights), len(modules))


def _low_rank(
    reader: TensorReader, adapters: Mapping[str, StoredTensor], module: str
) -> tuple[Tensor, Tensor]:
    a_RI, b_OR = (reader.whole(adapters[f"{module}.lora_{part}.weight"]) for part in "AB")
    return a_RI.float(), b_OR.float()


def _of_plain(found: Tensor, base: Tensor) -> float:
    if found.dtype == base.dtype and torch.equal(found, base):
        return 0.0
    exact = base.float()
    return _largest((found.float() - exact).abs_() / (exact.abs() * _unit(found) + _TINY))


def _of_adapted(found: Tensor, base: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> float:
    """0 where the bits are those of the sum as it is computed here; others are looked at."""
    exact_OI = torch.addmm(base.float(), b_OR, a_RI, alpha=scale)
    rows, columns = (exact_OI.to(found.dtype) != found).nonzero(as_tuple=True)
    if not len(rows):
        return 0.0
    exact, base, found = exact_OI[rows, columns], base[rows, columns], found[rows, columns]
    # |b . a| <= |b| |a|: what the sum of R products, added to the base, may be off in float32
    product = b_OR.norm(dim=1)[rows] * a_RI.norm(dim=0)[columns]
    in_sum = (base.float().abs() + abs(scale) * (len(a_RI) + 2) * product) * _EPS
    allowed = exact.abs() * _unit(found) + in_sum + _TINY
    return _largest((exact - found.float()).abs_() / allowed)


def _unit(stored: Tensor) -> float:
    """Largest relative error of rounding to the dtype once."""
    return torch.finfo(stored.dtype).eps / 2


def _largest(distances: Tensor) -> float:
    """The largest; infinite for what is not a number."""
    largest = distances.max().item()
    return largest if largest == largest else torch.inf
