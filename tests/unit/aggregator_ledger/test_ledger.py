"""The books against a model that follows every token by itself."""

import json
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.ledger.balance import Books
from aggregator.ledger.ledger import LIVES_KEPT, Ledger
from aggregator.ledger.lives import MOST_INTERVALS, REASONS_REMEMBERED
from aggregator.ledger.rolling_back import rolled_back
from broker.wire.messages import Reason
from broker.wire.ranges import StepRange
from tests.aggregator_hand import steps
from tests.profiles import examples

WEIGHTS = {0: 3, 1: 5}
ISLANDS = ("a", "b")


def ledger(*island_ids):
    made = Ledger(WEIGHTS)
    for island_id in island_ids:
        made.begin(island_id, 1, 0, 0)
    return made


def merge(made, island_id, incarnation, p, of):
    made.wait(island_id, incarnation, p, of)
    made.merge(island_id, incarnation, p, of)


def read_back(value):
    """What is left of something when it was written to a file."""
    return json.loads(json.dumps(value))


def slices(made):
    return {p: made.slice(p) for p in WEIGHTS}


def restored(slices, counters=None, **kept):
    made = Ledger(WEIGHTS, **kept)
    for p, row in slices.items():
        made.restore(p, read_back(row))
    if counters is not None:
        made.recall(read_back(counters))
    made.check()
    assert made.books().balanced()
    return made


