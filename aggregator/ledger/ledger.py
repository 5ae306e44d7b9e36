"""The ledger: the fate of every token, per island and fragment.

Unit: token x fragment. An island that trained n tokens has trained them on every fragment; fragment p hands them
over in its own rounds. The books are kept per *life* (incarnation) of an island. What a life trained and neither
merged, nor lost by a recorded cause, nor still has on its way is *in flight* while it lives and ``island_lost`` after;
what of it a new lineage gave up is ``store_lost`` then, or when the flush closes the gap.

Of each island only the latest lives are kept one by one. Those before, once they have ended and nothing of them waits,
are folded into one sum (:class:`aggregator.ledger.lives.Past`): an island that comes and goes for weeks makes no book
longer.

The slice of one fragment is written in the same commit as each of its versions, so that after a restart the books
agree with the parameters exactly; what was refused since is refused again when it is sent again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aggregator.ledger.balance import Books, Key, Tally, balance, in_all
from aggregator.ledger.lives import Account, Life, Past
from broker.wire.messages import Reason
from broker.wire.ranges import StepRange

#: Lives of an island that are kept one by one, if they have ended.
LIVES_KEPT = 8
#: Where the sums over those before stand, beside the incarnations.
PAST = "past"


def tokens_trained(kept: Mapping[str, Any]) -> int:
    """Returns the tokens all islands had reported by a commit, from its ledger slice; 0 if it has none."""
    folded = sum(row[2] for row, *_ in kept.get("past", {}).values())
    lives = (each["life"] for by_life in kept.get("accounts", {}).values() for each in by_life.values())
    return int(folded + sum(last - start for _, start, _, last, *_ in lives))


def merged_by_island(kept: Mapping[str, Any]) -> Counter[str]:
    """Returns the tokens merged into a fragment by each island, from the ledger slice of a commit."""
    merged = Counter({island_id: tokens for island_id, (_, tokens, _) in kept.get("past", {}).items()})
    for island_id, lives in kept.get("accounts", {}).items():
        merged[island_id] += sum(life["merged_tokens"] for life in lives.values())
    return merged


@dataclass(slots=True)
class Participation:
    """Sums over the versions of one fragment, or of all."""

    rounds: Counter[int] = field(default_factory=Counter)  #: number of contributors -> versions
    participation_sum: float = 0.0
    staleness_sum: float = 0.0

    def count(self, contributors: int, participation: float, staleness: float) -> None:
        """Takes one version in."""
        self.rounds[contributors] += 1
        self.participation_sum += participation
        self.staleness_sum += staleness

    @property
    def participation(self) -> float | None:
        """Mean share of the live islands in a version; None before the first."""
        return self.participation_sum / self.rounds.total() if self.rounds else None

    @property
    def staleness(self) -> float | None:
        """Mean staleness of merged contributions, in versions; None before the first."""
        return self.staleness_sum / self.rounds.total() if self.rounds else None

    @classmethod
    def added(cls, parts: Iterable[Participation]) -> Participation:
        """Returns the sum over several fragments."""
        total = cls()
        for part in parts:
            total.rounds += part.rounds
            total.participation_sum += part.participation_sum
            total.staleness_sum += part.staleness_sum
        return total

    def record(self) -> list[Any]:
        """Returns it as plain data."""
        return [{str(n): k for n, k in self.rounds.items()}, self.participation_sum, self.staleness_sum]

    @classmethod
    def restored(cls, record: Sequence[Any]) -> Participation:
        """Reads :meth:`record` back."""
        rounds, participation_sum, staleness_sum = record
        return cls(Counter({int(n): k for n, k in rounds.items()}), participation_sum, staleness_sum)


class Ledger:
    """The books of one run.

    Args:
        weights: Fragment -> its parameter count; frozen fragments do not count.
        lives_kept: Of an island, one by one.
    """

    def __init__(self, weights: Mapping[int, int], *, lives_kept: int = LIVES_KEPT) -> None:
        self._weights = dict(weights)
        self._lives_kept = lives_kept
        self._lives: dict[str, dict[int, Life]] = {}
        self._past: dict[str, Past] = {}
        self._participation = {p: Participation() for p in self._weights}
        self._trained_tokens: int | None = 0  # of all lives; None: to be counted anew
        self._doubted_tokens = 0  # of these, those that do not count towards the end
        self._rows: dict[str, dict[str, list[Any]]] = {}  # of :meth:`counters`, as they were made last
        self._unrecorded: set[str] = set()  # islands of which something has changed since
        self._tally: Tally | None = Tally(self._kept, self._weights)  # of all that is in lives; None: likewise
        self._gaps = Reason.UNRECORDED  # why a fate may be unknown; after a new lineage, the store that was lost

    # --- writing ---------------------------------------------------------------------------------------------

    def begin(self, island_id: str, incarnation: int, start_step: int, start_tokens: int) -> None:
        """Opens the books of a new life and ends the earlier ones."""
        self._unrecorded.add(island_id)
        lives = self._lives.setdefault(island_id, {})
        for life in lives.values():
            life.ended = True
        if incarnation not in lives:
            accounts = {p: Account() for p in self._weights}
            lives[incarnation] = Life(start_step, start_tokens, start_step, start_tokens, accounts)
        self._fold(island_id)

    def end(self, island_id: str) -> None:
        """Ends the current life of an island that left."""
        for life in self._lives.get(island_id, {}).values():
            life.ended = True
            self._unrecorded.add(island_id)

    def report(self, island_id: str, incarnation: int, step: int, tokens: int) -> None:
        """Takes note of an island's counters; they never go back."""
        life = self._lives[island_id][incarnation]
        if step <= life.last_step:
            return
        before, life.last_step = life.last_tokens, step
        life.last_tokens = max(tokens, before)
        self._unrecorded.add(island_id)
        if self._trained_tokens is not None:
            self._trained_tokens += life.last_tokens - before

    def doubt(self, island_id: str, incarnation: int, tokens: int) -> None:
        """Sets how many of a life's tokens do not count towards the end; the books have them as they are."""
        life = self._lives[island_id][incarnation]
        tokens = min(tokens, life.trained_tokens)
        if tokens != life.doubted_tokens:
            self._doubted_tokens += tokens - life.doubted_tokens
            life.doubted_tokens = tokens
            self._unrecorded.add(island_id)

    def wait(self, island_id: str, incarnation: int, fragment_id: int, steps: StepRange) -> None:
        """Takes in a contribution that arrived."""
        account = self.account(island_id, incarnation, fragment_id)
        assert not account.overlaps(steps), f"{island_id} fragment {fragment_id}: {steps} arrived before"
        if self._gaps is not Reason.UNRECORDED and account.forgotten_tokens is None:
            before = steps.from_tokens - self._lives[island_id][incarnation].start_tokens
            account.forgotten_tokens = max(0, before - account.known_tokens)
        account.waiting[(steps.from_step, steps.to_step)] = steps
        self.report(island_id, incarnation, steps.to_step, steps.to_tokens)

    def merge(self, island_id: str, incarnation: int, fragment_id: int, steps: StepRange) -> None:
        """Moves a waiting contribution to the merged ones."""
        self.account(island_id, incarnation, fragment_id).merge(steps)
        self._written(island_id, incarnation, fragment_id)

    def refuse(self, island_id: str, incarnation: int, fragment_id: int, steps: StepRange, cause: Reason) -> None:
        """Books a contribution as wasted, whether it waited or is refused on arrival."""
        self.account(island_id, incarnation, fragment_id).refuse(steps, cause)
        self._written(island_id, incarnation, fragment_id)
        self.report(island_id, incarnation, steps.to_step, steps.to_tokens)

    def overwritten(self, island_id: str, incarnation: int, tokens: Iterable[int]) -> None:
        """Takes note of what adoptions with keep = 0 dropped, per fragment, over the life of the island."""
        life = self._lives[island_id][incarnation]
        for fragment_id, count in enumerate(tokens):
            if count and fragment_id in life.accounts:
                account = life.accounts[fragment_id]
                if count > account.wasted_tokens[Reason.OVERWRITTEN]:
                    account.wasted_tokens[Reason.OVERWRITTEN] = count
                    self._written(island_id, incarnation, fragment_id)

    def count(self, fragment_id: int, contributors: int, participation: float, staleness: float) -> None:
        """Counts a version of a fragment, by fragment."""
        self._participation[fragment_id].count(contributors, participation, staleness)

    def close_gap(self, island_id: str, incarnation: int, fragment_id: int) -> None:
        """Books trained tokens without a fate, and not on their way, as ``unrecorded`` or ``store_lost``."""
        life = self._lives[island_id][incarnation]
        account = life.accounts[fragment_id]
        gap = life.trained_tokens - account.spent_tokens
        if gap > 0 and not account.waiting:
            account.wasted_tokens[self._gaps] += gap
            self._written(island_id, incarnation, fragment_id)

    def _written(self, island_id: str, incarnation: int, fragment_id: int) -> None:
        if self._tally is not None:
            self._tally.written(island_id, incarnation, fragment_id)

    # --- reading ---------------------------------------------------------------------------------------------

    def life(self, island_id: str, incarnation: int) -> Life:
        """The life named; KeyError if it never joined, or is folded."""
        return self._lives[island_id][incarnation]

    def last_life(self, island_id: str) -> Life:
        """The latest life of an island that has begun; KeyError if it never joined."""
        lives = self._lives[island_id]
        return lives[max(lives)]

    def knows(self, island_id: str, incarnation: int) -> bool:
        """Whether that life ever began, and is not folded."""
        return incarnation in self._lives.get(island_id, {})

    def lives(self) -> Mapping[str, Mapping[int, Life]]:
        """The lives that are not folded, by island and incarnation; every island that ever began has one."""
        return self._lives

    def past(self, island_id: str) -> Past:
        """The lives of an island that are folded."""
        return self._past.get(island_id) or Past()

    def trained(self, island_id: str) -> tuple[int, int]:
        """Returns the inner steps and the tokens that all lives of an island have reported."""
        lives, past = self._lives[island_id].values(), self.past(island_id)
        steps = past.steps + sum(life.last_step - life.start_step for life in lives)
        return steps, past.tokens + sum(life.trained_tokens for life in lives)

    def merged_tokens(self, fragment_id: int) -> int:
        """Returns the tokens that were merged into a fragment, of all islands."""
        past = sum(past.merged_tokens[fragment_id] for past in self._past.values())
        return past + self._counted().merged[fragment_id]

    def account(self, island_id: str, incarnation: int, fragment_id: int) -> Account:
        """The account named; KeyError if the island or the fragment is unknown."""
        return self._lives[island_id][incarnation].accounts[fragment_id]

    def resume_point(self, island_id: str) -> tuple[int, int]:
        """Returns (step, tokens) where the next life starts: the highest hand-over of all fragments."""
        best = self.past(island_id).handed_over
        for life in self._lives.get(island_id, {}).values():
            ends = (account.handed_over for account in life.accounts.values())
            best = max([best, (life.start_step, life.start_tokens), *ends])
        return best

    def participation(self) -> Participation:
        """Returns how many islands took part in versions, over all fragments."""
        return Participation.added(self._participation.values())

    def trained_tokens(self) -> int:
        """Tokens trained by all lives, as last reported."""
        if self._trained_tokens is None:
            self._trained_tokens = sum(self.trained(island_id)[1] for island_id in self._lives)
        return self._trained_tokens

    def counted_tokens(self) -> int:
        """Trained tokens that count towards the end of the run, and for schedules."""
        return self.trained_tokens() - self._doubted_tokens

    def books(self, island_id: str | None = None) -> Books:
        """Returns the balance of one island, or of all."""
        if island_id is not None or not self._weights:
            return self._books([name for name in self._lives if island_id in (name, None)])
        ended = [life for lives in self._lives.values() for life in lives.values() if life.ended]
        tally, tokens = self._counted(), self.trained_tokens()
        return in_all(tally, self._past.values(), ended, tokens, self._weights, self._gaps)

    def _books(self, names: Iterable[str]) -> Books:
        return balance(((self.past(name), self._lives[name].values()) for name in names), self._weights, self._gaps)

    def _counted(self) -> Tally:
        """Returns the sums over all accounts, up to date."""
        if self._tally is None:
            self._tally = Tally(self._kept, self._weights)
            for island_id, lives in self._lives.items():
                for incarnation, life in lives.items():
                    for p in life.accounts:
                        self._written(island_id, incarnation, p)
        self._tally.count()
        return self._tally

    def _kept(self, key: Key) -> Account | None:
        life = self._lives.get(key.island_id, {}).get(key.incarnation)
        return None if life is None else life.accounts[key.fragment_id]

    def check(self) -> None:
        """Raises AssertionError if an account holds more than was trained, or a sum differs from its parts."""
        for island_id, lives in self._lives.items():
            past = self.past(island_id)
            for fragment_id in self._weights:
                spent = past.merged_tokens[fragment_id] + past.wasted_tokens[fragment_id].total()
                assert spent <= past.tokens, f"{island_id} fragment {fragment_id}: {spent} spent of {past.tokens}, once"
            for incarnation, life in lives.items():
                for fragment_id, account in life.accounts.items():
                    spent, trained = account.known_tokens, life.trained_tokens
                    assert spent <= trained, (
                        f"{island_id}.{incarnation} fragment {fragment_id}: {spent} tokens spent of {trained}"
                    )
        trained = sum(self.trained(island_id)[1] for island_id in self._lives)
        assert self.trained_tokens() == trained, f"{self.trained_tokens()} tokens trained, all islands {trained}"
        doubted = sum(past.doubted_tokens for past in self._past.values())
        doubted += sum(life.doubted_tokens for lives in self._lives.values() for life in lives.values())
        assert self._doubted_tokens == doubted, f"{self._doubted_tokens} tokens doubted, of all islands {doubted}"
        assert self.books() == self._books(self._lives), "the sums that were kept are not those of the accounts"

    # --- durability ------------------------------------------------------------------------------------------

    def slice(self, fragment_id: int) -> dict[str, Any]:
        """Returns a fragment's accounts and participation as plain data for its commit, without waiting steps."""
        rows: dict[str, Any] = {}
        folded: dict[str, Any] = {}
        for island_id, past in self._past.items():
            wasted = {str(k): v for k, v in past.wasted_tokens[fragment_id].items()}
            folded[island_id] = [past.row, past.merged_tokens[fragment_id], wasted]
        for island_id, lives in self._lives.items():
            for incarnation, life in lives.items():
                row = {"life": life.row, **life.accounts[fragment_id].record()}
                rows.setdefault(island_id, {})[str(incarnation)] = row
        lost = {"gaps": str(self._gaps)} if self._gaps is not Reason.UNRECORDED else {}
        return {"accounts": rows, "past": folded, "tally": self._participation[fragment_id].record(), **lost}

    def counters(self) -> dict[str, dict[str, list[Any]]]:
        """Returns each island's counters as plain data for the run record: of each life and of folded ones.

        A life may end before any commit has it: what it trained is lost, and must be booked as that.
        """
        for island_id in self._unrecorded:  # of the others nothing has changed
            past, lives = self._past.get(island_id) or Past(), self._lives[island_id]
            self._rows[island_id] = {PAST: past.row} | {str(i): life.row for i, life in sorted(lives.items())}
        self._unrecorded.clear()
        return {island_id: self._rows[island_id] for island_id in self._lives}

    def recall(self, counters: Mapping[str, Mapping[str, list[Any]]]) -> None:
        """Restores :meth:`counters`; the furthest of these and the slices' values count."""
        for island_id, lives in counters.items():
            if lives.get(PAST, [0])[0]:
                self._recall_past(island_id, lives[PAST])
            for incarnation, row in lives.items():
                if incarnation != PAST and int(incarnation) > self.past(island_id).upto:
                    self._recall(island_id, int(incarnation), row)
        for island_id in self._lives:
            self._fold(island_id)

    def _recall_past(self, island_id: str, row: list[int]) -> Past:
        """Takes sums over; lives that are in them are known by what became of their tokens alone."""
        self._trained_tokens = self._tally = None
        self._unrecorded.add(island_id)
        past = self._past.setdefault(island_id, Past())
        lives = self._lives.setdefault(island_id, {})
        upto, steps, tokens, at_step, at_tokens, *doubted = row
        if upto > past.upto:
            past.upto, past.steps, past.tokens, past.handed_over = upto, steps, tokens, (at_step, at_tokens)
            self._doubted_tokens += sum(doubted) - past.doubted_tokens
            past.doubted_tokens = sum(doubted)
            for incarnation in [i for i in lives if i <= upto]:
                self._doubted_tokens -= lives[incarnation].doubted_tokens
                past.take(lives.pop(incarnation))
        return past

    def _fold(self, island_id: str) -> None:
        """Folds the earliest lives of an island, as far as they have ended and nothing of them is on its way."""
        lives = self._lives[island_id]
        for incarnation in sorted(lives)[: -self._lives_kept]:
            life = lives[incarnation]
            if not life.ended or any(account.waiting for account in life.accounts.values()):
                return
            self._unrecorded.add(island_id)
            past = self._past.setdefault(island_id, Past())
            ends = (account.handed_over for account in life.accounts.values())
            past.handed_over = max([past.handed_over, (life.start_step, life.start_tokens), *ends])
            past.upto = incarnation
            past.steps += life.last_step - life.start_step
            past.tokens += life.trained_tokens
            past.doubted_tokens += life.doubted_tokens
            past.take(lives.pop(incarnation))
            for p in life.accounts:
                self._written(island_id, incarnation, p)

    def _recall(self, island_id: str, incarnation: int, row: list[Any]) -> Life:
        self._trained_tokens = self._tally = None
        self._unrecorded.add(island_id)
        start_step, start_tokens, last_step, last_tokens, ended, *doubted = row
        lives = self._lives.setdefault(island_id, {})
        life = lives.get(incarnation)
        if life is None:
            accounts = {p: Account() for p in self._weights}
            life = lives[incarnation] = Life(start_step, start_tokens, last_step, last_tokens, accounts, ended)
        if last_step > life.last_step:
            life.last_step, life.last_tokens = last_step, last_tokens
        life.ended = life.ended or ended
        self.doubt(island_id, incarnation, max(life.doubted_tokens, *doubted, 0))
        return life

    def restore(self, fragment_id: int, kept: Mapping[str, Any]) -> None:
        """Reads one fragment's slice back; the furthest counters seen in any slice hold."""
        if "gaps" in kept:
            self._gaps = Reason(kept["gaps"])
        self._participation[fragment_id] = Participation.restored(kept["tally"])
        for island_id, (row, merged_tokens, wasted) in kept.get("past", {}).items():
            past = self._recall_past(island_id, row)
            past.merged_tokens[fragment_id] += merged_tokens
            past.wasted_tokens[fragment_id] += Counter(wasted)
        for island_id, lives in kept["accounts"].items():
            for incarnation, row in lives.items():
                account = Account.restored(row)
                if int(incarnation) > self.past(island_id).upto:
                    self._recall(island_id, int(incarnation), row["life"]).accounts[fragment_id] = account
                else:  # folded since, as another fragment's slice or the run record says
                    self._past[island_id].take_account(fragment_id, account)
