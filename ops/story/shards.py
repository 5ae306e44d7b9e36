"""Adds up the counts of several shards as if there had been one. Pure.

Each speaks of its own fragments. Tokens are weighted by their parameters, as within one shard; averages over versions
by the number of these. What concerns islands and the run as a whole is shard 0's.

Of an island that died, its last heartbeat may have reached one shard and not another. All of its steps were trained on
the fragments of all shards: what one of these has never heard of is lost with the island, or in flight while the run
goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregator.ledger.balance import Books
from broker.wire.messages import Phase, Reason

#: Averages over versions.
_AVERAGES = ("participation", "staleness_mean", "agreement", "momentum_cosine")
#: Of an island: they only grow.
_COUNTERS = ("inner_steps", "tokens")


def one_report(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Puts final reports together, that of shard 0 first (:func:`aggregator.state.summary.report`)."""
    if len(reports) == 1:
        return dict(reports[0])
    islands = _islands([each["islands"] for each in reports])
    trained = sum(each["tokens"] for each in islands.values())
    ended = reports[0]["phase"] == Phase.ENDED
    books = [_with_all_of(Books(**each["books"]), trained, ended=ended) for each in reports]
    return {
        **reports[0],
        "tokens": Books.added(books).tokens(),
        "islands": islands,
        "versions": {p: v for each in reports for p, v in each["versions"].items() if v >= 0},
        "refusals": _sum(each["refusals"] for each in reports),
        "troubles": _troubles(reports),
        **_over_versions(reports),
    }


def one_total(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the totals in Redis together, that of shard 0 first; each has the fields of ``RunTotals``."""
    if len(totals) == 1:
        return dict(totals[0])
    tokens = _tokens(totals)
    return {
        **totals[0],
        "merged_tokens": tokens["merged"],
        "in_flight_tokens": tokens["in_flight"],
        "trained_tokens": tokens["trained"],
        "wasted_tokens": tokens["wasted"],
        "model_version": sum(each["model_version"] for each in totals),
        "interval": max((each.get("interval", {}) for each in totals), key=lambda each: each.get("steps", 0)),
        "journey": max((each.get("journey", {}) for each in totals), key=lambda each: each.get("cost", 0)),
        "quarantined": {name: how for each in reversed(totals) for name, how in each["quarantined"].items()},
        "trust": _least_trusted(totals),
        "earlier": _most([each.get("earlier", {}) for each in totals]),
        "troubles": _troubles(totals),
        **_over_versions(totals),
    }


def _least_trusted(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each island with less than its full weight, as the shard has it that trusts it least."""
    rows = [row for each in totals for row in each.get("trust", {}).items()]
    return dict(sorted(rows, key=lambda row: row[1]["trust"], reverse=True))


def _most(tables: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Returns for each island the largest of each count in any shard."""
    names = dict.fromkeys(name for each in tables for name in each)
    return {
        name: {key: max(row.get(key, 0) for row in rows) for key in rows[0]}
        for name in names
        for rows in [[each[name] for each in tables if name in each]]
    }


def _islands(tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns the islands of shard 0, with the largest counters that any shard has."""
    return {
        name: {**own, **{key: max(each[name][key] for each in tables if name in each) for key in _COUNTERS}}
        for name, own in tables[0].items()
    }


def _with_all_of(books: Books, trained_tokens: int, *, ended: bool) -> Books:
    """Returns one shard's books with all tokens that any shard knows to be trained."""
    unknown = trained_tokens * books.scale - books.trained
    if unknown <= 0:
        return books
    if not ended:
        return replace(books, trained=books.trained + unknown, in_flight=books.in_flight + unknown)
    wasted = {**books.wasted, Reason.ISLAND_LOST: books.wasted.get(Reason.ISLAND_LOST, 0) + unknown}
    return replace(books, trained=books.trained + unknown, wasted=wasted)


def _tokens(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return Books.added(Books(**each["books"]) for each in parts).tokens()


def _over_versions(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    versions = [sum(each["rounds"].values()) for each in parts]

    def average(name: str) -> float | None:
        known = [(each[name], n) for each, n in zip(parts, versions, strict=True) if each.get(name) is not None]
        number = sum(n for _, n in known)
        return sum(value * n for value, n in known) / number if number else None

    return {"rounds": _sum(each["rounds"] for each in parts)} | {name: average(name) for name in _AVERAGES}


def _troubles(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_of_shard(n, text) for n, each in enumerate(parts) for text in each.get("troubles", ())]


def _of_shard(shard: int, trouble: str) -> str:
    """Adds the shard to a trouble, behind its duration, which news leave out."""
    since, colon, text = trouble.partition(": ")
    return f"{since}: shard {shard}: {text}" if colon else f"shard {shard}: {trouble}"


def _sum(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return dict(total)
