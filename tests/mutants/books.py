"""Mutants of "merged at most once, and every token has a fate": copies, ranges, lives, data shares, balances."""

from tests.mutants.mutant import Mutant

ADMISSION, LEDGER, SHARES = (
    "aggregator/rounds/admission.py",
    "aggregator/ledger/ledger.py",
    "aggregator/ledger/data_shares.py",
)
LIVES = "aggregator/ledger/lives.py"
T_ADMISSION = "tests/unit/test_aggregator_admission.py::"
T_LEDGER = "tests/unit/test_aggregator_ledger.py::"
T_SHARES = "tests/unit/test_aggregator_share_moves.py::"
T_ISLANDS = "tests/unit/test_islands_core.py::"
T_HANDING = "tests/unit/test_islands_handing_over.py::"
T_MEMBERSHIP = "tests/unit/test_aggregator_membership.py::"

MUTANTS = (
    Mutant(
        what="a copy of a merged contribution is not recognised",
        invariant=2,
        file=ADMISSION,
        old="    if account.merged.covers(steps.from_step, steps.to_step):",
        new="    if not steps:",
        tests=(T_ADMISSION + "test_copies_are_recognised_with_the_fate_and_the_reason_of_the_first",),
    ),
    Mutant(
        what="a copy of a contribution that waits is taken in too",
        invariant=2,
        file=ADMISSION,
        old="    if (steps.from_step, steps.to_step) in account.waiting:",
        new="    if not steps:",
        tests=(T_ADMISSION + "test_copies_are_recognised_with_the_fate_and_the_reason_of_the_first",),
    ),
    Mutant(
        what="steps that were handed over before are taken in again",
        invariant=2,
        file=ADMISSION,
        old="    if account.overlaps(steps):",
        new="    if not steps:",
        tests=(T_ADMISSION + "test_steps_handed_over_before_are_refused_as_overlap_wherever_they_are",),
    ),
    Mutant(
        what="steps that wait to be merged overlap nothing",
        invariant=2,
        file=LIVES,
        old="            or self._waits(steps.from_step, steps.to_step)\n",
        new="",
        tests=(T_LEDGER + "test_the_same_steps_are_never_taken_in_twice",),
    ),
    Mutant(
        what="a gap between merged steps is filled while something waits to be merged there",
        invariant=2,
        file=LIVES,
        old="        self.merged.close_gaps(MOST_INTERVALS, self._waits)",
        new="        self.merged.close_gaps(MOST_INTERVALS, lambda _a, _b: False)",
        tests=(T_LEDGER + "test_a_life_that_drops_steps_at_every_adoption_makes_no_commit_longer",),
    ),
    Mutant(
        what="a gap between refused steps is filled while something waits to be merged there",
        invariant=2,
        file=LIVES,
        old="        self.refused.close_gaps(MOST_INTERVALS, self._waits)",
        new="        self.refused.close_gaps(MOST_INTERVALS, lambda _a, _b: False)",
        tests=(T_LEDGER + "test_a_life_that_drops_steps_at_every_adoption_makes_no_commit_longer",),
    ),
    Mutant(
        what="steps that were refused overlap nothing",
        invariant=2,
        file=LIVES,
        old="            or self.refused.overlaps(steps.from_step, steps.to_step)\n",
        new="",
        tests=(T_ADMISSION + "test_steps_handed_over_before_are_refused_as_overlap_wherever_they_are",),
    ),
    Mutant(
        what="an interval that reaches into another from below does not overlap it",
        invariant=2,
        file="broker/wire/ranges.py",
        old="        return start < end and i < len(self._starts) and self._starts[i] < end",
        new="        return start < end and i < len(self._starts) and self._starts[i] <= start",
        tests=("tests/unit/test_broker_ranges.py::test_an_interval_set_is_a_set_of_integers",),
    ),
    Mutant(
        what="an island hands steps over that it has handed over already",
        invariant=2,
        file="islands/protocol/hand_over.py",
        old="        fragment.handed, fragment.stage = copy, Stage.CAPTURING",
        new="        fragment.stage = Stage.CAPTURING",
        tests=(T_HANDING + "test_ranges_follow_each_other_and_name_the_versions_trained_on",),
    ),
    Mutant(
        what="an island hands over what an adoption has dropped",
        invariant=2,
        file="islands/protocol/fragment.py",
        old="        self.handed, self.counted = at, at.step\n",
        new="        self.counted = at.step\n",
        tests=(T_ISLANDS + "test_overwriting_counts_the_steps_it_drops",),
    ),
    Mutant(
        what="a copy from before an installation is captured",
        invariant=2,
        file="islands/protocol/adoption.py",
        old="            fragment.incoming, fragment.copy, fragment.stage = None, None, Stage.IDLE",
        new="            fragment.incoming, fragment.stage = None, Stage.IDLE",
        tests=(T_HANDING + "test_copies_are_dropped_by_an_installation",),
    ),
    Mutant(
        what="a copy is captured between preparing a version and installing it",
        invariant=2,
        file="islands/protocol/fragment.py",
        old="        if self.stage is not Stage.IDLE or self.copy is None:",
        new="        if self.copy is None:",
        tests=(T_HANDING + "test_no_copy_is_captured_between_preparing_and_installing",),
    ),
    Mutant(
        what="what the codec rounded away is neither handed over nor kept",
        invariant=2,
        file="islands/arrays/reference.py",
        old="                if codec is not Codec.F32:  # in float32 the payload is a view of delta\n"
        "                    decode_into(encoded, delta)\n",
        new="",
        tests=(
            "tests/unit/test_islands_reference.py::"
            "test_what_the_codec_rounds_away_stays_in_the_progress_and_is_handed_over_later",
        ),
    ),
    # --- data shares --------------------------------------------------------------------------------------------------
    Mutant(
        what="what a share's earlier owner trains is taken in",
        invariant=2,
        file=SHARES,
        old="            if tenure is None or (tenure.owner, tenure.share_epoch) != (island_id, d.share_epoch):",
        new="            if tenure is None:",
        tests=(T_SHARES + "test_what_is_trained_under_an_earlier_epoch_is_refused",),
    ),
    Mutant(
        what="a share that changes hands keeps its epoch",
        invariant=2,
        file=SHARES,
        old="        epoch = 0 if known is None else known.share_epoch + 1",
        new="        epoch = 0 if known is None else known.share_epoch",
        tests=(T_SHARES + "test_a_share_goes_to_another_under_the_next_epoch_and_comes_back_under_the_one_after",),
    ),
    Mutant(
        what="batches are merged that were merged before",
        invariant=2,
        file=SHARES,
        old="            known = merged.overlaps(d.from_batch, d.to_batch) or here",
        new="            known = here",
        tests=(T_SHARES + "test_batches_that_were_merged_or_wait_are_not_taken_again",),
    ),
    Mutant(
        what="batches are taken in that wait to be merged",
        invariant=2,
        file=SHARES,
        old="            if known or self._waits(fragment_id, d.share, d.from_batch, d.to_batch):",
        new="            if known:",
        tests=(T_SHARES + "test_batches_that_were_merged_or_wait_are_not_taken_again",),
    ),
    Mutant(
        what="a contribution names the same batches twice",
        invariant=2,
        file=SHARES,
        old="            here.add(d.from_batch, d.to_batch)\n",
        new="",
        tests=(T_SHARES + "test_batches_named_twice_in_one_contribution_are_an_overlap",),
    ),
    Mutant(
        what="a new owner begins at the last one's cursor, and trains again what was merged since",
        invariant=2,
        file=SHARES,
        old="        cursor = max(self.reached(share), self._elsewhere.get(share, 0))",
        new="        cursor = known.cursor if known else 0",
        tests=(T_SHARES + "test_an_heir_begins_behind_everything_that_arrived",),
    ),
    Mutant(
        what="a share is taken from an island that is only a little late",
        invariant=2,
        file=SHARES,
        old="        return bool(self._takeover_s) and away_s >= self._takeover_s",
        new="        return bool(self._takeover_s) and away_s >= 0",
        tests=(T_SHARES + "test_a_share_is_left_to_its_owner_until_it_was_away_for_long",),
    ),
    # --- the balance --------------------------------------------------------------------------------------------------
    Mutant(
        what="counters go back",
        invariant=4,
        file=LEDGER,
        old="        if step > life.last_step:\n"
        "            life.last_step, life.last_tokens = step, max(tokens, life.last_tokens)",
        new="        if step:\n            life.last_step, life.last_tokens = step, tokens",
        tests=(T_LEDGER + "test_counters_never_go_back",),
    ),
    Mutant(
        what="what was dropped is booked with each heartbeat again",
        invariant=4,
        file=LEDGER,
        old="max(count, account.wasted_tokens[Reason.OVERWRITTEN])",
        new="count + account.wasted_tokens[Reason.OVERWRITTEN]",
        tests=("tests/sim/test_simulation.py::test_a_seed_that_found_a_bug_stays_mended",),
    ),
    Mutant(
        what="a merged contribution still waits",
        invariant=4,
        file=LIVES,
        old="        del self.waiting[(steps.from_step, steps.to_step)]\n        self.merged.add",
        new="        self.merged.add",
        tests=("tests/sim/test_simulation.py::test_a_calm_fleet_merges_every_token_of_every_island",),
    ),
    Mutant(
        what="a refused contribution still waits",
        invariant=4,
        file=LIVES,
        old="        self.waiting.pop((steps.from_step, steps.to_step), None)\n",
        new="",
        tests=(
            "tests/unit/test_aggregator_rounds.py::test_what_became_too_old_while_it_was_held_is_refused_when_the_round_closes",
        ),
    ),
    Mutant(
        what="what a dead island never handed over stays in flight for ever",
        invariant=4,
        file="aggregator/ledger/balance.py",
        old="                if life.ended:\n",
        new="                if life.ended and rest < 0:\n",
        tests=(T_LEDGER + "test_steps_never_handed_over_are_lost_with_their_island",),
    ),
    Mutant(
        what="a gap is booked though contributions still wait",
        invariant=4,
        file=LEDGER,
        old="        if gap > 0 and not account.waiting:",
        new="        if gap > 0:",
        tests=(T_LEDGER + "test_a_gap_is_closed_once_and_only_when_nothing_waits",),
    ),
    Mutant(
        what="lives that no commit has are forgotten by a restart",
        invariant=4,
        file="aggregator/state/run.py",
        old='            self.ledger.recall(record.get("lives", {}))\n',
        new="",
        tests=("tests/unit/test_aggregator_restart.py::test_a_life_that_no_commit_has_is_booked_after_a_restart",),
    ),
    Mutant(
        what="an island claims to have dropped more than it trained",
        invariant=4,
        file="aggregator/rounds/membership.py",
        old="            if known + beat.overwritten_tokens[p] > trained:",
        new="            if known > trained:",
        tests=(T_MEMBERSHIP + "test_a_heartbeat_cannot_claim_to_have_dropped_what_it_handed_over",),
    ),
    Mutant(
        what="more tokens are merged than an island trained",
        invariant=4,
        file=ADMISSION,
        old="    if account.known_tokens + steps.tokens > trained:",
        new="    if account.known_tokens > trained:",
        tests=(T_ADMISSION + "test_more_tokens_than_a_heartbeat_reported_for_that_step_are_implausible",),
    ),
    Mutant(
        what="a new life begins where the last one did, and trains again what was merged",
        invariant=2,
        file=LEDGER,
        old="            best = max([best, (life.start_step, life.start_tokens), *ends])",
        new="            best = max([best, (life.start_step, life.start_tokens)])",
        tests=(T_MEMBERSHIP + "test_a_new_process_gets_the_next_incarnation_and_goes_on_where_the_last_one_arrived",),
    ),
    Mutant(
        what="what a life has merged is counted once more when another slice has it folded",
        invariant=4,
        file="aggregator/ledger/ledger.py",
        old="                if int(incarnation) > self.past(island_id).upto:\n                    self._recall(island_id, int(",
        new="                if int(incarnation) > 0:\n                    self._recall(island_id, int(",
        tests=("tests/unit/test_aggregator_ledger.py::test_slices_of_different_times_are_one_balance",),
    ),
    Mutant(
        what="a life is folded while something of it is on its way",
        invariant=4,
        file="aggregator/ledger/ledger.py",
        old="            if not life.ended or any(account.waiting for account in life.accounts.values()):",
        new="            if not life.ended:",
        tests=(
            "tests/unit/test_aggregator_ledger.py::"
            "test_a_life_with_something_on_its_way_is_not_folded_nor_are_those_after_it",
        ),
    ),
)
