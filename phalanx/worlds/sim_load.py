"""Getting programs and decided actions into the simulator's table."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from phalanx.action import Action, Compute, Move, Program, Timer
from phalanx.cost.base import CostModel
from phalanx.errors import CheckError, nearest_names
from phalanx.worlds.sim_match import Matcher
from phalanx.worlds.sim_table import Queue, Table, Template, compile_list


class Loader:
    """Places lists behind what their ranks have already.

    Args:
        table: where the entries go.
        matcher: gives them their meetings.
        cost: gives them their durations.
        pair_channels: see `compile_list`.

    Attributes:
        entries_of: rank -> its entries, in order of issue.
        step_notices: entries that announce the end of a loaded step.
    """

    def __init__(
        self, table: Table, matcher: Matcher, cost: CostModel, *, pair_channels: bool = False
    ) -> None:
        self._table, self._matcher, self._cost = table, matcher, cost
        self._pair_channels = pair_channels
        self.entries_of: dict[int, list[range]] = {}
        self.step_notices: list[int] = []
        self._lists_of_step: dict[int, dict[int, range]] = {}
        self._tails: dict[int, dict[Queue, int]] = {}
        self._labels: dict[int, list[tuple[int, dict[str, int]]]] = {}
        self._decided_labels: dict[int, dict[str, int]] = {}

    def local_s(self, action: Action, rank: int) -> float:
        """Duration of an action that needs nobody else (0 for the others, until they meet)."""
        if isinstance(action, Compute):
            return self._cost.compute_s(action, rank)
        if isinstance(action, Move):
            return self._cost.move_s(action, rank)
        return action.delay_s if isinstance(action, Timer) else 0.0

    def _prices(self, template: Template, rank: int) -> list[float]:
        prices = [self.local_s(action, rank) for action in template.actions]
        assert all(price >= 0 for price in prices), "a cost model gave a negative duration"
        return [prices[index] for index in template.which]

    def add_program(self, program: Program, ranks: Sequence[int], step: int) -> list[int]:
        """Queue a program's lists, with a notice for the end of the first rank's; the entries to
        release.

        Raises:
            CheckError: `check/label` for a label that a list has twice or its rank never had.
            JobError: `mesh/axis`, `mesh/rank` for an axis or a peer that the mesh does not have.
        """
        of_list: dict[int, list[int]] = {}
        for rank in ranks:
            of_list.setdefault(program.list_of_rank[rank], []).append(rank)
        lists = {index: self._compile(program, index, alike) for index, alike in of_list.items()}
        roots = []
        spans = self._lists_of_step.setdefault(step, {})
        for rank in ranks:
            template, which, keys, prices = lists[program.list_of_rank[rank]]
            price_class = self._cost.rank_class(rank)
            if price_class not in prices:
                prices[price_class] = self._prices(template, rank)
            base = self._table.place(template, which, rank, step, next(keys), prices[price_class])
            self._follow_earlier(template, rank, base)
            self._labels.setdefault(rank, []).append((base, template.labels))
            roots += self._join(template, rank, base)
            spans[rank] = range(base, len(self._table))
        return roots + self.announce_step(step, ranks[:1])

    def _compile(
        self, program: Program, index: int, ranks: Sequence[int]
    ) -> tuple[Template, list[int], Iterator[list[int]], dict[Hashable, list[float]]]:
        """A list, its actions in the table, the keys of each rank, and prices by class to fill."""
        template = compile_list(program.lists[index], pair_channels=self._pair_channels)
        which = self._table.add_actions(template)
        return template, which, iter(self._matcher.keys(template, ranks)), {}

    def announce_step(self, step: int, ranks: Sequence[int]) -> list[int]:
        """A notice for the end of a loaded step on the first of `ranks` that runs it."""
        lists = self._lists_of_step[step]
        chosen = [rank for rank in ranks if rank in lists][:1]
        notices = [self._table.add_step_notice(lists[rank], rank, step) for rank in chosen]
        self.step_notices += notices
        return notices

    def add_actions(self, actions: Sequence[Action], ranks: Sequence[int], step: int) -> list[int]:
        """Queue decided actions on each of `ranks`, with a notice for every label.

        Raises:
            CheckError: `check/label` for an `after` label that a rank never had.
        """
        template = compile_list(actions, watch=True)
        which = self._table.add_actions(template)
        all_keys = self._matcher.keys(template, ranks)
        roots = []
        for rank, keys in zip(ranks, all_keys):
            prices = self._prices(template, rank)
            base = self._table.place(template, which, rank, step, keys, prices)
            self._follow_earlier(template, rank, base)
            roots += self._join(template, rank, base)
            self._name(template, rank, base)
        return roots

    def find(self, rank: int, label: str) -> int | None:
        """The newest entry of a label on a rank."""
        for base, labels in reversed(self._labels.get(rank, [])):
            if label in labels:
                return base + labels[label]
        return None

    def forget(self, rank: int) -> None:
        """A rank comes back with empty lanes and no labels."""
        self._tails.pop(rank, None)
        self._labels.pop(rank, None)

    def _follow_earlier(self, template: Template, rank: int, base: int) -> None:
        """Wait for labels of what the rank had before this list."""
        for at, label in template.outside:
            self._table.after(self._require(rank, label), base + at)

    def _require(self, rank: int, label: str) -> int:
        entry = self.find(rank, label)
        if entry is None:
            known = [name for _, labels in self._labels.get(rank, []) for name in labels]
            legal = nearest_names(label, known)
            rule = "waits for a label that its rank never had"
            raise CheckError("check/label", f"rank {rank}", repr(label), rule, legal=legal)
        return entry

    def _join(self, template: Template, rank: int, base: int) -> list[int]:
        """Chain a placed template to the rank's lanes; the entries that wait for a release."""
        table, tails = self._table, self._tails.setdefault(rank, {})
        if tails:
            pairs = {(tails[q], base + at) for q, at in template.heads.items() if q in tails}
            for earlier, later in sorted(pairs):
                table.after(earlier, later)
        for queue, at in template.tails.items():
            tails[queue] = base + at
        self.entries_of.setdefault(rank, []).append(range(base, len(table)))
        return [base + at for at, waits in enumerate(template.waits) if not waits]

    def _name(self, template: Template, rank: int, base: int) -> None:
        """Make labels known; decided actions share one dictionary per rank between programs."""
        known = self._labels.setdefault(rank, [])
        if not known or known[-1][1] is not self._decided_labels.get(rank):
            self._decided_labels[rank] = {}
            known.append((0, self._decided_labels[rank]))
        known[-1][1].update({label: base + at for label, at in template.labels.items()})
