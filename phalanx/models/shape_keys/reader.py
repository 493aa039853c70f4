"""Sizes out of a config whose other keys do not matter. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.cost.model_shape import LayerShape, ModelShape
from phalanx.errors import JobError, shown

_MOST = 2**31 - 1
_MOST_LAYERS = 100_000  # every layer takes memory here


class ShapeKeys:
    """A config as sizes.

    Args:
        table: the config.
        where: its name in errors.
        name: of the model.
    """

    def __init__(self, table: Mapping[str, Any], where: str, name: str) -> None:
        self.table, self.where, self.name = table, where, name

    def require(self, *keys: str) -> None:
        """Raise `job/missing` that names every absent key; "a|b" is satisfied by either."""
        absent = [
            key.replace("|", " or ")
            for key in keys
            if all(self.table.get(each) is None for each in key.split("|"))
        ]
        if absent:
            kind = self.table.get("model_type")
            rule = f"is needed for the sizes of a model of type {kind}"
            raise JobError("job/missing", f"{self.where}: {', '.join(absent)}", None, rule)

    def size(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number >= `low`; "a|b" reads the first that is given."""
        found = ((each, self.table[each]) for each in key.split("|") if each in self.table)
        name, value = next(((n, v) for n, v in found if v is not None), (key, default))
        if value is None:
            self.require(key)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        most = _MOST_LAYERS if "layer" in name else _MOST
        if not is_whole or not low <= value <= most:  # type: ignore[operator]
            rule = f"must be a whole number from {low} to {most}"
            raise JobError("job/bad-value", f"{self.where}: {name}", shown(value), rule)
        return int(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            where, rule = f"{self.where}: {key}", "must be true or false"
            raise JobError("job/bad-value", where, shown(value), rule)
        return value

    def names(self, key: str, count: int) -> list[str]:
        """A list of one name per layer; [] where it is not given."""
        value = self.table.get(key) or []
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise JobError("job/bad-value", f"{self.where}: {key}", shown(value), "must be a list")
        if value and len(value) != count:
            rule = "must name each layer once"
            raise JobError("job/bad-value", f"{self.where}: {key}", len(value), rule, legal=[count])
        return [str(each) for each in value]

    def divides(self, key: str, whole: int, part: int) -> int:
        """whole / part."""
        if whole % part:
            rule = f"must divide {whole}"
            raise JobError("job/bad-value", f"{self.where}: {key}", part, rule)
        return whole // part

    def head_dim(self, hidden: int, heads: int) -> int:
        """head_dim, or the share of a head."""
        if self.table.get("head_dim") is not None:
            return self.size("head_dim")
        return self.divides("num_attention_heads", hidden, heads)

    def model(
        self, layers: Sequence[LayerShape], *, tied: bool = False, hidden: int = 0, **more: Any
    ) -> ModelShape:
        """The model of these layers, equal ones counted together, in order of appearance.

        Args:
            tied: what an absent tie_word_embeddings means.
        """
        counts: dict[LayerShape, int] = {}
        for layer in layers:
            alone = replace(layer, count=1)
            counts[alone] = counts.get(alone, 0) + layer.count
        return ModelShape(
            name=self.name,
            hidden=hidden or self.size("hidden_size"),
            vocab=self.size("vocab_size"),
            layers=tuple(replace(layer, count=count) for layer, count in counts.items()),
            tied_head=self.flag("tie_word_embeddings", tied),
            source=self.where,
            **more,
        )
