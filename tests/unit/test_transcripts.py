"""Conversations with an aggregator core, as text: each line that starts with ``>`` is its answer to the line above.

Commands (``key=value`` pairs in any order; ``at=`` moves the time first)::

    settings quorum=2 ..               how the aggregator is configured; the first line
    gather a b c                       islands join, the first one supplies version 0, all report step 0
    gathered a b c                     the same, without a word of it
    beat a step=4                      a heartbeat
    offer a steps=0-4 base=0           a contribution to fragment 0; round= of an earlier round, flaw= a reason
    nothing a                          nothing to hand over in the open round
    join a | leave a step=4            a new process of an island; a farewell
    run                                nothing but time passes, from deadline to deadline
    disk fails | disk works            every write from here on
    restart                            of the aggregator, from its disk

``pytest tests/unit/test_transcripts.py --regenerate-transcripts`` writes the answers anew; review them as a diff.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aggregator import events as agg
from broker.wire import messages as m
from broker.wire.messages import RECIPE
from tests.aggregator_hand import Desk

FOLDER = Path(__file__).parents[1] / "transcripts"

#: What is left out of notes: it is said elsewhere, or too long to read.
DULL = {"digest", "contributions", "detail", "retry_s", "took_s", "live", "round", "phase"}
#: Said by ``round.closed`` just before.
SAID = {"version.committed": {"reason", "missing"}}


class Scenario:
    """Runs the commands of one transcript."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.disk_works = True

    def answer(self, line: str) -> list[str]:
        """Carries out one command; returns the lines that describe what followed."""
        verb, *words = line.split()
        names = [word for word in words if "=" not in word]
        values: dict[str, Any] = dict(word.split("=", 1) for word in words if "=" in word)
        self.desk.take()
        if "at" in values:
            self.desk.run_to(float(values["at"]))
        match verb:
            case "settings":
                self.desk = Desk(**{name: _number(value) for name, value in values.items()})
                return []
            case "gather" | "gathered":
                self.desk.gather(*names)
                if verb == "gathered":
                    return []
            case "beat":
                self.desk.beat(names[0], int(values["step"]), stopped="stopped" in names)
            case "offer":
                first, last = values["steps"].split("-")
                flaw = agg.Flaw(reason=m.Reason(values["flaw"]), detail="of w0") if "flaw" in values else None
                round_id = int(values["round"]) if "round" in values else None
                base = int(values["base"])
                self.desk.offer(names[0], int(first), int(last), base=base, round_id=round_id, flaw=flaw)
            case "nothing":
                self.desk.nothing(names[0])
            case "join":
                self.desk.join(names[0])
            case "leave":
                step = int(values["step"])
                self.desk.say(names[0], m.Leave(inner_step=step, tokens=10 * step, reason="goodbye"))
            case "run":
                pass
            case "disk":
                self.disk_works = self.desk.writes = names[0] == "works"
            case "restart":
                self.desk = self.desk.restarted()
            case _:
                raise AssertionError(f"unknown command {verb!r}: see the docstring of {__file__}")
        if not self.disk_works:
            for _ in range(len(self.desk.writing)):
                self.desk.write(fails="no space left on device")
        return list(self._story(self.desk.take()))

    def _story(self, actions: list[agg.Action]) -> Iterator[str]:
        for action in actions:
            match action:
                case agg.Note(name=name, fields=fields):
                    dull = DULL | SAID.get(name, set()) | ({*RECIPE} if name == "recipe.settled" else set())
                    told = " ".join(f"{k}={_plain(v)}" for k, v in fields.items() if k not in dull)
                    yield f"{name} {told}".rstrip()
                case agg.Merge(parts=parts):
                    yield "merge " + ", ".join(f"{p.island_id} {p.steps.from_step}-{p.steps.to_step}" for p in parts)
                case agg.Persist(commit=commit):
                    yield f"persist fragment={commit.fragment_id} version={commit.fragment_version}"
                case agg.Publish():
                    yield f"publish fragment={action.fragment_id} version={action.fragment_version}"
                case agg.Send(to=to, message=m.FleetState(resolutions=resolutions)):
                    for r in resolutions:
                        yield f"tell {to}: {r.from_step}-{r.to_step} {r.fate}" + (f", {r.reason}" if r.reason else "")
                case agg.Send(to=to, message=m.Refused(reason=reason, detail=detail)):
                    yield f"refuse {to}: {reason}, {detail}"
                case agg.Send(to=to, message=m.Welcome(island_id=name, incarnation=life, start_step=step)):
                    yield f"welcome {to}: island={name} incarnation={life} start_step={step}"
                case _:
                    pass


def replay(text: str) -> str:
    """Returns the transcript with the answers that the core gives now."""
    scenario, lines = Scenario(), []
    for line in text.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        if line.strip() and not line.startswith("#"):
            lines += [f"> {answer}" for answer in scenario.answer(line)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_conversation_goes_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    now = replay(text)
    if request.config.getoption("--regenerate-transcripts"):
        path.write_text(now)
    assert now == path.read_text(), f"{path.name}: regenerate with --regenerate-transcripts and review the diff"


def test_there_are_transcripts() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 5


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value).replace(" ", "_") if isinstance(value, m.Reason) else value
