"""Virtual time for real programs: an asyncio event loop for each simulated process, all on one heap.

A program runs unchanged: its timers, tasks, queues and threads are those of its loop, its clock is the process's own
(:mod:`broker.process.clocks`), and its randomness is drawn (:mod:`broker.process.chance`). Time moves only when nobody
has anything left to do, so an hour with a hundred processes takes as long as what they do in it.

The same seed gives the same run, in any process: what is drawn follows from the seed, who draws, what for and how often
before; tasks and futures hash by number, so that a set of them has one order. A draw more in one place changes nothing
elsewhere.

A process that is killed does nothing more and is never told: nothing is cancelled, no ``finally`` runs. Whatever it
held is kept until :meth:`VirtualTime.close`, when nobody hears of it any more.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Self, TypeVar

import xxhash

from broker.process import chance, clocks
from ops.virtual.queue import Clock, ClockTrouble, EventQueue

T = TypeVar("T")

#: The wall clock at the beginning of virtual time, in seconds since 1970.
EPOCH_S = 1_700_000_000.0
#: Rounding of a timer: it may ring this much early.
RESOLUTION_S = 1e-9
#: A process that ends has this many turns for what it does at last.
LAST_TURNS = 1_000


#: Makes the transport of a new connection to a server.
Accept = Callable[["Process", asyncio.Protocol], asyncio.Transport]


class Killed(SystemExit):
    """Ends the process that raises it as SIGKILL would: for devices in which a process is to die."""


class Task(asyncio.Task[T]):
    """A task that hashes by its number in its process."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, T], **how: Any) -> None:
        self._number = number
        super().__init__(coroutine, **how)

    def __hash__(self) -> int:
        return self._number


