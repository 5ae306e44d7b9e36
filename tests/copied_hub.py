"""A store on a real disk that changes and is copied, for tests of its copies."""

import json

from aggregator.copies.bucket import Bucket
from aggregator.copies.copier import Copies
from aggregator.copies.restoring import sets_by_shard
from aggregator.store.store import Store
from tests.integration.test_aggregator_store import commit_of, state_of

FRAGMENTS = (0, 1)
NOW_S = 2e9


def sets_there(bucket):
    """The sets in an object store, newest first; those of shard 0 before other shards'."""
    return [each for sets in sets_by_shard(bucket).values() for each in sets]


class Hub:
    """A store with two fragments and a tape, which is copied to a folder."""

    def __init__(self, folder, *, epoch=1):
        self.run_dir, self.place = folder / "run", folder / "copies"
        self.store, self.tape = self.run_dir / "store", self.run_dir / "events.jsonl"
        self.versions = dict.fromkeys(FRAGMENTS, 0)
        self.run_dir.mkdir()
        self.opened = Store.open(self.store)
        self.opened.load()
        self.record = {"run_id": "demo", "epoch": epoch, "manifest": [[], []], "shard": [0, 1]}
        self.opened.save_run(self.record)
        for p in FRAGMENTS:
            self._commit(p, 0)
        self.tape.write_text('{"tape":11}\n')
        self.bucket = Bucket.open(f"file://{self.place}")
        self.copies = self.copier(epoch)

    as_shard = (0, 1)  #: its number, of how many

    def copier(self, epoch=1, bucket=None, name="hub-1"):
        return Copies(
            place=bucket or self.bucket,
            store=self.store,
            tape=self.tape,
            name=name,
            run_id="demo",
            epoch=epoch,
            shard=self.as_shard,
            wall_s=lambda: NOW_S,
        )

    def _commit(self, p, version):
        state = state_of(version, seed=p)
        self.opened.commit(commit_of(state, p), state)
        self.versions[p] = version

    def commit(self, p):
        self._commit(p, self.versions[p] + 1)
        with self.tape.open("a") as tape:
            tape.write(json.dumps({"note": f"version {self.versions[p]} of {p}"}) + "\n")

    def digests(self):
        return tuple(commit_of(state_of(self.versions[p], seed=p), p).digest for p in FRAGMENTS)

    def there(self):
        return {path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.close()