class LedgerAgainstTokens(RuleBasedStateMachine):
    """Each (island, incarnation, fragment, token) has one fate in the model; the ledger must count the same."""

    lives_kept = 1000

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(WEIGHTS, lives_kept=self.lives_kept)
        self.fates = {}  # (island, incarnation, fragment) -> {token: fate or None}
        self.at = {}  # island -> (step, token)
        self.handed = {}  # (island, fragment) -> (step, token) of the present life
        self.incarnation = Counter()
        self.snapshots = []  # slices, and the tokens that were merged in them

    @initialize()
    def join_all(self):
        for island_id in ISLANDS:
            self.incarnation[island_id] = 1
            self.ledger.begin(island_id, 1, 0, 0)
            self.at[island_id] = 0, 0
            for p in WEIGHTS:
                self.handed[island_id, p] = 0, 0
                self.fates[island_id, 1, p] = {}

    def account(self, island_id, p):
        return self.ledger.account(island_id, self.incarnation[island_id], p)

    @rule(island_id=st.sampled_from(ISLANDS), count=st.integers(1, 5), tokens=st.integers(0, 7))
    def train(self, island_id, count, tokens):
        step, token = self.at[island_id]
        self.at[island_id] = step + count, token + tokens
        for p in WEIGHTS:
            fates = self.fates[island_id, self.incarnation[island_id], p]
            fates.update(dict.fromkeys(range(token, token + tokens)))
        self.ledger.report(island_id, self.incarnation[island_id], *self.at[island_id])

    @rule(
        island_id=st.sampled_from(ISLANDS), p=st.sampled_from(sorted(WEIGHTS)), fate=st.sampled_from(["wait", "stale"])
    )
    def hand_over(self, island_id, p, fate):
        (start, first), (end, last) = self.handed[island_id, p], self.at[island_id]
        if end == start:
            return
        self.handed[island_id, p] = end, last
        of = StepRange(from_step=start, to_step=end, from_tokens=first, to_tokens=last)
        if fate == "wait":
            self.ledger.wait(island_id, self.incarnation[island_id], p, of)
        else:
            self.ledger.refuse(island_id, self.incarnation[island_id], p, of, Reason.STALE)
            self.settle(island_id, self.incarnation[island_id], p, of, "stale")

    @rule(data=st.data(), merges=st.booleans())
    def decide(self, data, merges):
        if waiting := self.waiting():
            island_id, incarnation, p, of = data.draw(st.sampled_from(waiting))
            if merges:
                self.ledger.merge(island_id, incarnation, p, of)
            else:
                self.ledger.refuse(island_id, incarnation, p, of, Reason.RUN_ENDED)
            self.settle(island_id, incarnation, p, of, "merged" if merges else "run_ended")

    @rule(island_id=st.sampled_from(ISLANDS), p=st.sampled_from(sorted(WEIGHTS)))
    def overwrite(self, island_id, p):
        (_, first), (end, last) = self.handed[island_id, p], self.at[island_id]
        self.handed[island_id, p] = end, last
        fates = self.fates[island_id, self.incarnation[island_id], p]
        fates.update(dict.fromkeys(range(first, last), "overwritten"))
        dropped = sum(fate == "overwritten" for fate in fates.values())
        counts = [dropped if q == p else 0 for q in sorted(WEIGHTS)]
        self.ledger.overwritten(island_id, self.incarnation[island_id], counts)

    @rule(island_id=st.sampled_from(ISLANDS))
    def crash_and_join_again(self, island_id):
        start = self.ledger.resume_point(island_id)
        # The highest hand-over that arrived for good, over all fragments and lives.
        assert start <= self.at[island_id]
        self.incarnation[island_id] += 1
        self.ledger.begin(island_id, self.incarnation[island_id], *start)
        self.at[island_id] = start
        for p in WEIGHTS:
            self.handed[island_id, p] = start
            self.fates[island_id, self.incarnation[island_id], p] = {}

    @precondition(lambda self: not self.waiting())
    @rule()
    def write_and_read_back(self):
        before, self.ledger = self.ledger, restored(slices(self.ledger), lives_kept=self.lives_kept)
        assert self.ledger.books() == before.books()
        assert [self.ledger.trained(i) for i in ISLANDS] == [before.trained(i) for i in ISLANDS]
        assert [self.ledger.merged_tokens(p) for p in WEIGHTS] == [before.merged_tokens(p) for p in WEIGHTS]
        assert slices(self.ledger) == slices(before)
        assert [self.ledger.resume_point(i) for i in ISLANDS] == [before.resume_point(i) for i in ISLANDS]

    @rule()
    def save_a_snapshot(self):
        kept = {p: read_back(row) for p, row in slices(self.ledger).items()}
        self.snapshots.append((kept, self.of("merged")))

    @precondition(lambda self: self.snapshots and not self.waiting())
    @rule(data=st.data())
    def roll_back(self, data):
        kept, merged = data.draw(st.sampled_from(self.snapshots))
        once = {p: rolled_back(kept[p], read_back(row)) for p, row in slices(self.ledger).items()}
        assert {p: rolled_back(kept[p], once[p]) for p in WEIGHTS} == once, "asked for again after a crash"
        trained, ends = self.ledger.trained_tokens(), [self.ledger.resume_point(i) for i in ISLANDS]
        self.ledger = restored(once, lives_kept=self.lives_kept)
        assert self.ledger.trained_tokens() == trained
        assert [self.ledger.resume_point(i) for i in ISLANDS] == ends, "no step is trained again"
        for *key, token in self.of("merged") | self.of("rolled_back"):
            self.fates[tuple(key)][token] = "merged" if (*key, token) in merged else "rolled_back"

    def of(self, fate):
        return {(*key, token) for key, fates in self.fates.items() for token, known in fates.items() if known == fate}

    def waiting(self):
        return [
            (island_id, incarnation, p, of)
            for island_id, lives in self.ledger.lives().items()
            for incarnation, life in lives.items()
            for p, account in life.accounts.items()
            for of in account.waiting.values()
        ]

    def settle(self, island_id, incarnation, p, of, fate):
        self.fates[island_id, incarnation, p].update(dict.fromkeys(range(of.from_tokens, of.to_tokens), fate))

    @invariant()
    def every_token_is_counted_once(self):
        self.ledger.check()
        books = self.ledger.books()
        assert books.balanced()
        counted = Counter()
        for (island_id, incarnation, p), fates in self.fates.items():
            for fate in fates.values():
                lost = fate is None and incarnation < self.incarnation[island_id]
                counted[fate or ("lost" if lost else "in_flight")] += WEIGHTS[p]
        # The model calls these lost; they arrived, and are in flight until they are merged or refused.
        waiting_of_the_dead = sum(
            of.tokens * WEIGHTS[p]
            for island_id, incarnation, p, of in self.waiting()
            if self.ledger.life(island_id, incarnation).ended
        )
        assert books.merged == counted["merged"]
        for reason in ("stale", "run_ended", "rolled_back", "overwritten"):
            assert books.wasted.get(reason, 0) == counted[reason], reason
        assert books.wasted.get("island_lost", 0) == counted["lost"] - waiting_of_the_dead
        assert books.in_flight == counted["in_flight"] + waiting_of_the_dead
        assert books.trained == sum(counted.values())


