"""The session of an island's speaker: what this host does, all others do as well. Shell.

What the core asks for, every host does with its regions: it encodes, hands over and places them. The orders go out
before this host begins (:mod:`islands.hosts.other_hosts`).
"""

from __future__ import annotations

import asyncio

from broker.wire.messages import Codec, Contribution, Message, Seed
from islands.hosts.other_hosts import OtherHosts
from islands.interface.config import IslandConfig
from islands.protocol import events
from islands.protocol.core import Island
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange, Install, Moment
from islands.session.session import Session
from islands.session.training_state import Copies, Snapshot


class SpeakerSession(Session):
    """A session whose orders the other hosts of the island carry out, too.

    Args:
        config: Addresses and intervals.
        core: Fresh; touched by this session's thread alone.
        array_work: With the initial parameters that are here.
        exchange: Shared with the training thread of this host.
        hosts: The others.
        sequence: Of the last message of an earlier process of this life.
    """

    def __init__(
        self,
        config: IslandConfig,
        core: Island,
        array_work: ArrayWork,
        exchange: Exchange,
        hosts: OtherHosts,
        *,
        sequence: int = 0,
    ) -> None:
        due, number = hosts.due, hosts.num_hosts
        super().__init__(config, core, array_work, exchange, due=due, num_hosts=number, sequence=sequence)
        self._hosts = hosts

    def _beside(self) -> OtherHosts:
        return self._hosts

    async def _begin_run(self) -> None:
        for work in self._hosts.work(self._config.join_timeout_s):
            self._spawn(work)
        self._handed = await self._hosts.assembled()
        await super()._begin_run()

    async def _goodbye(self) -> None:
        await self._hosts.goodbye(self._leave_reason or "ended")
        await super()._goodbye()

    def _connect(self, broker: int) -> None:
        super()._connect(broker)
        self._hosts.use(broker)

    def _joined(self, joined: events.Joined) -> None:
        core = self._core
        assert core.settings is not None
        self._hosts.joined(joined, core.settings, core.blocks)
        self._hosts.use(core.broker)
        super()._joined(joined)

    def _post(self, to: str, message: Message) -> None:
        if isinstance(message, Contribution | Seed):
            steps, core = message.steps if isinstance(message, Contribution) else None, self._core
            self._hosts.send_part(message.fragment_id, steps, core.island_id, core.incarnation)
        super()._post(to, message)

    def _catch_up(self) -> None:
        super()._catch_up()
        if self._exchange.begun is not None:
            self._hosts.begin(self._exchange.begun)

    def _boundary(self, moment: Moment) -> None:
        self._hosts.boundaries += 1  # as this session counts them
        super()._boundary(moment)

    def _after(self) -> None:
        super()._after()
        core = self._core
        open_steps = {p: frozenset(fragment.outstanding) for p, fragment in core.fragments.items()}
        self._hosts.core_has_moved(open_steps, delivered=core.delivered, finished=core.finished)

    def _begin_seed(self, fragment_id: int) -> None:
        assert self._core.settings is not None
        self._hosts.encode(fragment_id, self._core.settings.seed)
        super()._begin_seed(fragment_id)

    def _begin_capture(self, fragment_id: int, copies: Copies, codec: Codec) -> None:
        steps = self._core.fragments[fragment_id].capturing
        assert steps is not None
        self._hosts.capture(fragment_id, copies.boundary, steps, codec)
        super()._begin_capture(fragment_id, copies, codec)

    async def _snapshot(self, moment: Moment, snapshot: Snapshot, boundary: int) -> None:
        whole = await self._hosts.whole(snapshot, boundary, self._array_work.parameters.local)
        await super()._snapshot(moment, whole, boundary)

    async def _placed(self, action: events.Prepare) -> Install:
        elsewhere = asyncio.create_task(self._hosts.prepare(action.version, action.keep, mixes=action.mixes))
        install = await super()._placed(action)
        await elsewhere
        self._hosts.plans.placed(install)
        return install
