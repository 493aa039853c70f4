"""The model of a published row: by its name where that is known, else from the sizes it prints.

Tables print layers, hidden size, heads, feed-forward width, vocabulary and the parameter count, but
not whether the feed-forward block is gated, the head tied, or how wide a head is. Those follow from
the count: of all combinations the one that comes nearest to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.lab.csv_rows import CsvRow
from phalanx.models.known import known_shape

_SIZES = ("layers", "hidden", "heads", "vocab")
SHAPE_NUMBERS = (*_SIZES, "kv_heads", "experts", "topk", "params_b")  # beside the text of "ffn"
_COUNT_TOLERANCE = 0.15  # of the parameter count that a row prints


def shape_of_row(row: CsvRow) -> tuple[ModelShape | None, str]:
    """The shape of a row's model, and what is missing where there is none.

    A known name gives what the columns do not say (latent attention, which layers are dense). A row
    that prints fewer layers than the known model has is that model cut short (`cut`).
    """
    sizes = {name: row.count(name) for name in _SIZES}
    known = known_shape(re.sub(r"\s*\(.*\)$", "", row.get("model")))
    if known is not None and sizes["hidden"] in (None, known.hidden):
        return cut(known, sizes["layers"] or known.num_layers), ""
    absent = [name for name, value in sizes.items() if value is None]
    if not row.get("ffn"):
        absent.append("ffn")
    if absent:
        return None, f"model sizes ({', '.join(absent)})"
    return _from_columns(
        row.get("model"),
        *(value or 0 for value in sizes.values()),
        row.count("kv_heads") or 0,
        row.get("ffn"),
        row.count("experts") or 0,
        row.count("topk") or 0,
        row.number("params_b") or 0.0,
        row.count("seq_len_tokens") or 0,
    )


@lru_cache(maxsize=512)
def cut(shape: ModelShape, num_layers: int) -> ModelShape:
    """A model with fewer layers, as benchmarks run it on fewer devices.

    Kinds of layers keep their shares, rounded, and at least one layer of each kind stays while
    there is room: SimuMax's DeepSeek-V3 of four layers has one dense layer of the model's three.
    """
    total = shape.num_layers
    if num_layers >= total:
        return shape
    kept, left = [], num_layers
    for at, layer in enumerate(shape.layers):
        others = len(shape.layers) - at - 1
        share = max(1, round(num_layers * layer.count / total))
        count = left if not others else max(0, min(share, left - min(others, left)))
        kept.append(replace(layer, count=count))
        left -= count
    layers = tuple(layer for layer in kept if layer.count)
    return replace(shape, layers=layers, name=f"{shape.name}, {num_layers} layers")


@lru_cache(maxsize=512)
def _from_columns(
    name: str,
    num_layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    kv_heads: int,
    ffn: str,
    experts: int,
    top: int,
    params_b: float,
    seq_len: int,
) -> tuple[ModelShape | None, str]:
    widths = _widths(ffn)
    if widths is None:
        return None, f"model sizes (ffn is {ffn!r})"
    dense, expert = widths
    if bool(expert) != bool(experts and top) or (dense and expert):
        return None, "model sizes (which layers are dense, and how many experts a token uses)"
    feed = FeedForwardShape(width=dense, num_experts=experts, num_active=top, expert_width=expert)
    choices = list(_choices(hidden, heads, kv_heads or heads, feed))
    shapes = [
        ModelShape(
            name=name,
            hidden=hidden,
            vocab=vocab,
            layers=(replace(layer, count=num_layers),),
            tied_head=tied,
            learned_positions=0 if layer.feed_forward.is_gated else seq_len,
            source="columns of the row",
        )
        for layer, tied in choices
    ]
    if not params_b:
        return shapes[0], ""
    best = min(shapes, key=lambda shape: abs(shape.num_params / (params_b * 1e9) - 1))
    if abs(best.num_params / (params_b * 1e9) - 1) > _COUNT_TOLERANCE:
        return None, f"model sizes that give {params_b:g} billion parameters"
    return best, ""


def _widths(ffn: str) -> tuple[int, int] | None:
    """Widths of a dense block and of an expert, 0 for none; None for another form."""
    match = re.fullmatch(r"(?:(\d+)(?: dense)?(?: ?/ ?|$))?(?:(\d+) experts?)?", ffn)
    if match is None or not any(match.groups()):
        return None
    return int(match[1] or 0), int(match[2] or 0)


def _choices(
    hidden: int, heads: int, kv_heads: int, feed: FeedForwardShape
) -> Iterator[tuple[LayerShape, bool]]:
    """Layers that fit the columns, with a tied head or not; the likeliest first.

    A width of four times the hidden size is that of GPT: two matrices and a tied head.
    """
    plain_first = feed.width == 4 * hidden
    widths = [hidden // heads] if hidden % heads == 0 else []
    widths += [each for each in (128, 64, 256) if each not in widths]
    orders = (not plain_first, plain_first)
    for head_dim, gated, tied in product(widths, orders, (plain_first, not plain_first)):
        attention = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        yield (
            LayerShape(count=1, attention=attention, feed_forward=replace(feed, is_gated=gated)),
            tied,
        )
