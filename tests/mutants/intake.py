"""Mutants of "nothing bad gets in, every refusal is told, memory is bounded": admission, outliers, keys, pools."""

from tests.mutants.mutant import Mutant

ADMISSION, MEMBERSHIP, ROUNDS = "aggregator/admission.py", "aggregator/membership.py", "aggregator/rounds.py"
OUTLIERS, QUARANTINE, RELAY = "aggregator/outliers.py", "aggregator/quarantine.py", "broker/relay.py"
QUEUES, CODEC, BINDINGS, GATE = "broker/queues.py", "broker/codec.py", "broker/bindings.py", "broker/gate.py"
T_ADMISSION = "tests/unit/test_aggregator_admission.py::"
T_MEMBERSHIP = "tests/unit/test_aggregator_membership.py::"
T_ROUNDS = "tests/unit/test_aggregator_rounds.py::"
T_OUTLIERS = "tests/unit/test_aggregator_outliers.py::"
T_QUARANTINE = "tests/unit/test_aggregator_quarantine.py::"
T_ROGUES = "tests/unit/test_aggregator_rogues.py::"
T_RELAY = "tests/unit/test_broker_relay.py::"
T_CODEC = "tests/unit/test_broker_codec.py::"
T_KEYS = "tests/unit/test_keys.py::"

