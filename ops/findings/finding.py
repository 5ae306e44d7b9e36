"""A finding of the doctor: subject, verdict, observation, and cure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The verdict on one subject."""

    OK = "ok"
    WARNING = "warning"  # it works, and may cost something
    FAILURE = "failure"  # a run would not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding on one subject.

    Attributes:
        subject: The subject in a word or two.
        verdict: Whether that is good enough.
        seen: The observation in a line.
        cure: What to do; empty only if nothing is to be done.
    """

    subject: str
    verdict: Verdict
    seen: str
    cure: str = ""


def ok(subject: str, seen: str, cure: str = "") -> Finding:
    """Returns a finding with verdict ``ok``."""
    return Finding(subject=subject, verdict=Verdict.OK, seen=seen, cure=cure)


def warning(subject: str, seen: str, cure: str) -> Finding:
    """Returns a finding with verdict ``warning``: it works, at a cost."""
    return Finding(subject=subject, verdict=Verdict.WARNING, seen=seen, cure=cure)


def failure(subject: str, seen: str, cure: str) -> Finding:
    """Returns a finding with verdict ``failure``: no run can work so."""
    return Finding(subject=subject, verdict=Verdict.FAILURE, seen=seen, cure=cure)


def exit_status(findings: Sequence[Finding]) -> int:
    """Returns 1 if any finding is a failure, else 0."""
    return int(any(each.verdict is Verdict.FAILURE for each in findings))


def summary(findings: Sequence[Finding], took_s: float) -> str:
    """Returns the last line: the number of findings by verdict."""
    count = Counter(each.verdict for each in findings)
    failures, warnings = count[Verdict.FAILURE], count[Verdict.WARNING]
    if not failures and not warnings:
        return f"all is well: {len(findings)} findings in {took_s:.1f} s"
    parts = [_number(failures, "failure")] if failures else ["no failure"]
    return f"{', '.join([*parts, _number(warnings, 'warning')])} in {len(findings)} findings, after {took_s:.1f} s"


def to_json(findings: Sequence[Finding], took_s: float) -> dict[str, Any]:
    """Returns all findings as plain data."""
    return {"ok": not exit_status(findings), "seconds": round(took_s, 3), "findings": list(map(asdict, findings))}


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
