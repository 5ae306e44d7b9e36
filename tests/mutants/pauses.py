"""Mutants of pauses: one life in two processes, whose progress is merged once, and told when it is over."""

from tests.mutants.mutant import Mutant

MEMBERS, MEMBERSHIP = "aggregator/state/members.py", "aggregator/rounds/membership.py"
T_AGGREGATOR = "tests/unit/test_aggregator_pauses.py::"
T_ISLANDS = "tests/unit/test_islands_pausing.py::"

MUTANTS = (
    Mutant(
        what="a second copy of a machine goes on with the life of a process that is heard",
        invariant=2,
        file=MEMBERS,
        old="        return member if gone else None",
        new="        return member",
        tests=(T_AGGREGATOR + "test_of_two_copies_of_one_machine_the_second_does_not_speak_for_the_first",),
    ),
    Mutant(
        what="what a paused island has kept is booked as lost",
        invariant=4,
        file=MEMBERSHIP,
        old="        if not member.paused:\n            run.ledger.end(member.island_id)",
        new="        run.ledger.end(member.island_id)",
        tests=(T_AGGREGATOR + "test_nobody_waits_for_an_island_that_has_paused_and_nothing_of_it_is_lost",),
    ),
    Mutant(
        what="the data of a paused island go to others at once",
        invariant=2,
        file=MEMBERSHIP,
        old="away_s=math.inf if m.left and not m.paused else",
        new="away_s=math.inf if m.left else",
        tests=(T_AGGREGATOR + "test_the_data_of_a_paused_island_wait_for_it_as_for_one_that_is_silent",),
    ),
    Mutant(
        what="a process goes on with what was kept in a life that is not its own",
        invariant=2,
        file="islands/protocol/paused.py",
        old="        return same and len",
        new="        return len",
        tests=(T_ISLANDS + "test_a_process_that_is_given_another_life_drops_what_was_kept_and_says_so",),
    ),
    Mutant(
        what="steps that no contribution holds are forgotten with the process that ran them",
        invariant=4,
        file="islands/protocol/hand_over.py",
        old="            overwritten_tokens=tuple(f.overwritten_tokens + lost.get(p, 0) for p, f in fragments.items()),",
        new="            overwritten_tokens=tuple(f.overwritten_tokens for f in self.fragments.values()),",
        tests=(
            T_ISLANDS
            + "test_steps_that_are_in_no_contribution_when_the_process_ends_are_given_up_by_the_life_that_ran_them",
        ),
    ),
    Mutant(
        what="data that the process before has trained are trained again",
        invariant=2,
        file="islands/protocol/fleet.py",
        old="max(share.cursor, at))",
        new="share.cursor)",
        tests=(T_ISLANDS + "test_its_data_go_on_where_the_last_process_stopped_although_the_aggregator_knows_less",),
    ),
    Mutant(
        what="an island that stops before the end keeps what it has to itself",
        invariant=2,
        file="islands/protocol/core.py",
        old="                elif training.stopped and not self.done:",
        new="                elif not training:",
        tests=(T_ISLANDS + "test_an_island_that_stops_before_the_end_hands_over_unasked_what_it_has",),
    ),
    Mutant(
        what="the aggregator of an ended run goes before a broker could hear of the end",
        invariant=8,
        file="aggregator/rounds/ending.py",
        old="        if (lacking or shards or not self.reached) and",
        new="        if (lacking or shards) and",
        tests=(T_AGGREGATOR + "test_a_process_that_begins_with_an_ended_run_stays_until_a_broker_can_tell_it",),
    ),
)
