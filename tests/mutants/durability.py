"""Mutants of "persist before publish", here and at every standby, and of "a name stands for one byte string"."""

from tests.mutants.mutant import Mutant

COMMITS, MEMBERSHIP, REPLICATION = "aggregator/commits.py", "aggregator/membership.py", "aggregator/replication.py"
CANDIDATE = "aggregator/candidate.py"
T_ROUNDS = "tests/unit/test_aggregator_rounds.py::"
T_MEMBERSHIP = "tests/unit/test_aggregator_membership.py::"
T_REPLICATION = "tests/unit/test_aggregator_replication.py::"
T_ADOPTION = "tests/unit/test_aggregator_adoption.py::"
T_RECOVERY = "tests/unit/test_aggregator_recovery.py::"
T_CANDIDATE = "tests/unit/test_aggregator_candidate.py::"

MUTANTS = (
    Mutant(
        what="a version is published when its commit is asked for, not when that is durable",
        invariant=3,
        file=COMMITS,
        old="            else {},\n        )\n        run.emit(Persist(commit=fragment.commit))",
        new="            else {},\n        )\n        run.emit(Persist(commit=fragment.commit))\n"
        "        self.persisted(Persisted(fragment_id=p, fragment_version=event.fragment_version))",
        tests=(T_ROUNDS + "test_nothing_is_published_before_it_is_durable",),
    ),
    Mutant(
        what="a write that failed counts as durable",
        invariant=3,
        file="aggregator/core.py",
        old="                self._commits.persist_failed(event)",
        new="                self._commits.persisted(\n"
        "                    Persisted(fragment_id=event.fragment_id, fragment_version=event.fragment_version)\n"
        "                )",
        tests=(T_ROUNDS + "test_a_commit_that_failed_is_asked_for_again_and_published_once_it_is_durable",),
    ),
    Mutant(
        what="a report about another version counts as that of the commit under way",
        invariant=3,
        file=COMMITS,
        old="        if commit is None or commit.fragment_version != event.fragment_version:\n            return False",
        new="        if commit is None:\n            return False",
        tests=(T_ROUNDS + "test_while_a_commit_is_under_way_another_version_that_is_durable_publishes_nothing",),
    ),
    Mutant(
        what="an island is told that it is in a version before that is durable",
        invariant=3,
        file="aggregator/intake.py",
        old="        fate = Fate.WAITING if run.in_commit(member, contribution) else admission.fate",
        new="        fate = admission.fate",
        tests=(T_ROUNDS + "test_a_contribution_in_a_version_that_is_not_durable_is_still_waiting",),
    ),
    Mutant(
        what="an island is welcome before its incarnation is durable",
        invariant=3,
        file=MEMBERSHIP,
        old="        self._welcomes.append((run.save(), member.island_id))",
        new="        run.save()\n        self._welcome(member)",
        tests=(T_MEMBERSHIP + "test_an_island_is_welcome_only_once_its_incarnation_is_durable",),
    ),
    Mutant(
        what="things are said under an epoch that is not durable",
        invariant=3,
        file="aggregator/core.py",
        old="        return self.run.durable_serial > 0",
        new="        return True",
        tests=(T_MEMBERSHIP + "test_nothing_is_said_before_the_epoch_is_durable",),
    ),
    Mutant(
        what="a share is told to its new owner before the move is durable",
        invariant=3,
        file="aggregator/shares.py",
        old="        others = (self._share(n, t) for n, t in sorted(self._durable.items())",
        new="        others = (self._share(n, t) for n, t in sorted(self._tenures.items())",
        tests=("tests/unit/test_aggregator_share_moves.py::test_a_move_is_told_once_it_is_durable",),
    ),
    # --- at the standbys ----------------------------------------------------------------------------------------------
    Mutant(
        what="a version is published that a standby in sync lacks",
        invariant=3,
        file=REPLICATION,
        old="        return all((s := self._standbys.get(name)) and s.follows and s.stored.get(p) == key "
        "for name in self.required)",
        new="        return True",
        tests=(T_REPLICATION + "test_every_standby_in_sync_is_waited_for",),
    ),
    Mutant(
        what="a version is published that only standbys have",
        invariant=3,
        file=REPLICATION,
        old="            if waiting.local_at_s is not None and self._everywhere(p, _key(waiting.commit)):",
        new="            if self._everywhere(p, _key(waiting.commit)):",
        tests=(T_REPLICATION + "test_without_standbys_what_is_durable_here_is_durable",),
    ),
    Mutant(
        what="a standby that an unanswered request may have struck out is not waited for",
        invariant=3,
        file=REPLICATION,
        old="        return self.in_sync | self._unsure | (self._asked or frozenset())",
        new="        return self._asked if self._asked is not None else self.in_sync",
        tests=(T_REPLICATION + "test_a_standby_that_may_have_been_named_is_waited_for",),
    ),
    Mutant(
        what="a standby that the lease may name from now on is not waited for yet",
        invariant=3,
        file=REPLICATION,
        old="        return self.in_sync | self._unsure | (self._asked or frozenset())",
        new="        return self.in_sync | self._unsure",
        tests=(T_REPLICATION + "test_a_commit_waits_for_a_standby_that_the_lease_may_name_from_now_on",),
    ),
    Mutant(
        what="a standby whose naming was not answered is not waited for",
        invariant=3,
        file=REPLICATION,
        old="                self._unsure |= self._asked or frozenset()",
        new="                self._unsure = frozenset()",
        tests=(T_REPLICATION + "test_a_standby_that_may_have_been_named_is_waited_for",),
    ),
    Mutant(
        what="a standby is named in sync though it lacks what was published",
        invariant=3,
        file=REPLICATION,
        old="            and all(s.stored.get(p) in (key, _key(self._newest[p])) "
        "for p, key in self._published.items())",
        new="            and all(p in s.stored for p in self._published)",
        tests=(T_REPLICATION + "test_one_that_lacks_what_was_just_published_is_not_named",),
    ),
    Mutant(
        what="a standby is named in sync though it lacks the run record",
        invariant=3,
        file=REPLICATION,
        old="            and s.run_serial >= max(1, self._delivered_serial)\n",
        new="",
        tests=(T_REPLICATION + "test_a_standby_that_lacks_something_is_not_named",),
    ),
    Mutant(
        what="a standby lags as soon as a version is durable at the leader",
        invariant=3,
        file=REPLICATION,
        old="                if waiting.local_at_s is None or now_s < waiting.local_at_s + self._lag_s:",
        new="                if waiting.local_at_s is None:",
        tests=(T_REPLICATION + "test_a_lagging_standby_is_waited_for_until_the_lease_names_it_no_more",),
    ),
    Mutant(
        what="a leader speaks before its lease was renewed once",
        invariant=3,
        file=REPLICATION,
        old="        if not self._confirmed:\n            return\n",
        new="",
        tests=(T_REPLICATION + "test_nothing_is_said_before_the_lease_was_renewed_once",),
    ),
    Mutant(
        what="run records are durable as soon as the leader has them",
        invariant=3,
        file=REPLICATION,
        old="        durable = min([self._serial, *serials])",
        new="        durable = self._serial",
        tests=(T_REPLICATION + "test_a_run_record_waits_for_the_standbys_too",),
    ),
    Mutant(
        what="a standby acknowledges what it could not write",
        invariant=3,
        file=CANDIDATE,
        old='            self._note("replica.not_durable", detail=event.problem)\n            return',
        new='            self._note("replica.not_durable", detail=event.problem)',
        tests=(T_CANDIDATE + "test_what_could_not_be_written_is_not_said",),
    ),
    Mutant(
        what="a standby goes on storing, and so acknowledging, while it takes the lease",
        invariant=3,
        file=CANDIDATE,
        old="        if self.place is not Place.FOLLOWING or message.epoch < self.epoch:\n            return",
        new="        if message.epoch < self.epoch:\n            return",
        tests=(T_CANDIDATE + "test_while_it_reaches_for_the_lease_it_stores_nothing",),
    ),
    # --- one name, one byte string ------------------------------------------------------------------------------------
    Mutant(
        what="a broker puts an older version on its shelf",
        invariant=1,
        file="broker/queues.py",
        old="            if (version.epoch, version.fragment_version) <= "
        "(held.version.epoch, held.version.fragment_version):\n"
        "                return False\n",
        new="",
        tests=("tests/unit/test_relay_queues.py::test_an_older_or_repeated_version_is_not_kept",),
    ),
    Mutant(
        what="an island takes a late copy of a version older than its own",
        invariant=1,
        file="islands/adoption.py",
        old="        if version.fragment_version < fragment.version:\n            return False",
        new="        if version.fragment_version < 0:\n            return False",
        tests=(
            "tests/unit/test_islands_handing_over.py::test_while_a_version_is_wanted_once_more_older_ones_are_not_taken",
        ),
    ),
    Mutant(
        what="an aggregator whose store is behind a broker goes on",
        invariant=1,
        file="aggregator/recovery.py",
        old='        return _sentence(f"broker {broker}", ahead, own)',
        new='        return ""',
        tests=(T_RECOVERY + "test_a_broker_is_believed",),
    ),
    Mutant(
        what="an aggregator whose store is behind most islands goes on",
        invariant=1,
        file="aggregator/recovery.py",
        old="        if 2 * len(counted) <= len(live):",
        new="        if counted:",
        tests=(T_RECOVERY + "test_an_empty_store_never_restarts_a_run_that_an_island_knows",),
    ),
    Mutant(
        what="one island that lies stops a run",
        invariant=6,
        file="aggregator/recovery.py",
        old="        if 2 * len(counted) <= len(live):",
        new="        if not counted:",
        tests=(T_RECOVERY + "test_one_island_of_several_cannot_stop_a_run_by_a_lie",),
    ),
    Mutant(
        what="one lie, told while the others were cut off, stops a run for good",
        invariant=6,
        file="aggregator/behind.py",
        old="        if not self._surely and self._peers.outvoted(self._live()):",
        new="        if not self._surely and self._peers.outvoted(frozenset()):",
        tests=(T_RECOVERY + "test_a_store_goes_on_when_those_come_back_who_know_better",),
    ),
    Mutant(
        what="islands that know no better talk a broker down",
        invariant=1,
        file="aggregator/behind.py",
        old="        self._surely = self._surely or surely",
        new="        self._surely = False",
        tests=(T_RECOVERY + "test_a_store_stays_behind_by_the_word_of_a_broker_whatever_islands_say",),
    ),
    Mutant(
        what="those who knew of newer versions are forgotten when they die, and the store goes on without them",
        invariant=1,
        file="aggregator/recovery.py",
        old="        if not self._believed:",
        new="        if not self._believed or counted:",
        tests=(T_RECOVERY + "test_those_who_made_a_store_behind_and_died_are_witnesses_still",),
    ),
    Mutant(
        what="what was written while a store was taken for behind is lost",
        invariant=6,
        file="aggregator/behind.py",
        old="                self._missed.append(event)",
        new="                pass",
        tests=(T_RECOVERY + "test_what_was_completed_while_a_store_was_taken_for_behind_is_not_lost",),
    ),
    Mutant(
        what="an island that joined a run before it began makes its store behind by a lie",
        invariant=6,
        file="aggregator/behind.py",
        old="                if member is not None and self._membership.holds_nothing(member):",
        new="                if member is None and run.fragments:",
        tests=(T_RECOVERY + "test_an_island_that_joins_before_the_run_begins_holds_nothing_of_it",),
    ),
    Mutant(
        what="an emptied store that knows its islands does not listen to them",
        invariant=1,
        file="aggregator/membership.py",
        old="        first_hand = run.never_began or not member.presumed",
        new="        first_hand = True",
        tests=(T_RECOVERY + "test_an_island_of_an_earlier_life_may_know_of_a_run_whose_store_was_emptied",),
    ),
    Mutant(
        what="a new lineage takes numbers that somebody has seen",
        invariant=1,
        file="aggregator/recovery.py",
        old="        fragment_version=above + 1,",
        new="        fragment_version=above,",
        tests=(T_RECOVERY + "test_what_a_lineage_gave_up_is_remembered_through_restarts",),
    ),
    Mutant(
        what="a store that follows keeps versions above those of its leader",
        invariant=1,
        file="aggregator/store.py",
        old="        newer = [each for each in versions(self._directory, p) if each > version]",
        new="        newer: list[int] = []",
        tests=(T_ADOPTION + "test_versions_above_an_adopted_one_give_way_to_it",),
    ),
    Mutant(
        what="a version is in the store under its name before its bytes are on the disk",
        invariant=3,
        file="aggregator/replacing.py",
        old="                write(fd)\n                os.fsync(fd)",
        new="                write(fd)",
        tests=(T_ADOPTION + "test_a_version_is_flushed_before_it_gets_its_name_and_its_name_after_that",),
    ),
    Mutant(
        what="a version that was written is not durable under its name",
        invariant=3,
        file="aggregator/replacing.py",
        old='    with mapped(f"cannot flush {path.parent}", definite=False):\n        flush_directory(path.parent)\n\n',
        new="\n",
        tests=(T_ADOPTION + "test_a_version_is_flushed_before_it_gets_its_name_and_its_name_after_that",),
    ),
)