class FoldedLedgerAgainstTokens(LedgerAgainstTokens):
    """The same, with every life folded as soon as it may be."""

    lives_kept = 1


TestFoldedLedgerAgainstTokens = FoldedLedgerAgainstTokens.TestCase
TestLedgerAgainstTokens = LedgerAgainstTokens.TestCase
TestFoldedLedgerAgainstTokens.settings = examples(60, stateful_step_count=30)
TestLedgerAgainstTokens.settings = examples(60, stateful_step_count=30)


def test_books_of_a_fragment_that_never_moves_stay_empty_when_a_run_is_rolled_back():
    assert rolled_back({}, {}) == {}


def test_counters_never_go_back():
    made = ledger("a")
    made.report("a", 1, 10, 100)
    made.report("a", 1, 4, 900)
    assert made.trained_tokens() == 100


def test_the_same_steps_are_never_taken_in_twice():
    made = ledger("a")
    made.wait("a", 1, 0, steps(0, 4))
    with pytest.raises(AssertionError, match="arrived before"):
        made.wait("a", 1, 0, steps(2, 6))


def test_steps_never_handed_over_are_lost_with_their_island():
    made = ledger("a")
    made.report("a", 1, 10, 100)
    merge(made, "a", 1, 0, steps(0, 4))
    made.begin("a", 2, *made.resume_point("a"))
    books = made.books()
    assert made.life("a", 2).start_step == 4
    assert books.merged == 40 * 3
    assert books.wasted == {"island_lost": 100 * 8 - 40 * 3}
    assert books.in_flight == 0
    assert made.books("a") == books, "one island's are added up anew"


def test_more_spent_than_trained_is_noticed():
    made = ledger("a")
    made.overwritten("a", 1, [5, 0])
    with pytest.raises(AssertionError, match=r"a\.1 fragment 0: 5 tokens spent of 0"):
        made.check()


def test_a_gap_is_closed_once_and_only_when_nothing_waits():
    made = ledger("a")
    made.report("a", 1, 10, 100)
    made.wait("a", 1, 0, steps(4, 8))
    made.close_gap("a", 1, 0)
    assert made.books().wasted == {}
    made.merge("a", 1, 0, steps(4, 8))
    made.close_gap("a", 1, 0)
    made.close_gap("a", 1, 0)
    assert made.books().wasted == {"unrecorded": 60 * 3}


def test_what_a_lineage_gave_up_is_lost_with_the_store_also_of_an_island_that_dies_before_the_flush():
    made = ledger("a")
    merge(made, "a", 1, 0, steps(0, 4))
    # Versions that had steps 4 to 8 are given up.
    again = restored({p: made.slice(p) | {"gaps": "store_lost"} for p in WEIGHTS})
    merge(again, "a", 1, 0, steps(8, 10))
    again.report("a", 1, 12, 120)
    assert again.books().tokens()["wasted"] == {}  # it lives: more of it may be on its way
    later = restored(slices(again))
    later.report("a", 1, 12, 120)
    for each in (again, later):
        each.end("a")
        books = each.books()
        assert books.balanced()
        assert books.wasted["store_lost"] == 40 * WEIGHTS[0]
        assert books.wasted["island_lost"] == 20 * WEIGHTS[0] + 120 * (sum(WEIGHTS.values()) - WEIGHTS[0])


