"""A merge rule of one's own, ``--merge package.module:Class``: its interface, and how it is asked.

As a round closes, the core has decided what is merged, and each contribution's share and discount. The rule multiplies
these weights by a factor each, and one of the two kernels (:mod:`aggregator.merge.kernels`) merges by them. With

    D = sum(share * factor * v),      v = discount * pseudo-gradient,      sum(share * factor) <= sum(share) = 1

for the kernel ``mean``, a merge stays a mean, or is shorter: how far a step goes is the outer learning rate's. A rule
stands in the place of trust (:mod:`aggregator.rules.trust`); what is refused, and limits on claims, stay.

A rule sees numbers only: lengths, and products of any two contributions if it asks for them. These are on the tape, so
a replay asks it again and finds the same factors without a payload, provided that it is deterministic: no clock, no
random numbers, no files. Each round asks a new object, so that nothing counts but what is returned.

The state is that of one fragment: a rule gets what it returned for the version before. It stands in the commit of the
version, so it goes to standbys and into copies, and a round that was lost in a crash has left no trace in it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from broker.base.errors import ConfigError
from broker.wire.messages import MergeRule, own_rule

#: Of a state as JSON: each commit has it, and so has the ledger's line of each version.
MAX_STATE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One contribution, as a rule sees it.

    Attributes:
        island_id: Of its sender; one island may have several in a round.
        tokens: Trained in it.
        steps: Inner steps, at least 1.
        staleness: In versions.
        share: Of the merge, by tokens and steps, with limits on what one island claims and weighs.
        length: Of v, Euclidean: the pseudo-gradient with its discount for staleness and missing islands, shortened
            where it was longer than plausible.
    """

    island_id: str
    tokens: int
    steps: int
    staleness: float
    share: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRound:
    """A round that closes.

    Attributes:
        shard: Of this aggregator, 0 if it is the only one.
        fragment_id: That is merged.
        fragment_version: That is made of it.
        contributions: At least one, by island and step.
        products: Scalar products of any two v, [k][k]; empty unless the rule ``compares``.
    """

    shard: int
    fragment_id: int
    fragment_version: int
    contributions: tuple[Offered, ...]
    products: tuple[tuple[float, ...], ...] = ()


class RoundRule:
    """The base of merge rules of one's own; see the module's docstring.

    Attributes:
        kernel: ``mean``, or ``rda`` to average lengths and directions of matrices apart.
        compares: Whether it needs products of contributions: one more pass over them, each with each.
    """

    kernel: ClassVar[str] = "mean"
    compares: ClassVar[bool] = False

    def factors(self, round: MergeRound, state: Any) -> tuple[Sequence[float], Any]:
        """Returns a factor for each contribution, and the fragment's next state.

        Args:
            round: What is merged.
            state: Of the fragment, as JSON gives it back; None for its first merge under this rule.

        Returns:
            Factors in the order of the contributions, finite and not negative; by shares their mean is at most 1. With
            1 for each the merge stays as it was. The state must be plain data, of at most ``MAX_STATE_BYTES`` as JSON.
        """
        raise NotImplementedError


