"""Lists of actions as integers: what the simulator's loop reads instead of objects.

Every action is one entry. A list shared by many ranks is compiled once (`Template`) and then copied
for each rank by extending flat lists (`Table`), so an entry costs no Python call until it runs.
Lane order and `after` become the same thing: `waits` counts what an entry still waits for, `succ`
holds the distances to the entries that wait for it. Distances instead of positions are what lets
all ranks share one `succ` tuple.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from phalanx.action import Action, Alloc, Collective, Compute, Free, Mark, Move, Recv, Send, Timer
from phalanx.errors import CheckError, nearest_names

# What starting an entry means. LOCAL needs nobody else; the engine has one method for each other.
LOCAL, COLLECTIVE, SEND, RECV, MEMORY, NOTIFY, STEP, COMMIT, TRIP, SKIP = range(10)
NETWORK = -1  # the "rank" of messages that nobody's list sends
COMMIT_MARK = "commit"  # Mark(name="commit", value=n): the scope has committed n steps
Queue = Hashable
_KIND: dict[type[Action], int] = {
    Compute: LOCAL,
    Move: LOCAL,
    Timer: LOCAL,
    Mark: LOCAL,
    Collective: COLLECTIVE,
    Send: SEND,
    Recv: RECV,
    Alloc: MEMORY,
    Free: MEMORY,
}


def kind_of(action: Action) -> int:
    """The entry kind of an action."""
    if isinstance(action, Mark) and action.name == COMMIT_MARK:
        return COMMIT
    return _KIND[type(action)]


@dataclass(slots=True)
class Template:
    """One compiled list. Columns run over its entries; notices follow the action they announce.

    Attributes:
        actions: the list.
        which: index into `actions` of each entry.
        kind: what starting it means.
        waits: how many entries of the same list must end first.
        succ: distances to the entries that wait for it.
        labels: label -> entry.
        tails: lane, or stream of a group -> its last entry.
        heads: lane, or stream of a group -> its first entry.
        outside: (entry, label) of `after` labels that the list does not have.
    """

    actions: tuple[Action, ...]
    which: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    succ: list[tuple[int, ...]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tails: dict[Queue, int] = field(default_factory=dict)
    heads: dict[Queue, int] = field(default_factory=dict)
    outside: list[tuple[int, str]] = field(default_factory=list)


def compile_list(
    actions: Sequence[Action], *, watch: bool = False, pair_channels: bool = False
) -> Template:
    """Compile a list.

    Args:
        actions: the list.
        watch: every labelled action gets a notice ("done"); timers always have one.
        pair_channels: messages of one pair of ranks also wait for one another in list order, as on
            a communicator that carries both directions. Collectives of one group always do,
            whatever their lanes: a group is one stream.

    Raises:
        CheckError: `check/label` for a label that occurs twice.
    """
    template = Template(tuple(actions))
    edges: list[tuple[int, int]] = []
    positions: list[int] = []
    for index, action in enumerate(template.actions):
        at = len(template.which)
        positions.append(at)
        template.which.append(index)
        template.kind.append(kind_of(action))
        if action.label:
            _add_label(template, action, at)
        if isinstance(action, Timer) or (watch and action.label):
            edges.append((at, at + 1))
            template.which.append(index)
            template.kind.append(NOTIFY)
    edges += _order_edges(template, positions, pair_channels)
    for at, action in zip(positions, template.actions):
        for label in action.after:
            if label in template.labels:
                edges.append((template.labels[label], at))
            else:
                template.outside.append((at, label))
    _connect(template, edges)
    return template


def _add_label(template: Template, action: Action, at: int) -> None:
    if action.label in template.labels:
        rule = "two actions of one list have this label"
        raise CheckError("check/label", "label", repr(action.label), rule)
    template.labels[action.label] = at


def _order_edges(
    template: Template, positions: Sequence[int], pair_channels: bool
) -> list[tuple[int, int]]:
    """Each entry after the one before it in each of its queues."""
    edges = []
    for at, action in zip(positions, template.actions):
        before = set()
        for queue in _queues(action, pair_channels):
            if queue in template.tails:
                before.add(template.tails[queue])
            template.heads.setdefault(queue, at)
            template.tails[queue] = at
        edges += [(earlier, at) for earlier in sorted(before)]
    return edges


def _queues(action: Action, pair_channels: bool) -> list[Queue]:
    """Where an action keeps its turn: its lane, and the stream of its group or of its pair."""
    if isinstance(action, Timer):
        return []  # occupies no lane
    if isinstance(action, Collective):
        return [action.lane, (action.axis, action.members, action.epoch)]
    if pair_channels and isinstance(action, Send | Recv):
        return [action.lane, (action.axis, action.peer)]
    return [action.lane]


def _connect(template: Template, edges: Sequence[tuple[int, int]]) -> None:
    template.waits = [0] * len(template.which)
    following: list[list[int]] = [[] for _ in template.which]
    for source, target in edges:
        template.waits[target] += 1
        following[source].append(target - source)
    template.succ = [tuple(deltas) for deltas in following]


def require_labels(template: Template, where: str) -> None:
    """Raise `check/label` for the first `after` label that the list does not have."""
    for at, label in template.outside:
        action = template.actions[template.which[at]]
        raise CheckError(
            "check/label",
            f"{where}: {action.label or action.operator}",
            repr(label),
            "waits for a label that its list does not have",
            legal=nearest_names(label, template.labels),
        )


@dataclass(slots=True)
class Table:
    """The entries of all ranks, as parallel flat lists.

    Attributes:
        actions: distinct action objects; `which` indexes it.
        rank: who; NETWORK is no rank.
        key: where entries of several ranks meet (see `sim_match`); 0 for the others.
        start_s: when it started; -1 before that.
        dur_s: how long; for what meets others, known once it starts.
        step: the step it belongs to.
        succ: None once the entry has ended.
    """

    actions: list[Action] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    succ: list[tuple[int, ...] | None] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    key: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    dur_s: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.which)

    def add_actions(self, template: Template) -> list[int]:
        """Make the actions known; the template's `which` in terms of this table."""
        first = len(self.actions)
        self.actions.extend(template.actions)
        return [first + index for index in template.which]

    def place(
        self,
        template: Template,
        which: list[int],
        rank: int,
        step: int,
        key: list[int],
        dur_s: list[float],
    ) -> int:
        """Copy a template for one rank; the position of its first entry.

        Entries without a predecessor get one more to wait for, so that nothing starts before the
        engine releases them: `waits == 0` always means "has begun".
        """
        base, count = len(self.which), len(template.which)
        self.which.extend(which)
        self.kind.extend(template.kind)
        self.waits.extend([waits or 1 for waits in template.waits])
        self.succ.extend(template.succ)
        self.rank.extend([rank] * count)
        self.key.extend(key)
        self.start_s.extend([-1.0] * count)
        self.dur_s.extend(dur_s)
        self.step.extend([step] * count)
        return base

    def add_entry(self, *, which: int, kind: int, rank: int, key: int = 0, step: int = 0) -> int:
        """Append an entry that no list has; it waits for its release. Its position."""
        for column, value in (
            *((self.which, which), (self.kind, kind), (self.waits, 1)),
            *((self.rank, rank), (self.key, key), (self.step, step)),
        ):
            column.append(value)
        self.start_s.append(-1.0)
        self.dur_s.append(0.0)
        self.succ.append(())
        return len(self.which) - 1

    def add_step_notice(self, span: range, rank: int, step: int) -> int:
        """An entry that waits for all entries of a list: `rank` has ended this step."""
        notice = self.add_entry(which=-1, kind=STEP, rank=rank, step=step)
        for entry in span:
            if not self.succ[entry] and self.kind[entry] != NOTIFY:
                self.after(entry, notice)
        return notice

    def action(self, entry: int) -> Action:
        """The action of an entry."""
        return self.actions[self.which[entry]]

    def after(self, earlier: int, later: int) -> None:
        """Let one entry wait for another, unless that has ended."""
        following = self.succ[earlier]
        if following is not None:
            self.succ[earlier] = (*following, later - earlier)
            self.waits[later] += 1
