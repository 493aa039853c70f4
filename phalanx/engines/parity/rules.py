"""When two forms are equal, as gated rows of a report.

Exact dtypes: every token is the same, but where the reference's best two logits are closer than
`NEAR_TIE`; no logit differs by more than `LOGIT_TOLERANCE`. Rounded dtypes: a form is as close to
its exact reference as transformers is to its own, in the same dtype and on the same tokens.

Both are judged with the same prefixes, so one difference does not make others.

Legend: P positions, N sampled columns, G groups of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engines.parity.observed import Observed
from phalanx.report import Report

NEAR_TIE = 1e-3  # logits; closer ones may change places
LOGIT_TOLERANCE = 1e-3
ERROR_SLACK = 0.05  # rounding inside a kernel that transformers lacks, e.g. of an adapter's product
TOP1_SLACK = 0.01
_STANDARD_ERRORS = 2.0
_GROUPS = 10
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Pair:
    """Two forms to compare.

    Attributes:
        name: of the first, with its dtype.
        against: name of the second.
        note: prompts, positions and versions, for every row.
    """

    name: str
    against: str
    note: str


def add_exact_rows(report: Report, pair: Pair, form: Observed, reference: Observed) -> None:
    """Equal tokens, and the largest difference of a logit."""
    add_token_row(report, pair, form.choice_P, reference)
    columns = f"best, given and {form.columns_PN.shape[1]} fixed tokens"
    report.add(
        f"parity/{pair.name}/largest logit difference",
        _largest_difference(form, reference),
        "1",
        "measured",
        note=f"from {pair.against}; logits of the {columns}; {pair.note}",
        target=0.0,
        tolerance=LOGIT_TOLERANCE,
    )


def add_token_row(report: Report, pair: Pair, choice_P: Tensor, reference: Observed) -> None:
    """Equal tokens, near-ties of the reference aside."""
    differs_P = choice_P != reference.choice_P
    is_tie_P = reference.gap_P < NEAR_TIE
    num_ties = int((differs_P & is_tie_P).sum())
    near = f"{num_ties} more at near-ties, whose best two are closer than {NEAR_TIE:g}"
    report.add(
        f"parity/{pair.name}/tokens that differ",
        float((differs_P & ~is_tie_P).sum()),
        "1",
        "measured",
        note=f"from {pair.against}; {near}; {pair.note}",
        target=0.0,
    )


def _largest_difference(form: Observed, reference: Observed) -> float:
    pairs = [
        (form.best_P, reference.best_P),
        (form.forced_P, reference.forced_P),
        (form.columns_PN, reference.columns_PN),
    ]
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


class RoundedRule:
    """What transformers' own rounding costs, to judge others by.

    Args:
        rounded, exact: transformers on the export in the served dtype, and in the exact one.
        num_new: positions of each sequence.
    """

    def __init__(self, rounded: Observed, exact: Observed, num_new: int) -> None:
        self._num_new = num_new
        self._theirs_PN = (rounded.columns_PN - exact.columns_PN).abs_()
        self._agrees_P = rounded.choice_P == exact.choice_P

    def add_rows(self, report: Report, pair: Pair, form: Observed, reference: Observed) -> None:
        """Error and agreement with the exact reference, each beside transformers'."""
        self.add_error_row(report, pair, form, reference)
        self.add_agreement_row(report, pair, form.choice_P, reference)

    def add_agreement_row(
        self, report: Report, pair: Pair, choice_P: Tensor, reference: Observed
    ) -> None:
        """How often the best token is the exact reference's, less how often transformers' is."""
        mine_P = choice_P == reference.choice_P
        gain_P = mine_P.double() - self._agrees_P.double()
        error = _STANDARD_ERRORS * float(gain_P.std()) / len(gain_P) ** 0.5
        mine, theirs = (float(each.double().mean()) for each in (mine_P, self._agrees_P))
        report.add(
            f"parity/{pair.name}/top-1 agreement less transformers'",
            mine - theirs,
            "1",
            "measured",
            note=(
                f"{mine:.4f} with {pair.against}, transformers' own {theirs:.4f}; may be "
                f"{TOP1_SLACK:g} lower and {_STANDARD_ERRORS:g} standard errors ({error:.4f}); "
                f"{pair.note}"
            ),
            target=-TOP1_SLACK,
            tolerance=error,
            bound="above",
        )

    def add_error_row(
        self, report: Report, pair: Pair, form: Observed, reference: Observed
    ) -> None:
        """The error of logits over transformers' own."""
        mine_PN = (form.columns_PN - reference.columns_PN).abs_()
        ratio = _root_mean_square(mine_PN) / _root_mean_square(self._theirs_PN)
        error = _STANDARD_ERRORS * self._standard_error(mine_PN)
        tails = ", ".join(
            f"{quantile:.0%}: {_quantile(mine_PN, quantile):.4g} of "
            f"{_quantile(self._theirs_PN, quantile):.4g}"
            for quantile in _QUANTILES
        )
        report.add(
            f"parity/{pair.name}/error over transformers'",
            ratio,
            "1",
            "measured",
            note=(
                f"root mean square of logits' distance from {pair.against}, over transformers' "
                f"from its own; may be {ERROR_SLACK:g} and {_STANDARD_ERRORS:g} standard errors "
                f"({error:.3f}) larger; quantiles {tails}; {pair.note}"
            ),
            target=1.0,
            tolerance=ERROR_SLACK + error,
            bound="below",
        )

    def _standard_error(self, mine_PN: Tensor) -> float:
        """Of the ratio, by leaving out one group of sequences after another (jackknife)."""
        mine_S, theirs_S = (
            each.square().mean(1).unflatten(0, (-1, self._num_new)).mean(1)
            for each in (mine_PN, self._theirs_PN)
        )
        groups = min(_GROUPS, len(mine_S))
        if groups < 2:
            return 0.0
        ratios_G = torch.stack(
            [
                (mine_S.sum() - mine_S[at::groups].sum())
                / (theirs_S.sum() - theirs_S[at::groups].sum())
                for at in range(groups)
            ]
        ).sqrt()
        variance = (groups - 1) / groups * (ratios_G - ratios_G.mean()).square().sum()
        return float(variance.sqrt())


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _quantile(values: Tensor, quantile: float) -> float:
    flat = values.flatten()
    return float(flat.kthvalue(max(1, round(quantile * len(flat)))).values)