class Loaded(NamedTuple):
    """A rule of one's own, its name with kernel and digest."""

    name: str
    rule: type[RoundRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One round that a rule is asked about, once: a merge and its books then have the same factors.

    Attributes:
        own: The rule.
        round: Without products.
        state: Of the fragment, as JSON.
    """

    own: Loaded
    round: MergeRound
    state: str
    _found: list[tuple[tuple[float, ...], str]] = field(default_factory=list, compare=False, repr=False)

    def factors(self, cosines: Sequence[float]) -> tuple[float, ...]:
        """Returns the factors alone of :meth:`answer`."""
        return self.answer(cosines)[0]

    def answer(self, cosines: Sequence[float]) -> tuple[tuple[float, ...], str]:
        """Returns the factors, and the next state as JSON.

        Args:
            cosines: Of any two contributions: first and second, first and third, ..; unused unless it ``compares``,
                and once it has been asked.

        Raises:
            ConfigError: The rule raised something, or its answer cannot be used.
        """
        if not self._found:
            self._found.append(self._ask(cosines))
        return self._found[0]

    def _ask(self, cosines: Sequence[float]) -> tuple[tuple[float, ...], str]:
        round_, count = self.round, len(self.round.contributions)
        if self.own.rule.compares:
            lengths = [each.length for each in round_.contributions]
            round_ = replace(round_, products=_products(lengths, cosines))
        try:
            given, state = self.own.rule().factors(round_, json.loads(self.state))
            factors, text = tuple(float(each) for each in given), json.dumps(state, allow_nan=False)
        except Exception as err:
            raise self._wrong(_told(err), "factors and a state of plain data are needed") from err
        if len(factors) != count:
            raise self._wrong(f"returned {len(factors)} factors for {count} contributions", "one for each is needed")
        if not all(math.isfinite(each) and each >= 0 for each in factors):
            raise self._wrong(f"returned the factors {list(factors)}", "each must be finite and not negative")
        mean = math.fsum(each.share * factor for each, factor in zip(round_.contributions, factors, strict=True))
        if mean > 1 + 1e-9:
            raise self._wrong(f"returned factors whose mean by shares is {mean:.6g}", "it must be at most 1")
        if len(text) > MAX_STATE_BYTES:
            raise self._wrong(f"returned a state of {len(text)} bytes as JSON", f"at most {MAX_STATE_BYTES} are kept")
        return factors, text

    def _wrong(self, what: str, needed: str) -> ConfigError:
        where = f"version {self.round.fragment_version} of fragment {self.round.fragment_id}"
        cure = "mend it, and start again: that names the new digest, with which the run goes on"
        return ConfigError("merge", self.own.name, f"{what} for {where}, {needed}: {cure}")


def _products(lengths: Sequence[float], cosines: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    k = len(lengths)
    found = [[lengths[i] * lengths[j] for j in range(k)] for i in range(k)]
    pairs = [(i, j) for i in range(k) for j in range(i + 1, k)]
    for (i, j), cosine in zip(pairs, cosines, strict=True):
        found[i][j] *= cosine
        found[j][i] = found[i][j]
    return tuple(map(tuple, found))


# --- which one ------------------------------------------------------------------------------------------------


def load(merge: str | None) -> Loaded | None:
    """Returns a rule of one's own; None if the setting names none.

    Args:
        merge: The setting.

    Raises:
        ConfigError: It cannot be imported, is no rule, or is not the one that the name says.
    """
    own = own_rule(merge)
    if own is None:
        return None
    rule, digest, path = _imported(own.path)
    named = f"{rule.kernel}+{own.path}#{digest}"
    if own.digest not in ("", digest):
        cure = f"put that file back; to go on with this one, give each aggregator --merge {own.path}#{digest}"
        raise ConfigError("merge", merge, f"the file {path} here has digest {digest}: {cure}, or so in its file")
    if own.kernel not in ("", rule.kernel):
        raise ConfigError("merge", merge, f"the class has kernel {rule.kernel} here: take the one that the run has")
    return Loaded(named, rule)


@cache
def _imported(path: str) -> tuple[type[RoundRule], str, str]:
    """Returns a class, the digest of its source file, and that file."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as err:
        cure = "it must be importable from the folder in which the aggregator starts, as for each standby and replay"
        raise ConfigError("merge", path, f"cannot be imported ({_told(err)}): {cure}") from err
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, RoundRule)) or found is RoundRule:
        cure = "name a class that derives from aggregator.interface.merge_rule.RoundRule"
        raise ConfigError("merge", path, f"{name} of {module_name} is no merge rule: {cure}")
    if found.kernel not in set(MergeRule):
        raise ConfigError("merge", path, f"has kernel {found.kernel!r}: it must be one of {', '.join(MergeRule)}")
    file = getattr(sys.modules[found.__module__], "__file__", None) or ""
    try:
        found()
        source = Path(file).read_bytes()
    except Exception as err:
        raise ConfigError("merge", path, f"{_told(err)}: a class without arguments, in a file, is needed") from err
    return found, hashlib.sha256(source).hexdigest()[:16], file


def _told(err: Exception) -> str:
    """Returns an error of somebody else's code, with the line it comes from."""
    frames = [each for each in traceback.extract_tb(err.__traceback__) if each.filename != __file__]
    own = [each for each in frames if "importlib" not in each.filename]
    return f"{type(err).__name__}: {err}" + "".join(f" ({each.filename}, line {each.lineno})" for each in own[-1:])