class Future(asyncio.Future[T]):
    """A future that hashes by its number in its process."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualTime:
    """The time that simulated processes share, their randomness, and what has failed in them.

    Used in a ``with`` statement: the clocks of :mod:`broker.process.clocks` are the simulated ones in it.

    Attributes:
        now_s: The true time; each process reads its own clock.
        failures: Errors that no task has caught, with their traces: each is a failure of the seed.
        running: The process that does something at the moment.
        queue: What is to happen, by time.
        servers: Host and port -> who accepts what processes connect there.
        on_turn: Told of each turn: true time, process, number of callbacks. What two runs of a seed must agree on.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.failures: list[str] = []
        self.running: Process | None = None
        self.on_turn: Callable[[float, str, int], None] | None = None
        self.processes: list[Process] = []
        self.servers: dict[tuple[str, int], Accept] = {}
        self.queue = EventQueue()
        self._drawn: Counter[tuple[str, str]] = Counter()
        self.at, self.after, self.run_until = self.queue.at, self.queue.after, self.queue.run_until

    @property
    def now_s(self) -> float:
        """The true time, in seconds from 0."""
        return self.queue.now_s

    def __enter__(self) -> Self:
        self._before = clocks.use(self), chance.use(self.bits)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        clocks.use(self._before[0])
        chance.use(self._before[1])

    def process(self, name: str, troubles: tuple[ClockTrouble, ...] = ()) -> Process:
        """Begins a process; one of the same name may have ended before."""
        kind: Any = Process  # abstract to the type checker: it lacks what would touch this machine
        started: Process = kind(self, name, Clock(self.queue, troubles), wrong=bool(troubles))
        self.processes.append(started)
        return started

    def close(self) -> None:
        """Ends all processes: their tasks are cancelled, and nobody hears what comes of it."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.bury()
        self.processes.clear()

    # --- chance ---

    def draw(self, who: str, what: str) -> float:
        """Returns a number from 0 to below 1."""
        return self._hash(who, what) / 2**64

    def between(self, who: str, what: str, least: float, most: float) -> float:
        """Returns a number between two."""
        return least + (most - least) * self.draw(who, what)

    def bits(self, count: int) -> int:
        """Returns random bits for the process that runs."""
        found, who = 0, self.running.name if self.running is not None else ""
        for _ in range(0, count, 64):
            found = found << 64 | self._hash(who, "bits")
        return found & ((1 << count) - 1)

    def _hash(self, who: str, what: str) -> int:
        number = self._drawn[who, what]
        self._drawn[who, what] = number + 1
        return xxhash.xxh64_intdigest(f"{self.seed} {who} {what} {number}".encode())

    # --- clocks of the process that runs ---

    def monotonic(self) -> float:
        """Returns what the running process takes for the time; the true time outside of one."""
        return self.queue.now_s if self.running is None else self.running.time()

    def wall(self) -> float:
        """Returns the wall clock of the running process, in seconds since 1970: it may go back."""
        return EPOCH_S + (self.queue.now_s if self.running is None else self.running.clock.now_s)


class Process(asyncio.AbstractEventLoop):
    """A simulated process, which is its event loop.

    It runs what is ready in one turn, all at its end; what that makes ready comes in the next one.

    Attributes:
        turn_s: Least and greatest time that a turn takes.
        job_s: Returns how long a job of a thread takes, by the name of its pool.
        clock: What it reads, never steadied; see :class:`broker.process.clocks.SteadyClock`.
        exit_code: What it has ended with; None while it runs, or if it was killed.
        ended: Called when it has ended, such as by what closes its connections.
    """

    def __init__(self, time: VirtualTime, name: str, clock: Clock, *, wrong: bool) -> None:
        self.virtual, self.name, self.clock = time, name, clock
        self.alive = True
        self.exit_code: object = None
        self.ended: list[Callable[[], None]] = []
        self.turn_s = (1e-5, 1e-4)
        self.job_s: Callable[[str], float] = lambda pool: time.between(name, f"job {pool}", 1e-4, 1e-2)
        self._read: Callable[[], float] = clocks.SteadyClock(lambda: clock.now_s) if wrong else lambda: time.now_s
        self._ready: deque[asyncio.Handle] = deque()
        self._watched: list[tuple[Callable[[], bool], Callable[[], object]]] = []  # descriptors
        self._awake = False  # a turn is on the heap,
        self._due = 0  # with so many callbacks
        self._frozen_until_s = 0.0
        self._made = 0  # tasks and futures
        self._pools: dict[object, list[float]] = {}  # when each of their threads is free
        self._signals: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._buried = False
        self._started: list[asyncio.Task[Any]] = []
        self._kept: list[asyncio.Task[Any]] = []  # of a dead process

    # --- life ---

    def start(self, main: Coroutine[Any, Any, T], name: str = "main") -> asyncio.Task[T]:
        """Runs a coroutine in the process; its error is a failure of the seed."""
        task = self.create_task(main, name=name)
        task.add_done_callback(self._look_at)
        self._started.append(task)  # else nothing may hold it but itself
        return task

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"message": f"{task.get_name()} failed", "exception": error})

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Calls a function as this process, whose clock and loop it sees."""
        before, loop = self.virtual.running, asyncio._get_running_loop()
        self.virtual.running = self
        asyncio._set_running_loop(self)
        try:
            return call(*args)
        finally:
            self.virtual.running = before
            asyncio._set_running_loop(loop)

    def kill(self) -> None:
        """Ends it without a word; may be called by itself."""
        if self.alive:
            self.alive = False
            self._kept = sorted(asyncio.all_tasks(self), key=hash)  # else Python's collector would close them
            for call in self.ended:
                call()

    def freeze(self, for_s: float) -> None:
        """Stops it for a while; what comes waits."""
        self._frozen_until_s = max(self._frozen_until_s, self.virtual.now_s + for_s)

    def signal(self, number: int) -> None:
        """Sends it a signal, which ends it if it has no handler."""
        if number in self._signals:
            handler, args = self._signals[number]
            self.call_soon(handler, *args)
        else:
            self.kill()

    def bury(self) -> None:
        """Has the tasks of a dead process end, at the end of a seed: so nothing is left to Python's collector."""
        self._buried = True
        for turn in range(LAST_TURNS):
            # Before any of them goes on; and again when what is left waits for something, though it has been told.
            if not turn or not self._ready:
                tasks = sorted((task for task in asyncio.all_tasks(self) if not task.done()), key=hash)
                if not tasks and not self._ready:
                    break
                for task in tasks:
                    task.cancel()
                    task.add_done_callback(_looked_at)
            self._due = len(self._ready)
            self._callbacks()
        self._kept.clear()

    # --- turns ---

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Has a callback run in the next turn, behind those that are there."""
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Does the same: a simulated thread runs while its process does nothing else."""
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Has a callback run in ``delay`` seconds of this process's clock."""
        return self._timer(self.time() + delay, callback, args, context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Has a callback run when this process's clock shows ``when``."""
        return self._timer(when, callback, args, context)

    def _timer(self, when: float, callback: Any, args: Any, context: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._wait_for(timer)
        return timer

    def _wait_for(self, timer: asyncio.TimerHandle) -> None:
        if timer.cancelled() or not self.alive:
            return
        left_s = timer.when() - self.time()
        if left_s <= RESOLUTION_S:
            self._put(timer)
        else:
            # A clock that is wrong is looked at again when its rate changes.
            self.virtual.at(self.clock.true_s(self.clock.now_s + left_s), lambda: self._wait_for(timer))

    def watch(self, readable: Callable[[], bool], callback: Callable[[], object]) -> None:
        """Has a callback run once a simulated descriptor is readable: looked at when the next turn begins."""
        self._watched.append((readable, callback))
        self._wake()

    def _put(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)  # of a dead process for its burial: whoever waits must be told to end
        self._wake()

    def _wake(self) -> None:
        if not self._awake and self.alive:
            self._awake = True
            self.virtual.at(self._frozen_until_s, self._select)

    def _select(self) -> None:
        """Begins a turn; what arrives from here on is announced in the next one."""
        if self.virtual.now_s < self._frozen_until_s:
            self.virtual.at(self._frozen_until_s, self._select)
            return
        watched, self._watched = self._watched, []
        for readable, callback in watched:
            if readable():
                self._ready.append(asyncio.Handle(callback, (), self))
        self._due = len(self._ready)
        self.virtual.after(self.virtual.between(self.name, "turn", *self.turn_s), self._turn)

    def _turn(self) -> None:
        if self.virtual.now_s < self._frozen_until_s:
            self.virtual.at(self._frozen_until_s, self._turn)
            return
        self._awake = False
        if not self.alive:
            return
        if self.virtual.on_turn is not None:
            self.virtual.on_turn(self.virtual.now_s, self.name, self._due)
        self._callbacks()
        if self._ready or self._watched:
            self._wake()

    def _callbacks(self) -> None:
        try:
            self.run(self._run_ready)
        except SystemExit as end:
            self.exit_code = None if isinstance(end, Killed) else end.code
            self.kill()

    def _run_ready(self) -> None:
        for _ in range(self._due):
            if not (self.alive or self._buried):
                return  # it was killed by one of them
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    # --- what asyncio asks for ---

    def time(self) -> float:
        """Returns what this process takes for the time: never less than before."""
        return self._read()

    def create_future(self) -> asyncio.Future[Any]:
        """Returns a future of this process."""
        self._made += 1
        return Future(self._made, self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: object = None, context: Any = None
    ) -> asyncio.Task[T]:
        """Starts a task of this process."""
        self._made += 1
        called = f"{self.name}-{self._made}" if name is None else str(name)
        return Task(self._made, coro, loop=self, name=called, context=context)  # type: ignore[arg-type]

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs a job of a thread whole at the moment when it ends; until then nothing of it has happened.

        A pool has as many threads as it was made with, and takes its jobs in order.
        """
        if getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        pool = getattr(executor, "_thread_name_prefix", "")
        free_s = self._pools.setdefault(executor, [0.0] * getattr(executor, "_max_workers", 32))
        thread = min(range(len(free_s)), key=free_s.__getitem__)
        begins_s = max(self.virtual.now_s, free_s[thread])
        ends_s = free_s[thread] = begins_s + self.job_s(pool)
        future: asyncio.Future[T] = self.create_future()

        def begin() -> None:
            if not future.cancelled():  # as with a real pool: what has begun is not cancelled any more
                self.virtual.at(ends_s, end)

        def end() -> None:
            if not self.alive:
                return
            if self.virtual.now_s < self._frozen_until_s:
                self.virtual.at(self._frozen_until_s, end)
                return
            try:
                result = self.run(self._in_a_thread, func, args)
            except SystemExit:
                self.kill()
            except Exception as error:  # noqa: BLE001 - it is its caller's
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        if self._buried:
            future.cancel()
        else:
            self.virtual.at(begins_s, begin)
        return future

    @staticmethod
    def _in_a_thread(func: Callable[..., T], args: tuple[Any, ...]) -> T:
        asyncio._set_running_loop(None)
        return func(*args)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connects to a server of virtual time; raises ConnectionRefusedError where there is none."""
        accept = self.virtual.servers.get((host, port))
        if accept is None:
            raise ConnectionRefusedError(111, "Connection refused")
        protocol = protocol_factory()
        transport = accept(self, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Has a callback run upon :meth:`signal`."""
        self._signals[sig] = callback, args

    def remove_signal_handler(self, sig: int) -> bool:
        """Takes the handler of a signal away; returns whether there was one."""
        return self._signals.pop(sig, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Notes what nobody has caught, unless the process is dead."""
        if self.alive:
            error = context.get("exception")
            trace = "" if error is None else "\n" + "".join(traceback.format_exception(error))
            self.virtual.failures.append(f"{self.virtual.now_s:.6f} s {self.name}: {context['message']}{trace}")

    def get_debug(self) -> bool:
        """Returns False."""
        return False

    def is_running(self) -> bool:
        """Returns whether this process does something at the moment."""
        return self.virtual.running is self

    def is_closed(self) -> bool:
        """Returns whether the process has ended."""
        return not self.alive

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer stays on the heap until its time."""


def _looked_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody else will ask
