"""Mutants of the learning rule and of progress: quorum, grace, weights, waiting, donors; and of determinism."""

from tests.mutants.mutant import Mutant

QUORUM, ROUND, ROUNDS, STALENESS = (
    "aggregator/rules/quorum.py",
    "aggregator/state/round.py",
    "aggregator/rounds/rounds.py",
    "aggregator/rules/staleness.py",
)
INTAKE, COMMITS = "aggregator/rounds/intake.py", "aggregator/rounds/commits.py"
DONATION, RECEIVER, CHOICE = (
    "aggregator/rounds/donation.py",
    "islands/protocol/donation.py",
    "islands/protocol/broker_choice.py",
)
PACING, T_PACING = "aggregator/rules/pacing.py", "tests/unit/test_aggregator_pacing.py::"
T_QUORUM = "tests/unit/test_aggregator_quorum.py::"
T_ROUNDS = "tests/unit/test_aggregator_rounds.py::"
T_STALENESS = "tests/unit/test_aggregator_staleness.py::"
T_DONATION = "tests/unit/test_aggregator_donation.py::"
T_RECEIVER = "tests/unit/test_islands_donation.py::"
T_CHOICE = "tests/unit/test_islands_brokers.py::"

MUTANTS = (
    Mutant(
        what="the quorum does not shrink to the live islands",
        invariant=6,
        file=QUORUM,
        old="    return max(1, min(quorum, live))",
        new="    return quorum",
        tests=(T_QUORUM + "test_the_quorum_shrinks_to_the_live_islands_and_never_below_one",),
    ),
    Mutant(
        what="a round closes below its quorum",
        invariant=6,
        file=QUORUM,
        old="    if len(view.fresh) < quorum or view.quorum_met_at_s is None:",
        new="    if view.quorum_met_at_s is None:",
        tests=(T_QUORUM + "test_a_quorum_that_shrank_and_grew_again_is_waited_for_again",),
    ),
    Mutant(
        what="a round closes without its grace window",
        invariant=6,
        file=QUORUM,
        old="    ends_at_s = max(view.quorum_met_at_s + waits.grace_s, view.opened_at_s + waits.arrivals_s, waits.settled_at_s)",
        new="    ends_at_s = max(view.quorum_met_at_s, waits.settled_at_s)",
        tests=(
            T_QUORUM + "test_a_round_waits_in_its_grace_window_and_says_until_when",
            T_ROUNDS + "test_a_round_closes_at_quorum_and_grace_without_the_last",
        ),
    ),
    Mutant(
        what="a round leaves out islands that are on their way back after an outage of the broker",
        invariant=6,
        file=ROUNDS,
        old="                self._settle(HEARTBEATS_TO_SETTLE)",
        new="                pass",
        tests=(T_ROUNDS + "test_after_an_outage_of_the_only_broker_rounds_wait_for_those_who_are_not_back_yet",),
    ),
    Mutant(
        what="the first round after a takeover leaves out islands whose broker was away too",
        invariant=6,
        file=ROUNDS,
        old="            self._settle(HEARTBEATS_TO_RETURN)",
        new="            pass",
        tests=(T_ROUNDS + "test_the_first_round_after_a_takeover_waits_for_islands_whose_broker_was_away_too",),
    ),
    Mutant(
        what="each outage of the broker brings those back who were silent before it",
        invariant=6,
        file=ROUNDS,
        old="            if member.last_seen_s >= heard_from_s and (",
        new="            if (",
        tests=(T_ROUNDS + "test_an_outage_of_the_only_broker_brings_nobody_back_who_was_silent_before_it",),
    ),
    Mutant(
        what="islands that fall silent as a round opens begin no new interval",
        invariant=6,
        file=PACING,
        old="        for island_id in self._clock.heard_lately(now_s):",
        new="        for island_id in self._clock.advancing(now_s):",
        tests=(T_PACING + "test_a_broker_that_was_frozen_as_a_round_opened_brings_the_next_one_no_sooner",),
    ),
    Mutant(
        what="what islands have run of an interval is remembered beyond its end",
        invariant=6,
        file=PACING,
        old="        self._known.pop(fragment_id, None)\n",
        new="",
        tests=(T_PACING + "test_what_is_kept_of_a_moment_changes_no_answer",),
    ),
    Mutant(
        what="a round never times out",
        invariant=6,
        file=QUORUM,
        old="    if now_s >= timeout_at_s:",
        new="    if now_s >= timeout_at_s + 1e9:",
        tests=(
            T_QUORUM + "test_a_round_closes_at_the_timeout_with_what_is_there_and_names_who_is_missing",
            T_ROUNDS + "test_a_round_below_its_quorum_closes_at_the_timeout_with_what_is_there",
        ),
    ),
    Mutant(
        what="a flush closes at its quorum",
        invariant=4,
        file=QUORUM,
        old="    if view.flush:\n",
        new="    if view.flush and not view.fresh:\n",
        tests=(T_QUORUM + "test_a_flush_waits_beyond_quorum_and_grace",),
    ),
    Mutant(
        what="a held contribution counts towards the quorum",
        invariant=6,
        file=ROUND,
        old="        return frozenset(c.island_id for c in self.contributions if self.is_fresh(c))",
        new="        return frozenset(c.island_id for c in self.contributions)",
        tests=(T_QUORUM + "test_held_contributions_never_meet_a_quorum",),
    ),
    Mutant(
        what="an island that answered with an old contribution owes nothing",
        invariant=6,
        file=ROUND,
        old="        if fresh:\n            self.answered",
        new="        if contribution:\n            self.answered",
        tests=(T_QUORUM + "test_an_answer_to_an_earlier_round_is_not_fresh_and_its_island_still_owes_one",),
    ),
    Mutant(
        what="rounds wait for islands that missed two",
        invariant=6,
        file="aggregator/state/members.py",
        old="for m in self.live(now_s) if m.missed_rounds < MISSES_BEFORE_UNRESPONSIVE)",
        new="for m in self.live(now_s))",
        tests=(
            T_ROUNDS + "test_two_missed_rounds_and_an_island_is_not_waited_for_until_it_contributes_again",
            "tests/unit/test_aggregator_members.py::test_rounds_wait_for_islands_that_missed_fewer_than_two",
        ),
    ),
    Mutant(
        what="rounds wait for quarantined islands",
        invariant=6,
        file=ROUNDS,
        old="        responsive = self._run.members.responsive(self._run.now_s) - "
        "self._run.quarantine.out(self._run.now_s)\n"
        "        if",
        new="        responsive = self._run.members.responsive(self._run.now_s)\n        if",
        tests=(
            "tests/unit/test_aggregator_rogues.py::"
            "test_no_round_waits_for_a_quarantined_island_and_it_does_not_count_for_the_quorum",
        ),
    ),
    Mutant(
        what="a round waits for the answer of an island whose contribution was refused",
        invariant=6,
        file=INTAKE,
        old="            if round_ is not None and (refused or admission.reason is Reason.QUEUE_FULL):",
        new="            if round_ is not None and admission.reason is Reason.QUEUE_FULL:",
        tests=("tests/unit/test_aggregator_admission.py::test_a_refused_island_does_not_hold_up_the_round",),
    ),
    Mutant(
        what="what arrived between two rounds is dropped",
        invariant=2,
        file=INTAKE,
        old="            fragment.held.append(admitted)",
        new="            fragment.held = []",
        tests=(T_ROUNDS + "test_contributions_that_come_while_a_version_is_made_wait_for_the_next",),
    ),
    Mutant(
        what="a commit that failed is not asked for again",
        invariant=6,
        file=COMMITS,
        old="        fragment.persist_again_at_s = run.now_s + PERSIST_RETRY_S\n",
        new="",
        tests=(T_ROUNDS + "test_a_commit_that_failed_is_asked_for_again_and_published_once_it_is_durable",),
    ),
    Mutant(
        what="what became too old while it was held is merged",
        invariant=2,
        file=INTAKE,
        old="            if stale:\n                self.refuse_waiting",
        new="            if stale and not c:\n                self.refuse_waiting",
        tests=(T_ROUNDS + "test_what_became_too_old_while_it_was_held_is_refused_when_the_round_closes",),
    ),
    # --- weights ------------------------------------------------------------------------------------------------------
    Mutant(
        what="staleness shrinks the share only, not the step",
        invariant=6,
        file=STALENESS,
        old="    total = math.fsum(token_weights)\n",
        new="    total = math.fsum(\n"
        "        w * staleness_weight(t.staleness, exponent) for w, t in zip(token_weights, contributions)\n"
        "    )\n",
        tests=(T_STALENESS + "test_one_stale_contribution_alone_moves_less_than_one_fresh_one_alone",),
    ),
    Mutant(
        what="one of three islands outweighs all others together",
        invariant=6,
        file=STALENESS,
        old="    if sums[heaviest] <= others:",
        new="    if sums[heaviest] >= 0:",
        tests=(
            T_STALENESS + "test_of_three_islands_none_has_more_than_half",
            T_ROUNDS + "test_of_three_islands_none_has_more_than_half",
        ),
    ),
    Mutant(
        what="tokens per step far beyond the fleet's are weighed",
        invariant=6,
        file=STALENESS,
        old="    weighed = [min(trained.tokens, trained.steps * most_tokens_per_step) for trained in contributions]",
        new="    weighed = [trained.tokens for trained in contributions]",
        tests=(T_STALENESS + "test_tokens_per_step_far_beyond_the_fleets_are_not_weighed",),
    ),
    Mutant(
        what="the staleness of a range is that of its oldest step",
        invariant=6,
        file=STALENESS,
        old="    return sum(part.steps * (current_version - part.fragment_version) for part in trained_on) / steps",
        new="    return steps / steps * max(current_version - part.fragment_version for part in trained_on)",
        tests=(T_STALENESS + "test_a_range_that_straddles_an_adoption_is_a_little_stale_not_a_whole_version",),
    ),
    # --- donors -------------------------------------------------------------------------------------------------------
    Mutant(
        what="an untrained island is a donor",
        invariant=6,
        file=DONATION,
        old="            and trained_steps >= run.config.sync_interval\n",
        new="            and trained_steps >= 0\n",
        tests=(
            T_DONATION + "test_an_untrained_island_is_never_a_donor",
            T_DONATION + "test_steps_of_an_earlier_life_do_not_count",
        ),
    ),
    Mutant(
        what="an island gives the state of an optimizer that is fresh itself",
        invariant=6,
        file="islands/protocol/state.py",
        old="        return since is None or self.at.step - since >= self.settings.sync_interval_steps",
        new="        return since is None or self.at.step >= since",
        tests=(
            "tests/unit/test_islands_and_aggregator.py::test_an_island_whose_optimizer_was_fresh_gives_it_after_a_sync_interval",
        ),
    ),
    Mutant(
        what="a silent island is a donor",
        invariant=6,
        file=DONATION,
        old="            and run.members.state(m, run.now_s) is Liveness.ALIVE\n",
        new="",
        tests=(T_DONATION + "test_a_silent_a_leaving_and_a_stopped_island_are_no_donors",),
    ),
    Mutant(
        what="a donor that failed is named again",
        invariant=7,
        file=DONATION,
        old="        open_to_it = [m for name, m in able.items() if name not in ask.tried]",
        new="        open_to_it = [m for name, m in able.items()]",
        tests=(T_DONATION + "test_of_several_the_one_heard_last_is_named_and_the_tried_ones_are_not",),
    ),
    Mutant(
        what="a donor gives to any number of islands at a time",
        invariant=9,
        file=DONATION,
        old="        free = [m for m in open_to_it if busy.count(m.island_id) < MOST_RECEIVERS]",
        new="        free = [m for m in open_to_it if busy.count(m.island_id) >= 0]",
        tests=(T_DONATION + "test_a_donor_gives_to_few_at_a_time_and_the_others_are_not_answered_until_it_is_free",),
    ),
    # --- waiting ------------------------------------------------------------------------------------------------------
    Mutant(
        what="an island waits for a donor for ever",
        invariant=7,
        file=RECEIVER,
        old="        if self.stage in (Stage.ASKING, Stage.FETCHING) and now_s >= self._ends_at_s:",
        new="        if self.stage in (Stage.ASKING, Stage.FETCHING) and now_s < 0:",
        tests=(T_RECEIVER + "test_patience_ends_whatever_is_under_way",),
    ),
    Mutant(
        what="an island waits for a silent donor",
        invariant=7,
        file=RECEIVER,
        old="        elif self.stage is Stage.FETCHING and now_s >= self._silent_at_s:",
        new="        elif self.stage is Stage.FETCHING and now_s < 0:",
        tests=(T_RECEIVER + "test_a_donor_that_dies_half_way_is_replaced_by_another",),
    ),
    Mutant(
        what="parts of two copies of a state are put together",
        invariant=7,
        file=RECEIVER,
        old="        if self._state_id and known != (part.state_id, part.num_parts, part.state_bytes):",
        new="        if self._state_id and not known:",
        tests=(T_RECEIVER + "test_parts_of_two_copies_are_never_mixed",),
    ),
    Mutant(
        what="an island waits for a broker that is silent",
        invariant=7,
        file=CHOICE,
        old="            moments.append((self._asked_at_s + self.patience_s, MoveReason.SILENT))",
        new="            moments.append((self._asked_at_s + 1e9, MoveReason.SILENT))",
        tests=(T_CHOICE + "test_a_silent_broker_is_left_after_the_stated_time",),
    ),
    Mutant(
        what="an island waits for a broker whose connection is lost",
        invariant=7,
        file=CHOICE,
        old="            return self._down_since_s + LOST_S * self._growth(), MoveReason.LOST",
        new="            return self._down_since_s + 1e9, MoveReason.LOST",
        tests=(T_CHOICE + "test_a_lost_connection_is_given_up_soon",),
    ),
    Mutant(
        what="a contribution that never arrived is not sent again",
        invariant=6,
        file="islands/protocol/hand_over.py",
        old="what an aggregator held in memory went with it\n                if pending.backoff.due(now_s, carried):",
        new="what an aggregator held in memory went with it\n                if pending.backoff.due(now_s - 1e9, carried):",
        tests=(
            "tests/unit/test_islands_handing_over.py::test_a_contribution_that_never_arrived_is_sent_again_with_growing_pauses",
            "tests/unit/test_islands_and_aggregator.py::test_a_lost_contribution_is_sent_again_and_merged",
        ),
    ),
    Mutant(
        what="what this machine still holds is sent again",
        invariant=6,
        file="broker/routing/resending.py",
        old="            if carried.waiting and carried.up <= self.leaves_by_bytes:",
        new="            if False:",
        tests=(
            "tests/unit/test_broker_resending.py::test_a_pause_begins_when_the_last_attempt_has_left_this_machine",
            "tests/unit/test_aggregator_ways.py::test_what_this_machine_still_holds_of_a_version_is_not_sent_again",
        ),
    ),
    Mutant(
        what="an island says nothing over a bulk connection that stands in for another one",
        invariant=6,
        file="islands/protocol/core.py",
        old="            if self._bulk not in (None, carried.connection):",
        new="            if False:",
        tests=(
            "tests/unit/test_islands_handing_over.py::"
            "test_over_another_bulk_connection_it_says_what_it_wants_and_sends_again_what_is_unknown",
        ),
    ),
    Mutant(
        what="a fragment waits for ever on a link slower than versions appear",
        invariant=6,
        file="broker/routing/queues.py",
        old="key=lambda held: (served.get(held.version.fragment_id, 0), held.number), default=None)",
        new="key=lambda held: -held.number, default=None)",
        tests=("tests/unit/test_relay_queues.py::test_no_fragment_is_starved_on_a_link_slower_than_versions_appear",),
    ),
    # --- determinism --------------------------------------------------------------------------------------------------
    Mutant(
        what="contributions are folded in the order in which they came",
        invariant=10,
        file=ROUND,
        old="        return sorted(self.contributions, key=lambda c: (c.island_id, c.incarnation, c.steps.from_step))",
        new="        return list(self.contributions)",
        tests=(T_QUORUM + "test_contributions_are_merged_in_the_order_of_islands_and_steps",),
    ),
    Mutant(
        what="a driver that asks for deadlines changes when the quorum was met",
        invariant=10,
        file=ROUNDS,
        old="            looked = round_.peek(run.now_s,",
        new="            looked = round_.look(run.now_s,",
        tests=(T_ROUNDS + "test_asking_for_deadlines_does_not_meet_a_quorum",),
    ),
    Mutant(
        what="a driver that asks for deadlines changes the pace that is remembered",
        invariant=10,
        file="aggregator/state/run.py",
        old="        return self.clock.median_step_time_s(self.now_s) or self._median_step_s",
        new="        self._median_step_s = self.clock.median_step_time_s(self.now_s) or self._median_step_s\n"
        "        return self._median_step_s",
        tests=(
            "tests/unit/test_replay.py::test_a_driver_may_ask_for_deadlines_at_any_time_without_changing_a_decision",
        ),
    ),
    Mutant(
        what="a replay does not compare what was decided",
        invariant=10,
        file="ops/inspect/replay_core.py",
        old="        if line != replayed:",
        new='        if line.get("note") != replayed["note"]:',
        tests=("tests/unit/test_replay.py::test_a_decision_that_was_tampered_with_is_named",),
    ),
    Mutant(
        what="a replay says nothing of the versions behind a gap",
        invariant=10,
        file="ops/inspect/replay_core.py",
        old="            self._unchecked(p, version, PartReason.GAP)\n",
        new="",
        tests=(
            "tests/unit/test_replay_coverage.py"
            "::test_versions_behind_a_gap_of_the_tape_are_counted_whichever_life_it_is_in",
        ),
    ),
    Mutant(
        what="a replay lets versions be durable that nobody ordered",
        invariant=10,
        file="ops/inspect/replay_core.py",
        old="                if commit is None or commit.fragment_version != version:\n",
        new="                if commit is None:\n",
        tests=("tests/unit/test_replay.py::test_a_version_that_was_not_ordered_cannot_be_durable",),
    ),
)
