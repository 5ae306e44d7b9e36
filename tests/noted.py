"""Lines of tapes with notes, of which a test gives the fields that matter to it."""

import dataclasses
import json

from aggregator.interface.notes import Merging
from aggregator.interface.reading_notes import NOTES
from aggregator.store.tape import note_line

#: Type of a field -> what it has where a test says nothing.
_BLANK = {"int": 0, "float": 0.0, "str": "", "bool": False, "tuple[int, int]": (0, 0)}


def noted(name, **given):
    """The note of that name, with these fields."""
    if "contributions" in given:
        given["contributions"] = [_filled(Merging, each) for each in given["contributions"]]
    return _filled(NOTES[name], given)


def line(now_s, name, **given):
    """That note as a line."""
    return json.loads(json.dumps(note_line(noted(name, **given), now_s)))


def _filled(cls, given):
    lacking = [each for each in dataclasses.fields(cls) if each.default is dataclasses.MISSING]
    return cls(**{each.name: _BLANK.get(each.type, ()) for each in lacking} | given)
