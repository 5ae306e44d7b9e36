"""Mutants of what several aggregator shards have to agree on before one of them goes on."""

from tests.mutants.mutant import Mutant

ROSTER, SHARES, PRESENCE = (
    "aggregator/rounds/roster.py",
    "aggregator/ledger/data_shares.py",
    "broker/routing/presence.py",
)
T_ROSTER = "tests/unit/test_aggregator_roster.py::"
T_ENDING = "tests/unit/test_shards_ending.py::"
T_SHARES = "tests/unit/test_aggregator_shares.py::"
T_LEADERS = "tests/unit/test_relay_leaders.py::"

MUTANTS = (
    Mutant(
        what="an island is welcome before every shard has its new life on record",
        invariant=2,
        file=ROSTER,
        old="        agreed = min([run.durable_serial, *self._agreed.values()])",
        new="        agreed = run.durable_serial",
        tests=(
            T_ROSTER + "test_a_join_is_answered_only_when_every_shard_has_the_new_life_on_record",
            T_ROSTER + "test_nobody_is_welcome_while_a_shard_is_away_and_it_is_told_again_when_it_is_back",
            T_ROSTER + "test_nobody_is_told_of_a_share_before_every_shard_has_it_on_record",
        ),
    ),
    Mutant(
        what="what another shard has taken over from an earlier leader of shard 0 counts as agreed",
        invariant=2,
        file=ROSTER,
        old="        if said.roster_epoch == run.epoch:",
        new="        if said.roster_epoch:",
        tests=(T_ROSTER + "test_what_was_agreed_under_an_earlier_epoch_of_shard_0_counts_for_nothing_under_the_next",),
    ),
    Mutant(
        what="a new life begins where shard 0 knows the last one, whatever the others know",
        invariant=2,
        file="aggregator/rounds/membership.py",
        old="max(known, run.begins.get(member.island_id, known))",
        new="known",
        tests=(
            T_ROSTER + "test_a_new_life_begins_at_the_furthest_step_that_any_shard_knows[1]",
            T_ROSTER + "test_a_restarted_shard_0_brings_a_half_done_join_to_its_end",
        ),
    ),
    Mutant(
        what="a share is given to somebody that not every shard has let go",
        invariant=2,
        file=SHARES,
        old="        return self._alone or self._free_at.get(share, math.inf) <= self._agreed_serial",
        new="        return self._alone or share in self._free_at",
        tests=(
            T_SHARES + "test_an_agreement_on_an_earlier_record_gives_no_share_away",
            T_SHARES + "test_after_a_restart_a_share_of_nobody_waits_for_an_agreement_of_the_new_life",
            T_ROSTER + "test_a_share_that_moves_is_nobodys_first_and_then_goes_on_from_the_furthest_batch_of_any_shard",
        ),
    ),
    Mutant(
        what="a share goes on from what shard 0 has of it, whatever other shards have",
        invariant=2,
        file=SHARES,
        old="        cursor = max(self.reached(share), self._elsewhere.get(share, 0))",
        new="        cursor = self.reached(share)",
        tests=(
            T_SHARES + "test_an_island_that_joins_again_gives_up_all_that_it_has_and_gets_its_home_when_all_know",
            T_ROSTER + "test_an_island_that_is_back_gets_its_share_from_where_the_heir_had_come",
        ),
    ),
    Mutant(
        what="version 0 is published before it is on record that every shard has its part",
        invariant=3,
        file="aggregator/rounds/seeding.py",
        old="            if run.durable_serial < self._begin_serial:",
        new="            if run.durable_serial < 0:",
        tests=(
            T_ROSTER
            + "test_version_0_is_published_only_when_every_shard_has_its_part_and_shard_0_has_written_that_down",
        ),
    ),
    Mutant(
        what="shard 0 begins without the other shards' parts of version 0",
        invariant=3,
        file=ROSTER,
        old="        return all(each is not None and each.seeding_id == self._run.seeding_id for each in said)",
        new="        return all(each is not None for each in said)",
        tests=(
            T_ROSTER
            + "test_version_0_is_published_only_when_every_shard_has_its_part_and_shard_0_has_written_that_down",
            T_ROSTER + "test_a_seeder_that_joins_anew_is_asked_for_all_of_it_again",
        ),
    ),
    Mutant(
        what="a shard forgets its part of version 0 when a successor of shard 0 names another attempt",
        invariant=1,
        file=ROSTER,
        old="        another = roster.phase is Phase.SEEDING and roster.seeding_id != run.seeding_id",
        new="        another = roster.seeding_id != run.seeding_id",
        tests=(T_ROSTER + "test_a_begun_run_is_believed_whichever_attempt_its_roster_names",),
    ),
    Mutant(
        what="a shard takes an older roster over",
        invariant=5,
        file=ROSTER,
        old="or at < run.roster_at or",
        new="or at < (0, 0) or",
        tests=(T_ROSTER + "test_an_older_roster_changes_nothing_and_neither_does_the_same_again",),
    ),
    Mutant(
        what="shard 0 ends before the others have done their flush",
        invariant=4,
        file="aggregator/rounds/ending.py",
        old="over = run.now_s >= self._others_until_s(self._flush_began_s)",
        new="over = True",
        tests=(T_ENDING + "test_phases_follow_shard_0_and_it_ends_when_every_shard_has_done_its_flush",),
    ),
    Mutant(
        what="a broker lets one shard speak for another",
        invariant=5,
        file=PRESENCE,
        old="        if shard not in (None, leader.shard):",
        new="        if shard is None and leader.shard < 0:",
        tests=(T_LEADERS + "test_a_shard_that_speaks_for_another_is_refused",),
    ),
    Mutant(
        what="a broker measures what a shard says by the epoch of shard 0",
        invariant=5,
        file=PRESENCE,
        old="        of = leader or self._who.leaders.get(shard or 0)",
        new="        of = leader or self._who.leaders.get(0)",
        tests=(T_LEADERS + "test_a_shard_that_has_not_attached_yet_is_not_measured_by_the_epoch_of_another",),
    ),
)
