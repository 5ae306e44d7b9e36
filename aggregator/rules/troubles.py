"""Names what is wrong with a run, since when. Pure."""

from __future__ import annotations


class Troubles:
    """Names -> sentences that say what is wrong, since when, and what to do about it."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, str]] = {}

    def begin(self, name: str, sentence: str, now_s: float) -> bool:
        """Notes that something is wrong; returns True if it was not wrong before."""
        known = self._since.get(name)
        self._since[name] = now_s if known is None else known[0], sentence
        return known is None

    def end(self, name: str, now_s: float) -> float | None:
        """Notes that a trouble is over; returns how many seconds it lasted, None if there was none."""
        known = self._since.pop(name, None)
        return None if known is None else now_s - known[0]

    def __contains__(self, name: str) -> bool:
        """Returns True while something of that name is wrong."""
        return name in self._since

    def sentences(self, now_s: float) -> tuple[str, ...]:
        """Returns the present troubles as sentences, the oldest first."""
        ordered = sorted(self._since.values())
        return tuple(f"for {now_s - since_s:.0f} s: {sentence}" for since_s, sentence in ordered)
