"""Mutants of "one leader speaks, under the newest epoch", and of everything that speaks against leading."""

from tests.mutants.mutant import Mutant

RELAY, CANDIDATE, LEASE, CORE = "broker/relay.py", "aggregator/candidate.py", "broker/lease.py", "aggregator/core.py"
T_RELAY = "tests/unit/test_broker_relay.py::"
T_CANDIDATE = "tests/unit/test_aggregator_candidate.py::"
T_REPLICATION = "tests/unit/test_aggregator_replication.py::"
T_LEASE = "tests/integration/test_lease.py::"
T_ISLANDS = "tests/unit/test_islands_core.py::"

MUTANTS = (
    Mutant(
        what="a broker lets an earlier leader attach",
        invariant=5,
        file=RELAY,
        old="        if leader is not None and epoch < leader.epoch:",
        new="        if leader is not None and epoch < 0:",
        tests=(
            T_RELAY + "test_lower_epochs_are_fenced",
            T_RELAY + "test_epoch_stays_fenced_after_its_leader_fell_silent",
        ),
    ),
    Mutant(
        what="a broker passes on what an earlier leader says",
        invariant=5,
        file=RELAY,
        old="        if epoch < highest:",
        new="        if epoch < 0:",
        tests=(T_RELAY + "test_lower_epochs_are_fenced",),
    ),
    Mutant(
        what="a broker passes on what an aggregator says that has not attached",
        invariant=5,
        file=RELAY,
        old="        leader = self._who.leader_behind(event.channel, event.peer)\n        highest",
        new="        leader = self._who.leader_behind(event.channel, event.peer) or self._who.leaders.get(0)\n"
        "        highest",
        tests=(T_RELAY + "test_attachment_holds_per_connection",),
    ),
    Mutant(
        what="a broker hears earlier lives of an island",
        invariant=5,
        file=RELAY,
        old="        if peer is not None and incarnation < peer.incarnation:",
        new="        if peer is not None and incarnation < 0:",
        tests=(T_RELAY + "test_a_lower_incarnation_is_fenced_and_told_over_its_own_connection",),
    ),
    Mutant(
        what="a welcome does not fence the earlier life",
        invariant=5,
        file=RELAY,
        old="                if known is not None and incarnation > known.incarnation:\n"
        "                    self._enter(island_id, incarnation, now_s)",
        new="                if known is not None and incarnation < 0:\n"
        "                    self._enter(island_id, incarnation, now_s)",
        tests=(T_RELAY + "test_a_welcome_fences_earlier_incarnations_before_the_new_one_is_heard",),
    ),
    Mutant(
        what="an aggregator hears earlier lives of an island",
        invariant=2,
        file=CORE,
        old="        if envelope.incarnation < member.incarnation:",
        new="        if envelope.incarnation < 0:",
        tests=("tests/unit/test_aggregator_membership.py::test_an_earlier_incarnation_is_not_heard",),
    ),
    Mutant(
        what="an island takes a new life without a new incarnation",
        invariant=5,
        file="aggregator/members.py",
        old="        member.incarnation += 1",
        new="        member.incarnation = max(1, member.incarnation)",
        tests=(
            "tests/unit/test_aggregator_membership.py::"
            "test_a_new_process_gets_the_next_incarnation_and_goes_on_where_the_last_one_arrived",
        ),
    ),
    Mutant(
        what="an aggregator that restarts keeps its epoch",
        invariant=5,
        file="aggregator/run.py",
        old='        self.epoch = max(self.epoch, record["epoch"] + 1)',
        new='        self.epoch = max(self.epoch, record["epoch"])',
        tests=(
            "tests/unit/test_aggregator_restart.py::test_a_restart_goes_on_with_the_next_epoch_and_the_same_versions",
        ),
    ),
    Mutant(
        what="an island believes news that is older than what it knows",
        invariant=5,
        file="islands/core.py",
        old="                if self.joined and news > self._news:",
        new="                if self.joined:",
        tests=(T_ISLANDS + "test_news_that_is_older_than_what_is_known_is_ignored",),
    ),
    Mutant(
        what="a leader whose lease is another's goes on",
        invariant=5,
        file="aggregator/replication.py",
        old="        if not event.granted:\n            self.deposed = True",
        new="        if not event.granted:\n            return\n"
        "        if not event.granted:\n            self.deposed = True",
        tests=(T_REPLICATION + "test_a_refused_renewal_deposes_and_nothing_is_done_any_more",),
    ),
    Mutant(
        what="a standby takes what an earlier leader sends",
        invariant=5,
        file=CANDIDATE,
        old="        if self.place is not Place.FOLLOWING or message.epoch < self.epoch:",
        new="        if self.place is not Place.FOLLOWING:",
        tests=(T_CANDIDATE + "test_nothing_of_an_earlier_leader_is_taken",),
    ),
    Mutant(
        what="a new leader's epoch is above that of the lease alone",
        invariant=5,
        file=CANDIDATE,
        old="            self._wanted_epoch = 1 + max([lease.epoch, self.epoch, *epochs])",
        new="            self._wanted_epoch = 1 + lease.epoch",
        tests=(T_CANDIDATE + "test_its_epoch_is_above_all_that_it_has_heard_of",),
    ),
    # --- the lease: compare-and-set -----------------------------------------------------------------------------------
    Mutant(
        what="the lease goes to one that is not in sync",
        invariant=3,
        file=LEASE,
        old="    member = member or name == ARGV[1]",
        new="    member = true",
        tests=(T_LEASE + "test_only_who_is_in_sync_takes_over_and_only_when_it_has_run_out",),
    ),
    Mutant(
        what="the lease is taken before it has run out",
        invariant=5,
        file=LEASE,
        old="(held[1] == ARGV[1] or age >= tonumber(ARGV[4]) or age < 0)",
        new="(held[1] == ARGV[1] or age >= 0 or age < 0)",
        tests=(T_LEASE + "test_only_who_is_in_sync_takes_over_and_only_when_it_has_run_out",),
    ),
    Mutant(
        what="the lease is taken though it has changed since it was read",
        invariant=5,
        file=LEASE,
        old="elseif held[2] == ARGV[2] then\n  local member",
        new="else\n  local member",
        tests=(T_LEASE + "test_only_who_is_in_sync_takes_over_and_only_when_it_has_run_out",),
    ),
    Mutant(
        what="the lease is made anew by one that expected another's",
        invariant=5,
        file=LEASE,
        old="  granted = ARGV[2] == '0'",
        new="  granted = true",
        tests=(T_LEASE + "test_a_key_that_is_missing_goes_to_the_first_who_expects_none",),
    ),
    Mutant(
        what="the lease is renewed by a leader that was deposed",
        invariant=5,
        file=LEASE,
        old="local granted = ARGV[5] == '1' and (not held[1] or tonumber(held[2]) < tonumber(ARGV[2]))",
        new="local granted = true",
        tests=(
            T_LEASE + "test_a_deposed_leader_hears_who_leads_when_it_renews",
            T_LEASE + "test_two_that_were_given_one_epoch_do_not_both_keep_it",
        ),
    ),
    Mutant(
        what="a renewal that comes late puts a standby back in sync",
        invariant=3,
        file=LEASE,
        old="  granted = tonumber(held[3] or '0') < tonumber(ARGV[4])",
        new="  granted = true",
        tests=(T_LEASE + "test_a_renewal_that_comes_after_its_successor_changes_nothing",),
    ),
    Mutant(
        what="a taker that dies at once locks everybody else out",
        invariant=6,
        file=LEASE,
        old="  if not older and held[3] then",
        new="  if not held[1] then",
        tests=(T_LEASE + "test_a_taker_that_dies_before_its_first_renewal_leaves_the_lease_to_the_others_in_sync",),
    ),
    # --- what speaks against leading, one by one ----------------------------------------------------------------------
    Mutant(
        what="a standby leads while another one's lease holds",
        invariant=5,
        file=CANDIDATE,
        old='        if not void and not own and not lease.expired(self._lease_s):\n            return ""\n',
        new="",
        tests=(T_CANDIDATE + "test_it_leads_under_the_next_epoch_once_the_lease_has_run_out",),
    ),
    Mutant(
        what="a standby leads while it is still writing",
        invariant=3,
        file=CANDIDATE,
        old='        if self._keeping:\n            return ""',
        new='        if self._keeping < 0:\n            return ""',
        tests=(T_CANDIDATE + "test_it_does_not_reach_for_the_lease_while_it_is_writing",),
    ),
    Mutant(
        what="a standby leads where no broker answers",
        invariant=5,
        file=CANDIDATE,
        old='        if not fresh:\n            return "no broker answers"\n',
        new="",
        tests=(T_CANDIDATE + "test_it_does_not_lead_where_no_broker_answers",),
    ),
    Mutant(
        what="a broker that fell silent still has a say",
        invariant=6,
        file=CANDIDATE,
        old="[f for at_s, f in self._brokers.values() if now_s < at_s + BROKER_FRESH_S]",
        new="[f for at_s, f in self._brokers.values()]",
        tests=(T_CANDIDATE + "test_a_broker_that_fell_silent_has_no_say",),
    ),
    Mutant(
        what="a standby leads while a broker hears the leader",
        invariant=5,
        file=CANDIDATE,
        old="        if (void or not own) and heard_s is not None and heard_s < self._lease_s:",
        new="        if heard_s is not None and heard_s < 0:",
        tests=(
            T_CANDIDATE + "test_a_leader_that_a_broker_hears_is_only_cut_off_from_redis",
            T_CANDIDATE + "test_it_is_not_taken_from_a_leader_that_a_broker_hears",
        ),
    ),
    Mutant(
        what="a standby that the lease does not name leads",
        invariant=3,
        file=CANDIDATE,
        old="        if not void and lease.in_sync and self.name not in lease.in_sync:",
        new="        if lease.in_sync and not self.name:",
        tests=(T_CANDIDATE + "test_a_store_that_the_lease_does_not_name_waits_for_one_that_it_does",),
    ),
    Mutant(
        what="a store leads that knows nothing of the last leader",
        invariant=3,
        file=CANDIDATE,
        old="        if not void and not own and self._run[0] < lease.synced:",
        new="        if not void and not own and self._run[0] < 0:",
        tests=(T_CANDIDATE + "test_a_store_that_knows_nothing_of_the_last_leader_does_not_lead",),
    ),
    Mutant(
        what="a store leads whose newest version is damaged",
        invariant=3,
        file=CANDIDATE,
        old="        if self._damaged:\n            which",
        new="        if len(self._damaged) > 1 << 30:\n            which",
        tests=(T_CANDIDATE + "test_a_store_whose_newest_version_is_damaged_does_not_lead_until_it_is_mended",),
    ),
    Mutant(
        what="a store leads that is behind what a broker holds",
        invariant=1,
        file=CANDIDATE,
        old="                if version > have:",
        new="                if version > have >= 0 > version:",
        tests=(
            T_CANDIDATE + "test_a_broker_that_holds_a_newer_version_does",
            T_CANDIDATE + "test_an_empty_store_never_leads_a_run_that_a_broker_knows",
        ),
    ),
    Mutant(
        what="a store leads that has other bytes than a broker under the same name",
        invariant=1,
        file=CANDIDATE,
        old="                if version == have and held.digest != digest:",
        new="                if version == have and not held.digest:",
        tests=(T_CANDIDATE + "test_a_broker_that_holds_other_bytes_under_the_same_version_does",),
    ),
    Mutant(
        what="a lease that Redis lost is taken at once",
        invariant=5,
        file=CANDIDATE,
        old="            wait_s = MISSING_LEASES * self._lease_s if begun else 0.0",
        new="            wait_s = 0.0",
        tests=(T_CANDIDATE + "test_a_lease_that_redis_lost_is_first_left_to_the_leader_that_may_live",),
    ),
    Mutant(
        what="a key older than the store is believed",
        invariant=5,
        file=CANDIDATE,
        old="        return lease.epoch < max(1, self._run[0])",
        new="        return lease.epoch < 1",
        tests=(T_CANDIDATE + "test_a_lease_that_redis_lost_is_first_left_to_the_leader_that_may_live",),
    ),
)
