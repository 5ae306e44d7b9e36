"""State machines as tables: (stage, event) -> the next stage. Pure.

Only the table says which event is allowed in which stage. Any other event is a bug of ours: it raises with
the history of the item, and leaves the stage unchanged. The diagrams in docs/reference.md are drawn from the tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from broker.base.errors import LocalProtocolError

S = TypeVar("S", bound=StrEnum)
#: Events of an item that are remembered, to explain an illegal one.
REMEMBERED = 16


class IllegalTransition(LocalProtocolError):
    """An event that the item's stage does not allow."""


class Transitions(Generic[S]):
    """The transition table of one kind of item: stage -> event -> the next stage, from ``start``."""

    def __init__(self, name: str, start: S, edges: Mapping[S, Mapping[str, S]]) -> None:
        self.name, self.start, self.edges = name, start, edges

    def diagram(self) -> str:
        """Returns the table as a state diagram in the language of Mermaid."""
        lines = [f"    [*] --> {self.start}"]
        for stage, events in self.edges.items():
            by_target: dict[S, list[str]] = {}
            for event, target in events.items():
                by_target.setdefault(target, []).append(event)
            lines += [f"    {stage} --> {target}: {', '.join(events)}" for target, events in by_target.items()]
        return "\n".join(["stateDiagram-v2", *lines])


class Staged(Generic[S]):
    """The stage of one item, with its recent events."""

    __slots__ = ("_story", "_table", "stage")

    def __init__(self, table: Transitions[S], stage: S | None = None) -> None:
        self._table = table
        self.stage: S = table.start if stage is None else stage
        self._story: deque[str] = deque(maxlen=REMEMBERED)

    def take(self, event: str) -> S:
        """Moves to the next stage and returns it; raises IllegalTransition if the table has none."""
        target = self._table.edges.get(self.stage, {}).get(event)
        if target is None:
            story = " -> ".join(self._story) or "nothing yet"
            raise IllegalTransition(
                f"{self._table.name} is {self.stage}: {event!r} cannot happen to it; so far: {story}"
            )
        self._story.append(event)
        self.stage = target
        return target

    def __eq__(self, other: object) -> bool:
        """Equal if stage and table are the same, whatever the history."""
        return isinstance(other, Staged) and (self._table, self.stage) == (other._table, other.stage)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<{self.stage} by {' -> '.join(self._story) or 'its beginning'}>"
