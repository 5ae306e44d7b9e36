"""The leader's side of standing by, driven by hand: the test answers for the lease and plays every standby."""

from aggregator.interface.events import Commit, Persisted, RunSaved
from aggregator.standby.replication import Replication
from aggregator.standby.replication_events import Deliver, Followed, Local, Renewed
from broker.wire.messages import Follow, Stored

EPOCH, LEASE_S, LAG_S = 3, 1.0, 1.0


def commit_of(p=0, version=1, digest=None):
    return Commit(
        fragment_id=p,
        fragment_version=version,
        epoch=EPOCH,
        digest=digest or f"{p}.{version}",
        round_id=1,
        contributions=(),
        ledger={},
    )


def stored_of(*commits):
    return tuple(
        Stored(fragment_id=c.fragment_id, fragment_version=c.fragment_version, digest=c.digest) for c in commits
    )


class Leader:
    """A Replication, and the lease and standbys as far as a test answers for them."""

    def __init__(self, commits=(), fragments=2, foundings=()):
        self.now_s = 100.0
        commits = commits or [commit_of(p, 0) for p in range(fragments)]
        self.core = Replication(
            name="a",
            epoch=EPOCH,
            lease_s=LEASE_S,
            standby_lag_s=LAG_S,
            commits={c.fragment_id: c for c in commits},
            foundings=foundings,
            now_s=self.now_s,
        )
        self.stores = {}
        self.reachable = True  # a broker answers all the time
        self.actions = self.core.tick(self.now_s)

    def handle(self, event, after_s=0.0):
        self.passes(after_s)
        self.actions = self.core.handle(event, self.now_s)
        return self.actions

    def passes(self, seconds):
        until_s = self.now_s + seconds
        while self.reachable and self.now_s + LEASE_S / 4 < until_s:
            self.now_s += LEASE_S / 4
            self.core.reached(self.now_s)
        self.now_s = until_s
        if self.reachable:
            self.core.reached(self.now_s)

    def tick(self, after_s=0.0):
        self.passes(after_s)
        self.actions = self.core.tick(self.now_s)
        return self.actions

    def begun(self):
        """The lease is renewed, and the run record is durable here."""
        self.saved(1)
        self.granted()
        return self

    def granted(self, after_s=0.0):
        return self.handle(Renewed(granted=True, holder="a", epoch=EPOCH), after_s)

    def saved(self, serial):
        return self.handle(Local(event=RunSaved(serial=serial)))

    def persist(self, commit):
        self.actions = self.core.persist(commit, self.now_s)
        return self.actions

    def stored_here(self, p=0, version=1, after_s=0.0):
        return self.handle(Local(event=Persisted(fragment_id=p, fragment_version=version)), after_s)

    def hear(self, name="b", *commits, epoch=EPOCH, serial=1, after_s=0.0, made_under=None):
        follow = Follow(
            shard=0,
            epoch=epoch,
            stored=stored_of(*commits),
            made_under=epoch if made_under is None else made_under,
            run_epoch=epoch,
            run_serial=serial,
        )
        return self.handle(Followed(name=name, follow=follow), after_s)

    def in_sync(self, *names):
        """These have everything, and the lease says so."""
        for name in names:
            self.hear(name, *(commit_of(p, 0) for p in range(2)))
            self.granted()
        assert self.core.in_sync == set(names)
        return self

    def of(self, kind):
        return [each for each in self.actions if isinstance(each, kind)]

    def delivered(self):
        return [each.event for each in self.of(Deliver)]


VERSION_1 = Persisted(fragment_id=0, fragment_version=1)
WHOLE = (commit_of(0, 0), commit_of(1, 0))
