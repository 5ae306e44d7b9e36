"""The weight of a contribution, from its tokens, steps and staleness.

The paper weighs by tokens and steps alone, ``w = n * n / s`` (Decoupled DiLoCo, https://arxiv.org/abs/2604.21428,
algorithm 2, line 7: amount times rate). Four rules are ours:

* *Staleness shrinks the step, not only the share.* Each weight is multiplied by ``lambda = (1 + staleness) ** -a`` and
  divided by the sum of ``w``, not of ``w * lambda``: a round of stale contributions moves the model less than the
  same round fresh. ``a = 0`` is the paper's rule.
* *Staleness is a mean over steps*, so a range that straddles an adoption is a little stale, not a whole version.
  Taking the oldest step instead shrinks every step of a healthy fleet.
* *No island outweighs all others together*: with three or more islands, none has more than half of the sum.
* *No island outweighs the fleet by its word alone*: what it is not believed (:mod:`aggregator.rules.claims`) does not
  weigh. With two islands, where there is no half to be cut to, a claim of a million tokens per step would leave the
  other one nothing.

Pure functions of numbers; sums are exact (``math.fsum``), so weights do not depend on the order of contributions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from aggregator.rules.outliers import Offer
from broker.wire.messages import Merged, TrainedOn

#: From this many islands on, none of them may have more than half of the sum of token weights. Two islands of very
#: unequal speed are left alone: there, a cap at half would be plain averaging, whatever each of them trained.
ISLANDS_TO_CAP = 3


def staleness_weight(staleness: float, exponent: float) -> float:
    """Returns ``(1 + staleness) ** -exponent``: 1 for fresh contributions, falling towards 0.

    Args:
        staleness: In versions, not negative.
        exponent: ``a``, not negative; 0.5 unless configured, 0 for the paper's rule.
    """
    return float((1.0 + staleness) ** -exponent)


def mean_staleness(trained_on: Sequence[TrainedOn], current_version: int) -> float:
    """Returns how many versions behind ``current_version`` the steps were run, on average.

    Args:
        trained_on: At least one step, none on a later version: others are refused as they arrive.
        current_version: The newest.
    """
    steps = behind = 0
    for part in trained_on:
        steps += part.steps
        behind += part.steps * (current_version - part.fragment_version)
    return behind / steps


def presence_factor(present: int, live: int, exponent: float) -> float:
    """Returns ``(present / live) ** exponent``: the part of a step for a round with islands missing.

    With RDA a merge has full length, however few are in it, so a round of one island among eight moves the model as
    far as a round of all, on an eighth of the evidence. An absent island counts as much as one that is there.

    Args:
        present: Islands in the round, at least 1.
        live: Live islands, at least ``present``.
        exponent: 0 takes full steps always; 1 makes the step proportional.
    """
    return float((present / live) ** exponent)


def weighed(
    offers: Sequence[Offer],
    version: int,
    exponent: float,
    presence: float = 1.0,
    *,
    is_fresh: Callable[[Offer], bool] = lambda _: True,
    scales: Sequence[float] = (),
    most_tokens_per_step: Mapping[str, float] | None = None,
    paces: Mapping[str, float] | None = None,
    capped: bool = True,
    trust: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Merged, ...]:
    """Returns the contributions of one round with their weights, in the order given.

    With w the capped token weights, lambda the staleness weights times ``presence``:
        merge_weight = w * lambda / sum(w)

    All are 0 when no contribution holds a token.

    Args:
        offers: At least one.
        version: The version that they are merged into: their staleness counts from it.
        exponent: Exponent of :func:`staleness_weight`.
        presence: From :func:`presence_factor`.
        is_fresh: Whether a contribution answers this very round.
        scales: Factors of their lengths, where some are too long; empty: none is.
        most_tokens_per_step: By island; tokens claimed beyond it have no weight. None: no limit.
        paces: By island, the part of its steps that is believed. None: all are.
        capped: Whether none of three or more islands may have more than half of the sum.
        trust: Trust in each island, 0 to 1 (:mod:`aggregator.rules.trust`); empty: all are trusted. If no island in
            the round has 1, the step is shorter, too.
    """
    islands = {each.island_id for each in offers}
    paces = paces or {}
    shares = {island_id: paces.get(island_id, 1.0) * trust.get(island_id, 1.0) for island_id in islands}
    token_weights = _token_weights(offers, most_tokens_per_step or {}, shares, capped=capped)
    total = math.fsum(token_weights)
    presence *= max(map(trust.__getitem__, islands)) if trust else 1.0
    found = []
    for each, token_weight, scale in zip(offers, token_weights, scales or [1.0] * len(offers), strict=True):
        staleness = mean_staleness(each.trained_on, version)
        discount = staleness_weight(staleness, exponent) * presence
        merged = Merged(
            island_id=each.island_id,
            incarnation=each.incarnation,
            steps=each.steps,
            staleness=staleness,
            token_weight=token_weight,
            # Shortening is one more reason why a step is smaller: all are one factor of the length.
            staleness_weight=discount * scale,
            merge_weight=(token_weight / total * discount if total else 0.0) * scale,
            fresh=is_fresh(each),
            data=each.data,
        )
        found.append(merged)
    return tuple(found)


def _token_weights(
    contributions: Sequence[Offer], most: Mapping[str, float], shares: Mapping[str, float], *, capped: bool
) -> list[float]:
    """Returns of each contribution ``n * n / s`` times its island's share.

    ``capped`` limits one of three or more islands to half of the sum.

    The cap is against the sum *after* cutting, which sounds like an iteration but has a closed form: only one island
    can exceed half, it ends with as much as all others together, and then none of the others exceeds half either.
    An island with several ranges in the round is cut as a whole, each range in proportion.
    """
    weights = []
    of_island: defaultdict[str, list[float]] = defaultdict(list)
    for each in contributions:
        steps = each.steps.steps
        tokens = min(each.steps.tokens, steps * most.get(each.island_id, math.inf))
        # Of the pace in the share: steps that were not run are taken from n and from s.
        weights.append(tokens * tokens / steps * shares[each.island_id])
        of_island[each.island_id].append(weights[-1])
    sums = {island_id: math.fsum(parts) for island_id, parts in of_island.items()}
    if not capped or len([1 for total in sums.values() if total > 0]) < ISLANDS_TO_CAP:  # no tokens: no third one
        return weights
    heaviest = max(sorted(sums), key=sums.__getitem__)
    others = math.fsum([total for island_id, total in sums.items() if island_id != heaviest])
    if sums[heaviest] <= others:
        return weights
    cut = others / sums[heaviest]
    return [
        weight * cut if each.island_id == heaviest else weight
        for each, weight in zip(contributions, weights, strict=True)
    ]