MUTANTS = (
    # --- admission ----------------------------------------------------------------------------------------------------
    Mutant(
        what="a contribution with a flaw, such as values that are not finite, is merged",
        invariant=9,
        file=ADMISSION,
        old="    if flaw is not None:\n",
        new="    if flaw is not None and flaw.reason in RETRY_REASONS:\n",
        tests=(
            T_ADMISSION + "test_a_flawed_payload_is_refused_for_good",
            "tests/sim/test_rogues.py::"
            "test_a_rogue_is_refused_by_reason_and_quarantined_and_the_others_lose_nothing",
        ),
    ),
    Mutant(
        what="a contribution trained on a version of the future is merged",
        invariant=9,
        file=ADMISSION,
        old="    if newest > current_version:",
        new="    if newest < 0:",
        tests=(T_ADMISSION + "test_a_future_version_is_refused",),
    ),
    Mutant(
        what="the newest step decides whether a contribution is stale",
        invariant=9,
        file=ADMISSION,
        old="    oldest = min(t.fragment_version for t in trained_on)",
        new="    oldest = max(t.fragment_version for t in trained_on)",
        tests=(T_ADMISSION + "test_the_oldest_step_decides_whether_a_contribution_is_stale",),
    ),
    Mutant(
        what="steps are believed that nobody can have run by now",
        invariant=9,
        file=ADMISSION,
        old="    if steps.to_step > most_steps:",
        new="    if steps.to_step < 0:",
        tests=(T_ADMISSION + "test_steps_that_cannot_have_been_run_by_now_are_implausible",),
    ),
    Mutant(
        what="more tokens are believed than so many steps can have",
        invariant=9,
        file=ADMISSION,
        old="    if steps.tokens > steps.steps * tokens_per_step:",
        new="    if steps.tokens < 0:",
        tests=(T_ADMISSION + "test_counters_that_do_not_fit_each_other_are_implausible",),
    ),
    Mutant(
        what="a heartbeat's counters are believed whatever they are",
        invariant=9,
        file=MEMBERSHIP,
        old="        lie = self._impossible(member, beat.inner_step, beat.tokens) or self._overdrawn(member, beat)",
        new="        lie = self._overdrawn(member, beat)",
        tests=(T_MEMBERSHIP + "test_counters_that_cannot_be_true_are_refused_and_not_booked",),
    ),
    Mutant(
        what="the pool of contributions that wait has no bound",
        invariant=9,
        file=ADMISSION,
        old="    if payload_bytes > free_bytes:",
        new="    if payload_bytes < 0:",
        tests=(
            T_ADMISSION + "test_a_full_pool_asks_for_the_same_bytes_again",
            T_ROUNDS + "test_held_bytes_are_limited_and_freed_by_merging",
        ),
    ),
    Mutant(
        what="any number of islands may join",
        invariant=9,
        file=MEMBERSHIP,
        old="        if len(run.members) >= MOST_MEMBERS and run.members.get(join.island_id) is None:",
        new="        if len(run.members) < 0:",
        tests=(T_MEMBERSHIP + "test_a_run_takes_no_more_islands_than_it_can_remember",),
    ),
    # --- refusals are told --------------------------------------------------------------------------------------------
    Mutant(
        what="an island is not told that its contribution was refused on arrival",
        invariant=8,
        file=ROUNDS,
        old="        member.resolutions.append(resolution)\n        self._membership.tell(member)",
        new="        self._membership.tell(member)",
        tests=(T_ADMISSION + "test_a_refusal_reaches_its_sender_the_log_and_the_counters",),
    ),
    Mutant(
        what="an island is not told that its contribution was refused as its round closed",
        invariant=8,
        file=ROUNDS,
        old="            member.resolutions.append(resolution)\n        run.note",
        new="        run.note",
        tests=(
            T_ROGUES + "test_an_outlier_is_refused_when_its_round_closes_and_the_round_goes_on_without_it",
        ),
    ),
    Mutant(
        what="the reason of a refusal is forgotten at once",
        invariant=8,
        file="aggregator/ledger.py",
        old="        if len(account.why) > REASONS_REMEMBERED:",
        new="        if account.why:",
        tests=(T_ADMISSION + "test_a_refusal_whose_news_was_lost_is_told_again_with_its_own_reason",),
    ),
    Mutant(
        what="reasons of refusals are kept without end",
        invariant=9,
        file="aggregator/ledger.py",
        old="        if len(account.why) > REASONS_REMEMBERED:",
        new="        if not account.why:",
        tests=("tests/unit/test_aggregator_ledger.py::test_a_refusal_is_remembered_with_its_reason_for_a_while",),
    ),
    Mutant(
        what="a message that cannot be believed is dropped without a word",
        invariant=8,
        file=MEMBERSHIP,
        old="        self._run.emit(Send(to=envelope.sender, message=refused, by=event.broker))\n",
        new="",
        tests=(
            T_MEMBERSHIP + "test_a_stranger_is_told_to_join",
            T_ADMISSION + "test_an_unknown_fragment_is_refused_by_message",
        ),
    ),
    Mutant(
        what="what waited at the broker for an aggregator that fell silent is dropped without a word",
        invariant=8,
        file=RELAY,
        old="                self._refuse_message(Channel.CONTROL, route, item.envelope, refusal)",
        new="                pass",
        tests=(T_RELAY + "test_what_waits_for_a_leader_that_falls_silent_comes_back",),
    ),
    Mutant(
        what="what comes after the end of a run has no known fate",
        invariant=8,
        file=MEMBERSHIP,
        old="        if fate is Fate.UNKNOWN and run.phase is Phase.ENDED:",
        new="        if fate is Fate.UNKNOWN and run.phase is Phase.SEEDING:",
        tests=("tests/unit/test_aggregator_ending.py",),
    ),
    Mutant(
        what="a broker refuses without a word",
        invariant=8,
        file=RELAY,
        old="        self._reply(channel, peer, to or claimed or (name if name != UNKNOWN else NOBODY), refused)\n",
        new="",
        tests=(T_RELAY + "test_undecodable_input_is_refused_to_its_connection_and_counted",),
    ),
    # --- outliers and quarantine --------------------------------------------------------------------------------------
    Mutant(
        what="what is far too long is merged",
        invariant=9,
        file=OUTLIERS,
        old="        findings = tuple(_refused(s, limit) for s, limit in zip(samples, limits, strict=True))",
        new="        findings = tuple(_refused(s, math.inf) for s in samples)",
        tests=(
            T_OUTLIERS + "test_a_contribution_thirty_times_as_long_as_usual_is_refused_with_the_figures",
            T_ROGUES + "test_an_outlier_is_refused_when_its_round_closes_and_the_round_goes_on_without_it",
        ),
    ),
    Mutant(
        what="half of the fleet is the fleet",
        invariant=9,
        file=OUTLIERS,
        old="        if too_long and 2 * len(votes) > len(voters):",
        new="        if too_long and 2 * len(votes) >= len(voters):",
        tests=(T_OUTLIERS + "test_half_of_the_fleet_is_not_most_of_it",),
    ),
    Mutant(
        what="who is alone in a round speaks for the fleet",
        invariant=9,
        file=OUTLIERS,
        old="        voters = set(fleet) | {sample.island_id for sample in samples}",
        new="        voters = {sample.island_id for sample in samples}",
        tests=(T_OUTLIERS + "test_one_island_in_a_round_of_its_own_does_not_speak_for_those_who_are_away",),
    ),
    Mutant(
        what="what is refused teaches the statistics",
        invariant=9,
        file=OUTLIERS,
        old="        self._learn([s for s, finding in zip(samples, findings, strict=True) if not finding.refused])",
        new="        self._learn(samples)",
        tests=(T_OUTLIERS + "test_a_refused_contribution_teaches_nothing",),
    ),
    Mutant(
        what="in the first round everybody is compared with itself",
        invariant=9,
        file=OUTLIERS,
        old='            apart = "" if many else sample.island_id',
        new='            apart = ""',
        tests=(T_OUTLIERS + "test_a_thousandfold_is_refused_in_the_very_first_round_by_comparison_with_the_others",),
    ),
    Mutant(
        what="nobody is ever quarantined",
        invariant=9,
        file=QUARANTINE,
        old="        if offender.strikes < STRIKES and not offender.times:",
        new="        if offender.strikes < 1 << 30:",
        tests=(
            T_QUARANTINE + "test_the_third_offence_is_one_too_many",
            T_ROGUES + "test_a_repeated_offender_is_quarantined_told_so_and_seen_in_the_totals",
        ),
    ),
    Mutant(
        what="what may befall a sound island is an offence",
        invariant=6,
        file=QUARANTINE,
        old="        if reason not in OFFENCES or not self._first_s or self.holds(island_id, now_s):",
        new="        if not self._first_s or self.holds(island_id, now_s):",
        tests=(T_QUARANTINE + "test_what_may_befall_a_sound_island_is_no_offence",),
    ),
    Mutant(
        what="a quarantine never ends",
        invariant=6,
        file=QUARANTINE,
        old="        return offender is not None and now_s < offender.until_s",
        new="        return offender is not None and offender.until_s > 0",
        tests=(T_ROGUES + "test_after_its_time_an_island_is_merged_again_and_released",),
    ),
    Mutant(
        what="a restart of the aggregator frees everybody",
        invariant=9,
        file="aggregator/run.py",
        old='        self.quarantine.restore(record.get("quarantine", {}), self.now_s)\n',
        new="",
        tests=(T_ROGUES + "test_a_restart_of_the_aggregator_frees_nobody_and_forgets_no_norm",),
    ),
    Mutant(
        what="a quarantined island's contributions are merged",
        invariant=9,
        file=ADMISSION,
        old="    if quarantined:\n",
        new="    if not quarantined and not steps:\n",
        tests=(T_ROGUES + "test_a_repeated_offender_is_quarantined_told_so_and_seen_in_the_totals",),
    ),
    # --- the broker's pools -------------------------------------------------------------------------------------------
    Mutant(
        what="one island fills the broker's queue",
        invariant=9,
        file=QUEUES,
        old="        if own and own + item.size_bytes > self._per_sender_bytes:",
        new="        if own < 0:",
        tests=(T_RELAY + "test_one_island_cannot_fill_the_queue_for_the_others",),
    ),
    Mutant(
        what="the broker's queue has no bound",
        invariant=9,
        file=QUEUES,
        old="        if self.queued_bytes and self.queued_bytes + item.size_bytes > self._total_bytes:",
        new="        if self.queued_bytes < 0:",
        tests=(
            T_RELAY + "test_one_island_cannot_fill_the_queue_for_the_others",
        ),
    ),
    Mutant(
        what="copies pile up in the broker's queue",
        invariant=9,
        file=RELAY,
        old="        if self._queue.holds(item):",
        new="        if not item:",
        tests=(T_RELAY + "test_a_copy_of_what_waits_already_takes_no_room",),
    ),
    Mutant(
        what="a broker knows any number of peers",
        invariant=9,
        file="broker/directory.py",
        old="        return len(self.peers) >= self._max_peers",
        new="        return len(self.peers) < 0",
        tests=(T_RELAY + "test_whatever_comes_limits_hold_and_nobody_is_sent_what_it_did_not_ask_for",),
    ),
    Mutant(
        what="a broker's shelf counts versions that it holds no more",
        invariant=9,
        file=QUEUES,
        old="            self.held_bytes -= held.size_bytes\n",
        new="",
        tests=(T_RELAY + "test_whatever_comes_limits_hold_and_nobody_is_sent_what_it_did_not_ask_for",),
    ),
    Mutant(
        what="a version is sent without credit",
        invariant=9,
        file=RELAY,
        old="        peer.credit = False\n",
        new="",
        tests=(T_RELAY + "test_a_want_is_answered_with_one_version",),
    ),
    Mutant(
        what="silent peers are remembered for ever",
        invariant=9,
        file="broker/directory.py",
        old="        for peer in silent:\n            self.forget(peer)\n",
        new="",
        tests=(T_RELAY + "test_silent_peer_is_forgotten_and_known_again_when_it_speaks",),
    ),
    # --- the wire -----------------------------------------------------------------------------------------------------
    Mutant(
        what="a message above its limit is read",
        invariant=9,
        file=CODEC,
        old="    if sum(sizes) > limits.max_message_bytes:",
        new="    if sum(sizes) < 0:",
        tests=(T_CODEC + "test_a_message_above_its_limit_is_refused_unread",),
    ),
    Mutant(
        what="a damaged buffer is not noticed",
        invariant=9,
        file=CODEC,
        old="        if found != encoded.checksum:",
        new="        if found < 0:",
        tests=(T_CODEC + "test_verify_finds_a_damaged_buffer_and_decode_does_not_look",),
    ),
    Mutant(
        what="another version of the protocol is read",
        invariant=9,
        file=CODEC,
        old='    if type(header.get("v")) is not int or header["v"] != PROTOCOL_VERSION:',
        new='    if type(header.get("v")) is not int:',
        tests=(T_CODEC + "test_another_protocol_version_is_refused_before_anything_else_is_looked_at",),
    ),
    # --- keys ---------------------------------------------------------------------------------------------------------
    Mutant(
        what="a key speaks for any island",
        invariant=9,
        file=BINDINGS,
        old="        if not identity.may_speak_as(sender):",
        new="        if not sender:",
        tests=(
            T_KEYS + "test_without_an_allow_list_a_name_is_believed_and_with_one_the_key_is",
            T_RELAY + "test_a_message_that_does_not_fit_its_key_goes_nowhere_and_is_laid_to_the_key",
        ),
    ),
    Mutant(
        what="an island joins under a name that its key is not good for",
        invariant=9,
        file=BINDINGS,
        old="        if isinstance(message, Join) and not identity.may_be(message.island_id):",
        new="        if isinstance(message, Join) and not message.nonce:",
        tests=(T_RELAY + "test_a_message_that_does_not_fit_its_key_goes_nowhere_and_is_laid_to_the_key",),
    ),
    Mutant(
        what="a key that was revoked still speaks",
        invariant=9,
        file=BINDINGS,
        old="        if identity is None:\n            return Reason.WRONG_KEY",
        new="        if identity is None:\n            return None\n        if not key:\n            return Reason.WRONG_KEY",
        tests=(T_RELAY + "test_a_revoked_island_is_forgotten_and_a_revoked_key_says_nothing_more",),
    ),
    Mutant(
        what="a revoked island stays known",
        invariant=9,
        file=RELAY,
        old="            self._who.forget(peer)\n",
        new="",
        tests=(T_RELAY + "test_a_revoked_island_is_forgotten_and_a_revoked_key_says_nothing_more",),
    ),
    Mutant(
        what="a key that is not on the allow list gets in",
        invariant=9,
        file=GATE,
        old="    if identity is None or identity.role is KeyRole.BROKER:",
        new="    if identity is not None and identity.role is KeyRole.BROKER:",
        tests=(T_KEYS + "test_zap_says_no_to_everything_else",),
    ),
    Mutant(
        what="the broker's own key gets in as a client",
        invariant=9,
        file=GATE,
        old="    if identity is None or identity.role is KeyRole.BROKER:",
        new="    if identity is None:",
        tests=(T_KEYS + "test_zap_says_no_to_a_broker_s_key_and_nothing_to_what_is_no_question",),
    ),
)
