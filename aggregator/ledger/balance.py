"""The balance of a run's tokens: trained, merged, wasted by cause, in flight.

Pure. The entries come from :mod:`aggregator.ledger.ledger`; several shards' balances add up to one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from aggregator.ledger.lives import Account, Life, Past
from broker.wire.messages import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """A balance: token x fragment counts, each fragment weighted by its parameters, in tokens.

    The parts are integers in units of ``1 / scale`` tokens, so that the balance is checked exactly.
    """

    trained: int
    merged: int
    wasted: Mapping[str, int]
    in_flight: int
    scale: int

    def balanced(self) -> bool:
        """Whether nothing is counted twice or forgotten: trained = merged + wasted + in flight."""
        return self.trained == self.merged + sum(self.wasted.values()) + self.in_flight

    @classmethod
    def added(cls, parts: Iterable[Books]) -> Books:
        """Returns the balance over the fragments of several shards."""
        books = list(parts)
        wasted: Counter[str] = Counter()
        for each in books:
            wasted.update(each.wasted)
        return cls(
            trained=sum(each.trained for each in books),
            merged=sum(each.merged for each in books),
            wasted=dict(sorted(wasted.items())),
            in_flight=sum(each.in_flight for each in books),
            scale=sum(each.scale for each in books),
        )

    def tokens(self) -> dict[str, Any]:
        """Returns whole tokens that still add up: what rounding leaves over goes to the largest remainders."""
        parts = {
            "merged": self.merged,
            "in_flight": self.in_flight,
            **{f"wasted.{k}": v for k, v in self.wasted.items()},
        }
        total = round(self.trained / self.scale)
        whole = {k: v // self.scale for k, v in parts.items()}
        left = total - sum(whole.values())
        by_remainder = sorted(parts, key=lambda k: (-(parts[k] % self.scale), k))
        for key in by_remainder[: max(0, left)]:
            whole[key] += 1
        wasted = {k.removeprefix("wasted."): v for k, v in whole.items() if k.startswith("wasted.") and v}
        return {"trained": total, "merged": whole["merged"], "wasted": wasted, "in_flight": whole["in_flight"]}


class Key(NamedTuple):
    """One account: of a life of an island, on a fragment."""

    island_id: str
    incarnation: int
    fragment_id: int


class Tally:
    """Keeps sums of merged and wasted tokens by fragment; only changed accounts are added up again.

    Args:
        account: Returns an account; None if it is not kept any more.
        fragments: That there are.

    Attributes:
        merged: Fragment -> tokens.
        wasted: Fragment -> tokens by cause.
    """

    def __init__(self, account: Callable[[Key], Account | None], fragments: Iterable[int]) -> None:
        self.merged = dict.fromkeys(fragments, 0)
        self.wasted: dict[int, Counter[str]] = {p: Counter() for p in self.merged}
        self._account = account
        self._counted: dict[Key, tuple[int, Counter[str]]] = {}
        self._written: set[Key] = set()

    def written(self, island_id: str, incarnation: int, fragment_id: int) -> None:
        """An account has changed, or is kept no more."""
        self._written.add(Key(island_id, incarnation, fragment_id))

    def count(self) -> None:
        """Brings the sums up to date."""
        for key in self._written:
            p = key.fragment_id
            merged, wasted = self._counted.pop(key, (0, Counter()))
            self.merged[p] -= merged
            self.wasted[p].subtract(wasted)
            account = self._account(key)
            if account is not None:
                self._counted[key] = counted = account.merged_tokens, Counter(account.wasted_tokens)
                self.merged[p] += counted[0]
                self.wasted[p].update(counted[1])
        self._written.clear()


def in_all(
    tally: Tally,
    pasts: Iterable[Past],
    ended: Iterable[Life],
    trained_tokens: int,
    weights: Mapping[int, int],
    gaps: Reason,
) -> Books:
    """Returns the balance over all islands, as :func:`balance` would, from the sums of ``tally``.

    Args:
        tally: Of every life that is not folded; up to date.
        pasts: Of the islands that have lives that are.
        ended: Lives of the others that have ended.
        trained_tokens: Of all lives.
        weights: Fragment -> its parameter count; at least one.
        gaps: Why a fate may be unknown.
    """
    folded = balance(((past, ()) for past in pasts), weights, gaps)
    wasted: Counter[str] = Counter(dict(folded.wasted))
    for p, causes in tally.wasted.items():
        for cause, tokens in causes.items():
            wasted[cause] += tokens * weights[p]
    for life in ended:
        for p, account in life.accounts.items():
            rest = life.trained_tokens - account.known_tokens
            forgotten = min(rest, account.forgotten_tokens or 0)
            wasted[gaps] += forgotten * weights[p]
            wasted[Reason.ISLAND_LOST] += (rest - forgotten) * weights[p]
    trained = trained_tokens * folded.scale
    merged = folded.merged + sum(tokens * weights[p] for p, tokens in tally.merged.items())
    fates = {cause: tokens for cause, tokens in sorted(wasted.items()) if tokens}
    in_flight = trained - merged - sum(fates.values())
    return Books(trained=trained, merged=merged, wasted=fates, in_flight=in_flight, scale=folded.scale)


def balance(islands: Iterable[tuple[Past, Iterable[Life]]], weights: Mapping[int, int], gaps: Reason) -> Books:
    """Returns the balance over some islands.

    What is in flight is counted by fragment as the tokens reported beyond those accounted for; it can only come
    out negative when something was counted twice, which :meth:`aggregator.ledger.ledger.Ledger.check` refuses.

    Args:
        islands: Of each the lives that are folded, and the others.
        weights: Fragment -> its parameter count.
        gaps: Why a fate may be unknown.
    """
    scale = sum(weights.values()) or 1  # no fragment is known before the first island has joined
    trained = merged = in_flight = 0
    wasted: Counter[str] = Counter()
    for past, lives in islands:
        trained += past.tokens * scale
        for fragment_id, weight in weights.items():
            merged += past.merged_tokens[fragment_id] * weight
            causes = past.wasted_tokens[fragment_id]
            for cause, tokens in causes.items():
                wasted[cause] += tokens * weight
            rest = past.tokens - past.merged_tokens[fragment_id] - causes.total()
            wasted[Reason.ISLAND_LOST] += rest * weight
        for life in lives:
            trained += life.trained_tokens * scale
            for fragment_id, account in life.accounts.items():
                weight = weights[fragment_id]
                merged += account.merged_tokens * weight
                waiting = sum(r.tokens for r in account.waiting.values())
                rest = life.trained_tokens - account.merged_tokens - waiting
                for cause, tokens in account.wasted_tokens.items():
                    wasted[cause] += tokens * weight
                    rest -= tokens
                in_flight += waiting * weight
                if life.ended:
                    forgotten = min(rest, account.forgotten_tokens or 0)  # it did not come to closing the gap
                    wasted[gaps] += forgotten * weight
                    wasted[Reason.ISLAND_LOST] += (rest - forgotten) * weight
                else:
                    in_flight += rest * weight
    fates = {cause: tokens for cause, tokens in sorted(wasted.items()) if tokens}
    return Books(trained=trained, merged=merged, wasted=fates, in_flight=in_flight, scale=scale)
