"""Makes a note of what was written of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aggregator.interface import leader_notes, notes
from aggregator.interface.events import Note

#: Name -> class of each note.
NOTES: dict[str, type[Note]] = {
    cls.name: cls
    for module in (leader_notes, notes)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Note) and cls is not Note
}


def read_note(name: str, fields: Mapping[str, Any]) -> Note | None:
    """Returns the note that was written; None for one that this release does not know."""
    try:
        return NOTES[name].read(fields)
    except (KeyError, TypeError):
        return None


def note_in(line: Mapping[str, Any]) -> Note | None:
    """Returns the note in a line of a tape; None for another kind of line, or a note that is not known."""
    return read_note(line["note"], line.get("fields", {})) if "note" in line else None