def test_a_refusal_is_remembered_with_its_reason_for_a_while():
    made = ledger("a")
    made.refuse("a", 1, 0, steps(0, 4), Reason.NOT_FINITE)
    account = made.account("a", 1, 0)
    assert account.why_refused(0, 4) is Reason.NOT_FINITE
    for i in range(REASONS_REMEMBERED):
        made.refuse("a", 1, 0, steps(4 + i, 5 + i), Reason.STALE)
    assert account.why_refused(0, 4) is Reason.OVERLAP
    assert len(account.why) == REASONS_REMEMBERED


def test_a_life_that_drops_steps_at_every_adoption_makes_no_commit_longer():
    """As with keep = 0; what still waits in a gap is merged all the same."""
    made = ledger("a")
    for i in range(4 * MOST_INTERVALS):
        merge(made, "a", 1, 0, steps(4 * i, 4 * i + 1))
        made.refuse("a", 1, 0, steps(4 * i + 2, 4 * i + 3), Reason.STALE)
        if i == 0:
            made.wait("a", 1, 0, steps(3, 4))
    account = made.account("a", 1, 0)
    assert len(list(account.merged)) == len(list(account.refused)) == MOST_INTERVALS
    assert not account.merged.overlaps(3, 4)
    assert not account.refused.overlaps(3, 4)
    made.merge("a", 1, 0, steps(3, 4))
    each = steps(3, 4).tokens
    assert account.merged_tokens == (4 * MOST_INTERVALS + 1) * each
    assert account.wasted_tokens[Reason.STALE] == 4 * MOST_INTERVALS * each


@pytest.mark.parametrize("merged", range(9))
def test_whole_tokens_still_add_up(merged):
    books = Books(
        trained=8, merged=merged, wasted={"stale": (8 - merged) // 2}, in_flight=8 - merged - (8 - merged) // 2, scale=8
    )
    assert books.balanced()
    tokens = books.tokens()
    assert tokens["trained"] == tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"] == 1


def live_and_die(made, incarnation):
    """A life of ten steps, of which fragment 0 merges four, and fragment 1 six."""
    made.begin("a", incarnation, *made.resume_point("a"))
    at = made.life("a", incarnation).start_step
    made.report("a", incarnation, at + 10, 10 * (at + 10))
    merge(made, "a", incarnation, 0, steps(at, at + 4))
    merge(made, "a", incarnation, 1, steps(at, at + 6))


def test_an_island_that_comes_and_goes_for_weeks_makes_no_book_longer():
    made, sizes = Ledger(WEIGHTS), []
    for incarnation in range(1, 200):
        live_and_die(made, incarnation)
        sizes.append(len(str(slices(made))) + len(str(made.counters())))
    assert sizes[-1] < 1.3 * sizes[20]
    assert len(made.lives()["a"]) == LIVES_KEPT
    assert made.trained("a") == (1990, 19900)
    assert (made.merged_tokens(0), made.merged_tokens(1)) == (199 * 40, 199 * 60)
    assert made.books().wasted == {"island_lost": 198 * (60 * 3 + 40 * 5)}
    assert restored(slices(made), made.counters()).books() == made.books()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("recalled", ["old", "new"])
def test_slices_of_different_times_are_one_balance(first, recalled):
    made = Ledger(WEIGHTS, lives_kept=2)
    for incarnation in range(1, 6):
        live_and_die(made, incarnation)
    old_slice, old_counters = read_back([made.slice(0), made.counters()])
    for incarnation in range(6, 12):
        live_and_die(made, incarnation)
    mixed = {p: old_slice if p == 0 else made.slice(1) for p in (first, 1 - first)}
    back = restored(mixed, made.counters() if recalled == "new" else old_counters, lives_kept=2)
    assert back.trained("a") == made.trained("a")
    assert back.merged_tokens(1) == made.merged_tokens(1)
    assert back.merged_tokens(0) == 5 * 40  # the rest of fragment 0 is lost with the commits that were not written


@pytest.mark.parametrize("before", [{}, {"interval": 41}])
def test_a_fragment_that_goes_back_has_the_interval_that_its_momentum_is_of(before):
    books = {"accounts": {}, "past": {}, "tally": {"rounds": 1}}
    assert rolled_back(books | before, books | {"interval": 96}) == books | before
