"""A leader and its standbys in a world of models: what may happen to them, and what must hold whatever happens."""

import msgpack

from aggregator.interface.events import Note, Persisted, RunSaved
from aggregator.standby import candidate_events as c
from aggregator.standby import replication as r
from aggregator.standby.candidate import Candidate
from aggregator.state.founding import MAX_FOUNDINGS, foundings_in
from broker.wire.messages import Replica, ReplicaRun
from tests.failover_models import FOLLOWING, LAG_S, LEASE_S, NAMES, Broker, ModelLease, Node, commit_of, replica


class World:
    """Everything; each public method is one thing that happens.

    Args:
        forgetful: Redis may lose its data or come back with old data; then it is the broker that keeps its own, and the
            promise is about what the broker has seen.
        dark: Everything may lose power at once, and Redis and the broker come back empty. Whoever is there first may
            lead then, with less than was published; but what was published stays in the store of somebody.
    """

    def __init__(self, *, forgetful=False, dark=False):
        self.forgetful, self.dark = forgetful, dark
        self.sealed = []  # (fragment, key): what was published before the last time that all was dark
        self.now_s = 100.0
        self.lease, self.broker = ModelLease(), Broker()
        self.nodes = {name: Node(name) for name in NAMES}
        self.messages = []  # (to, life or None, message)
        self.requests = []  # (node, life, what): not yet executed, and asked by whom
        self.replies = []  # (node, life, event)
        self.parents = {}  # (fragment, key) -> key before
        self.delivered = {}  # (fragment, version) -> digest
        self.promised = {}  # fragment -> the newest of them
        self.leads = []  # (epoch, stored at the time)
        self.snapshots = []
        self._asked = {}  # node -> life and request
        self.made = self.terms = self.published = 0
        for name in NAMES:
            self.start(name)

    # --- what may happen ---

    def start(self, name):
        node = self.nodes[name]
        if not node.up:
            record = {"epoch": node.run_epoch, "foundings": [each.row() for each in node.foundings]}
            node.candidate = Candidate(
                name=name,
                shard=0,
                lease_s=LEASE_S,
                yields=name != "a",
                stored=node.stored,
                record=record,
                now_s=self.now_s,
            )
            self._candidate(node, c.Tick())

    def crash(self, name, done):
        """A process dies; of what it was writing, the first ``done`` writes still reach the disk."""
        node = self.nodes[name]
        for write, _ in node.writes[:done]:
            write()
            self._check_sealed()
        node.stop()

    def blackout(self, done, first):
        """Everything loses power; what comes back at once is ``first``, the others later."""
        for name in NAMES:
            self.crash(name, done)
        self.lease, self.broker = ModelLease(), Broker()
        self.messages, self.requests, self.replies, self.snapshots = [], [], [], []
        self._seal()
        self.start(first)

    def _seal(self):
        """From here on, somebody may lead without knowing what was published; but no store may lose it."""
        self.sealed += self.promised.items()
        self.delivered, self.promised, self.leads = {}, {}, []

    def tick(self, name):
        node = self.nodes[name]
        if node.candidate is not None:
            self._candidate(node, c.Tick())
        elif node.replication is not None:
            if node.attached:
                self.broker.attach(node.replication.epoch, self.now_s)
            node.replication.reached(self.now_s)
            if node.attached and node.replication.epoch < self.broker.epoch:
                self._leader(node, node.replication.handle(r.Outranked(), self.now_s))
                return
            self._leader(node, node.replication.tick(self.now_s))

    def write_ends(self, name):
        node = self.nodes[name]
        if node.writes:
            write, event = node.writes.pop(0)
            write()
            self._check_sealed()
            self._event(node, event)

    def message_arrives(self, index):
        to, message = self.messages.pop(index)
        node = self.nodes[to]
        if isinstance(message, Replica | ReplicaRun):
            if node.candidate is not None:
                self._candidate(node, c.Arrived(message=message))
        elif message[0] is FOLLOWING:
            if node.candidate is not None:
                following = self.broker.following(to, message[1], self.now_s)
                self._candidate(node, c.Heard(broker=0, following=following))
        elif node.replication is not None:
            name, follow = message
            self._leader(node, node.replication.handle(r.Followed(name=name, follow=follow), self.now_s))

    def request_arrives(self, index):
        """A request reaches Redis; whoever asked may have given up long ago."""
        name, life, what = self.requests.pop(index)
        match what:
            case "poll":
                event = c.Polled(lease=self.lease.read(self.now_s))
            case c.Take():
                granted = self.lease.take(
                    self.now_s,
                    holder=name,
                    expected_epoch=what.expected_epoch,
                    epoch=what.epoch,
                    store_epoch=what.store_epoch,
                )
                event = c.LeaseTaken(granted=granted)
            case (r.Renew(in_sync=in_sync), epoch, number, confirmed):
                granted, holder, under = self.lease.renew(
                    self.now_s, holder=name, epoch=epoch, in_sync=in_sync, number=number, confirmed=confirmed
                )
                event = r.Renewed(granted=granted, holder=holder, epoch=under)
        if life == self.nodes[name].life and self._outstanding(name) == what:
            self.replies.append((name, life, what, event))

    def reply_arrives(self, index):
        name, life, what, event = self.replies.pop(index)
        node = self.nodes[name]
        if life == node.life and self._outstanding(name) == what:
            self._asked.pop(name)
            self._event(node, event)

    def give_up(self, name):
        """A process waits for Redis no longer. The request may be executed all the same, later."""
        node, what = self.nodes[name], self._outstanding(name)
        if what is None:
            return
        del self._asked[name]
        self._event(node, c.Unpolled(detail="no answer") if node.candidate else r.RenewFailed(detail="no answer"))

    def commit(self, name, p):
        """A round of the leader's has closed."""
        node = self.nodes[name]
        if node.replication is None or not node.attached or p in node.next:
            return
        before = node.stored.get(p, (-1, ""))
        self.made += 1
        key = before[0] + 1, f"{node.replication.epoch}.{self.made}"
        self.parents[p, key] = before
        commit = commit_of(p, key, node.replication.epoch)
        node.next[p] = key

        def write():
            node.stored[p] = key

        done = r.Local(event=Persisted(fragment_id=p, fragment_version=key[0]))
        node.writes.append((write, done))
        self._leader(node, node.replication.persist(commit, self.now_s))

    def save_run(self, name):
        node = self.nodes[name]
        if node.replication is not None and node.attached:
            self._save_run(node)

    def restart_broker(self):
        self.broker = Broker()

    def jump_clock(self, by_s):
        self.lease.offset_s += by_s

    def snapshot(self):
        if self.lease.key[0].holder:
            self.snapshots.append(self.lease.key)

    def lose_redis(self, index):
        """Redis comes back empty, or with old data."""
        kept = index % (len(self.snapshots) + 1)
        del self.snapshots[kept:]  # what came later is gone for good
        self.lease.key = self.snapshots[-1] if kept else ModelLease.EMPTY

    def heal(self, seconds=40.0):
        """Lets everything happen in order for a while; fails unless somebody leads then, with everybody in sync."""
        for name in NAMES:  # whoever waits for an answer that was lost
            self.give_up(name)
        for _ in range(int(seconds / 0.05)):
            self.now_s += 0.05
            for name in NAMES:
                self.start(name)
                node = self.nodes[name]
                core = node.candidate or node.replication
                if self.now_s >= core.next_deadline_s():
                    self.tick(name)
            for _ in range(200):
                if not self._settle():
                    break
        lease = self.lease.read(self.now_s)
        leaders = [n for n in self.nodes.values() if n.attached and n.name == lease.holder]
        why = {n.name: n.candidate.objection for n in self.nodes.values() if n.candidate}
        if (self.forgetful or self.sealed) and (leaders or all(why.get(name) for name in NAMES)):
            # A leader of before may have been heard after its lease was lost: then nobody leads, and each says why. Or
            # a store was given an epoch that Redis forgot, and follows nobody until the next takeover.
            return
        assert leaders, f"nobody leads: {lease} {why}"
        assert lease.in_sync == set(NAMES), (lease, why)
        leader = leaders[0]  # others may have fragments of a version 0 that came to nothing
        for each in self.nodes.values():
            assert {p: each.stored[p] for p in leader.stored} == leader.stored, (each.name, each.stored, leader.stored)
            assert each.run_epoch == leader.run_epoch

    def _settle(self):
        for name in NAMES:
            while self.nodes[name].writes:
                self.write_ends(name)
        did = bool(self.messages or self.requests or self.replies)
        for waiting, arrives in (
            (self.requests, self.request_arrives),
            (self.replies, self.reply_arrives),
            (self.messages, self.message_arrives),
        ):
            for _ in range(len(waiting)):
                arrives(0)
        return did

    # --- what the cores ask for ---

    def _outstanding(self, name):
        life, what = self._asked.get(name, (None, None))
        return what if life == self.nodes[name].life else None

    def _ask(self, node, what):
        self._asked[node.name] = node.life, what
        self.requests.append((node.name, node.life, what))

    def _event(self, node, event):
        if isinstance(event, r.Local | r.Renewed | r.RenewFailed):
            if node.replication is not None:
                node.confirmed = node.confirmed or (isinstance(event, r.Renewed) and event.granted)
                self._leader(node, node.replication.handle(event, self.now_s))
        elif node.candidate is not None:
            self._candidate(node, event)

    def _candidate(self, node, event):
        for action in node.candidate.handle(event, self.now_s):
            match action:
                case c.Poll():
                    self._ask(node, "poll")
                case c.Take():
                    self._ask(node, action)
                case c.SendFollow(follow=follow):
                    self.messages.append((node.name, (FOLLOWING, follow)))
                    for each in self.nodes.values():
                        if each.attached and each.replication.epoch == self.broker.epoch:
                            self.messages.append((each.name, (node.name, follow)))
                case c.Keep(message=message):
                    node.writes.append((self._keeping(node, message), c.Kept(message=message)))
                case c.Lead(epoch=epoch, founding=founding):
                    self._lead(node, epoch, founding)
                case c.Quit():
                    raise AssertionError("nobody has ended the run")
                case Note():
                    pass

    def _keeping(self, node, message):
        def write():
            if isinstance(message, ReplicaRun):
                node.run_epoch, node.foundings = message.epoch, foundings_in(message.record)
            else:
                node.stored[message.fragment_id] = message.fragment_version, message.digest

        return write

    def _lead(self, node, epoch, founding):
        assert not node.writes, "it leads while it still stores what another leader sends"
        if self.dark and founding is not None:
            self._seal()  # no lease vouches for it: it may be the second one to begin without the others
        if not self.forgetful:  # else that is settled when it renews for the first time
            self._led(node, epoch)
        node.candidate = None
        commits = {p: commit_of(p, key, epoch) for p, key in node.stored.items()}
        node.line = node.foundings if founding is None else (*node.foundings, founding)[-MAX_FOUNDINGS:]
        node.replication = r.Replication(
            name=node.name,
            epoch=epoch,
            lease_s=LEASE_S,
            standby_lag_s=LAG_S,
            commits=commits,
            foundings=node.line,
            now_s=self.now_s,
        )
        self._save_run(node)

    def _led(self, node, epoch):
        assert all(epoch > each for each, _ in self.leads), f"epoch {epoch} after {[e for e, _ in self.leads]}"
        for p, promise in self.promised.items():
            self._check(p, promise, node.stored, f"{node.name} leads under {epoch}")
        self.leads.append((epoch, dict(node.stored)))
        self.terms += 1

    def _save_run(self, node):
        node.serial += 1
        epoch, line = node.replication.epoch, node.line

        def write():
            node.run_epoch, node.foundings = epoch, line

        node.writes.append((write, r.Local(event=RunSaved(serial=node.serial))))

    def _leader(self, node, actions):
        epoch = node.replication.epoch
        for action in actions:
            match action:
                case r.Replicate(to=to, commit=commit):
                    self.messages.append((to, replica(commit, epoch)))
                case r.ReplicateRun(to=to):
                    record = msgpack.packb({"epoch": epoch, "foundings": [each.row() for each in node.line]})
                    self.messages.append((to, ReplicaRun(shard=0, epoch=epoch, serial=node.serial, record=record)))
                case r.Renew():
                    node.renewals += 1
                    self._ask(node, (action, epoch, node.renewals, node.confirmed))
                case r.Deliver(event=RunSaved()):
                    if not node.attached:
                        if self.forgetful:
                            self._led(node, epoch)
                        node.attached = True
                        self.broker.attach(epoch, self.now_s)
                        for p, key in node.stored.items():
                            self._publish(node, p, key)
                case r.Deliver(event=Persisted(fragment_id=p, fragment_version=version)):
                    key = node.next.pop(p)
                    assert key[0] == version
                    assert node.stored[p] == key, "published, and not on disk here"
                    self._publish(node, p, key)
                case r.GiveUp(to=to):
                    lease = self.lease.read(self.now_s)
                    if (lease.holder, lease.epoch) == (node.name, epoch):
                        self.lease.give_up(to)
                    self._seal()  # it had made nothing, but islands may have seen what it began from
                case r.Deposed():
                    node.stop()
                    self.start(node.name)
                    return
                case Note():
                    pass

    def _publish(self, node, p, key):
        epoch = node.replication.epoch
        self.broker.offer(epoch, p, key)
        seen = self.broker.held.get(p) == (epoch, *key)
        if self.forgetful and (not seen or epoch < max(e for e, _ in self.leads)):
            # Nobody has seen it; or a lease that Redis lost was taken from a frozen leader, which wakes before its
            # successor has attached: the one gap that neither the lease nor the broker closes.
            return
        self.published += (p, key[0]) not in self.delivered
        assert self.delivered.setdefault((p, key[0]), key[1]) == key[1], f"two contents of {p} {key}"
        for later, stored in self.leads:
            if later > epoch:
                self._check(p, key, stored, f"{node.name} publishes under {epoch} though {later} leads")
        if key[0] > self.promised.get(p, (-1, ""))[0]:
            self.promised[p] = key

    def _check_sealed(self):
        for p, key in self.sealed:
            held = [each.stored.get(p, (-1, "")) for each in self.nodes.values()]
            assert any(self._goes_back_to(p, each, key) for each in held), f"{key} of {p} is in no store: {held}"

    def _goes_back_to(self, p, have, key):
        while have[0] >= key[0]:
            if have == key:
                return True
            have = self.parents[p, have]
        return False

    def _check(self, p, promise, stored, what):
        have = stored.get(p, (-1, ""))
        while have != promise:
            assert have[0] > promise[0], f"{what}: {promise} of fragment {p} is not in {stored}"
            have = self.parents[p, have]
