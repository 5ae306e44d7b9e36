"""The bytes of one fragment's versions, from the merge that makes them until brokers are sent them.

A version is made in memory, and standbys are sent it from there, until it is durable in all places where it must be.
From then on its file alone has it: :meth:`VersionBytes.settle` is where its memory goes back to the pool of merges. So
beside contributions an aggregator holds the fragments that it is at, not the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aggregator.interface.events import Commit, Merge, Persist, Plant, Publish
from aggregator.merge.fragment_state import FragmentState, Made
from aggregator.store.version_file import VersionFile
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.tensors import encode_vector

#: Reads a version in a thread; raises Damaged where its file is not what was written.
Read = Callable[[], FragmentState]


@dataclass(slots=True)
class VersionBytes:
    """The durable version of a fragment, and the one that is to replace it.

    An order counts only while it is the newest: the core gives up a plant or a persist when the island that seeds the
    run dies, and the next may come before the old one is done.
    """

    durable: VersionFile | None = None  #: the newest version that may be published
    spoilt: bool = False  #: it has lost bytes, as far as is known
    difference: tuple[Encoded, ...] | None = None  #: of it to the one before, until it is published
    made: Made | None = None  #: the next version in memory, until it is settled
    written: VersionFile | None = None  #: the same, once it is on this disk
    order: Plant | Merge | Persist | None = None  #: the newest

    def to_write(self, commit: Commit) -> FragmentState:
        """Returns the arrays that a commit is to make durable."""
        assert self.made is not None
        assert self.made.digest == commit.digest, f"{self.made.digest} is pending, {commit.digest} to be committed"
        return self.made.state

    def settle(self, fragment_version: int) -> None:
        """Makes a version the one to publish: the core is about to hear that it is durable everywhere."""
        if self.made is not None and self.made.state.version == fragment_version:
            assert self.written is not None, "a version is settled that is not on this disk"
            self.durable, self.difference = self.written, self.made.difference
            self.made = self.written = None

    def read(self, commit: Commit) -> Read | None:
        """Returns what reads a commit's arrays, durable or on their way to the disk; None once it is replaced."""
        if self.made is not None and self.made.digest == commit.digest:
            state = self.made.state
            return lambda: state
        durable = self.durable
        same = durable is not None and durable.commit.fragment_version == commit.fragment_version
        return durable.verified if durable is not None and same else None

    def payload(self, action: Publish, tensors: Sequence[TensorSpec]) -> Callable[[], tuple[Encoded, ...]]:
        """Returns what reads the payload of the version to publish, whole or as a difference.

        A difference is handed out once: from here on it is the link's to keep. A whole version is verified, if it was
        not written a moment ago.
        """
        durable, difference = self.durable, self.difference
        assert durable is not None, "a version is published that is not durable"
        if action.base is None:
            read: Read = durable.verified if action.by is not None else lambda: durable.state
            return lambda: encode_vector(read().params, [tensor.shape for tensor in tensors], Codec.F32)
        self.difference = None
        assert durable.commit.fragment_version == action.fragment_version, "a difference is not of the newest version"
        assert difference is not None, "a difference is published that was not made"
        return lambda: difference

    def release(self) -> None:
        """Gives back the memory that looking at the durable version took."""
        if self.durable is not None:
            self.durable.release()
