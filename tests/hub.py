"""A broker and an aggregator in a thread of the test's own process, over loopback."""

import asyncio
import threading

from aggregator.interface.config import AggregatorConfig
from aggregator.process import service
from broker.base.settings import to_table
from broker.gateway.config import BrokerConfig
from broker.server import serve as serve_broker
from ops.processes.cluster import free_ports
from tests.run_reading import Reading

RUN = "demo"
WAIT_S = 40.0  # for what must happen; nothing here depends on how long it takes


class Hub(Reading):
    """A broker and an aggregator in a thread of their own."""

    def __init__(self, store, **changes):
        self.core = self.address = None
        self._store, self._changes = store, changes
        self._ready, self._failure = threading.Event(), None
        self._thread = threading.Thread(target=self._main, name="hub", daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def config(self):
        usual = {"islands": 1, "fragments": 2, "sync_interval": 4, "total_tokens": 0, "heartbeat_interval_s": 0.05}
        return AggregatorConfig(
            run_id=RUN,
            broker=self.address,
            redis_url=f"redis://127.0.0.1:{free_ports(1)}",
            store=self._store,
            **(usual | self._changes),
        )

    def _main(self):
        try:
            asyncio.run(self._serve())
        except BaseException as err:  # noqa: BLE001 (raised in the test)
            self._failure = err
            self._ready.set()

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        broker_stop, listening = asyncio.Event(), self._loop.create_future()
        broker = BrokerConfig(run_id=RUN, port=0, redis_url=f"redis://127.0.0.1:{free_ports(1)}")
        async with asyncio.TaskGroup() as group:
            group.create_task(serve_broker(broker, stop=broker_stop, ready=listening.set_result))
            self.address = (await listening).address
            await service.serve(to_table(self.config()), stop=self._stop, ready=self._started)
            await self._stop.wait()
            broker_stop.set()

    def _started(self, core):
        self.core = core
        self._ready.set()

    def member(self, island_id):
        return self.members.get(island_id)
