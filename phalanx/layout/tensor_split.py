"""What tensor parallelism of a degree cuts of a decoder, what stays whole, and which degrees exist.

Query heads and the feed-forward width are cut into equal parts. Key and value heads are cut where
the degree divides them; else every rank keeps the whole projection and computes the heads that its
own query heads attend with. So a degree above the number of key and value heads is legal: such a
head is computed by several ranks, and its gradient, partial on each, is summed once a step.

No torch: the planner asks before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from phalanx.errors import PlanError, nearest_numbers
from phalanx.layout.placement import divisors


class AttentionSizes(Protocol):
    """Heads of one layer kind (`models.spec.AttentionKind`)."""

    @property
    def name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


class DecoderSizes(Protocol):
    """Of a decoder, what tensor parallelism cuts (`models.spec.DecoderConfig`)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def ffn_widths(self) -> Iterable[int]: ...
    @property
    def kinds(self) -> Iterable[AttentionSizes]: ...


@dataclass(frozen=True)
class TensorLegality:
    """What a degree means for a decoder.

    Attributes:
        degree: ranks of the axis.
        cut: a rank's part of what divides, by name: "query heads (full)", "kv heads (full)",
            "feed-forward width 64", "vocabulary".
        whole: what every rank keeps, and why, by name.
        illegal: what cannot be cut, and why, by name; empty for a legal degree.
        nearest: the nearest legal degrees.
    """

    degree: int
    cut: dict[str, int]
    whole: dict[str, str]
    illegal: dict[str, str]
    nearest: tuple[int, ...]

    def require(self, where: str) -> None:
        """Raise `plan/illegal` for what cannot be cut, naming it and the nearest legal degrees."""
        if self.illegal:
            rule = "; ".join(f"{name}: {why}" for name, why in self.illegal.items())
            raise PlanError("plan/illegal", where, self.degree, rule, legal=self.nearest)


def tensor_legality(config: DecoderSizes, degree: int) -> TensorLegality:
    """What tensor parallelism over `degree` ranks cuts, keeps whole or cannot do.

    Source: Narayanan et al., arXiv 2104.04473, section 2.3, for the cuts; whole key and value
    projections are our rule for grouped queries.
    """
    cut, whole, illegal = {}, {}, {}
    for name, size in _equal_parts(config):
        if size % degree:
            illegal[name] = f"{size} cannot be cut into {degree} equal parts"
        else:
            cut[name] = size // degree
    for kind in config.kinds:
        name, size = f"kv heads ({kind.name})", kind.num_kv_heads
        if size % degree:
            whole[name] = f"{degree} ranks share {size}: each keeps the projections whole"
        else:
            cut[name] = size // degree
    if _feeds_all(config.vocab_size, degree):
        cut["vocabulary"] = vocabulary_part(config.vocab_size, degree)
    else:
        illegal["vocabulary"] = f"{config.vocab_size} tokens leave a rank without any"
    return TensorLegality(degree, cut, whole, illegal, _legal_near(config, degree))


def vocabulary_part(vocab_size: int, degree: int) -> int:
    """Tokens of the first rank; the last one may have fewer."""
    return -(-vocab_size // degree)


def kv_heads_of(num_heads: int, num_kv_heads: int, degree: int, rank: int) -> tuple[int, ...]:
    """The key and value heads that a rank computes, in the order of its query heads.

    Each serves as many query heads as the others; where the rank's query heads do not fall into
    equal groups, each gets a head of its own, the same one several times.
    """
    if num_kv_heads % degree == 0:
        part = num_kv_heads // degree
        return tuple(range(rank * part, (rank + 1) * part))
    part, group = num_heads // degree, num_heads // num_kv_heads
    of_query = [head // group for head in range(rank * part, (rank + 1) * part)]
    once = tuple(dict.fromkeys(of_query))
    is_even = len({of_query.count(head) for head in once}) == 1
    return once if is_even else tuple(of_query)


def _equal_parts(config: DecoderSizes) -> list[tuple[str, int]]:
    heads = [(f"query heads ({kind.name})", kind.num_heads) for kind in config.kinds]
    widths = dict.fromkeys((config.intermediate_size, *config.ffn_widths))
    return [*heads, *((f"feed-forward width {width}", width) for width in widths)]


def _legal_near(config: DecoderSizes, degree: int) -> tuple[int, ...]:
    sizes = [size for _, size in _equal_parts(config)]
    legal = [n for n in divisors(gcd(*sizes)) if _feeds_all(config.vocab_size, n)]
    return tuple(int(each) for each in nearest_numbers(degree, legal))


def _feeds_all(vocab_size: int, degree: int) -> bool:
    """Whether every rank has a token."""
    return vocabulary_part(vocab_size, degree) * (degree - 1) < vocab_size
