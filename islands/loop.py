"""The interface that a training loop programs against: join, then one call per inner step (design, section 13).

    island = islands.join("tcp://hub:7001", params, run="demo", kinds={"embed|head": "mean"})
    params, opt_state = island.restore(params, opt_state)
    for batch in data(island.share):
        params, opt_state, loss = train(params, opt_state, batch, island.schedule_step)
        params = island.step(params, tokens=batch.size, loss=loss, state=(opt_state, cursor))
        if island.done:
            params = island.close(params)
            break

:meth:`Island.step` never waits: not for the network, not for the communication thread, not for the device. What it
does when nothing is due is a few attribute reads; when something is, it dispatches a copy or an addition.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from broker import logs
from broker.errors import ConfigError, LocalProtocolError, Unavailable
from islands import checkpoint, core, placement
from islands.config import IslandConfig
from islands.exchange import Exchange, Install, Membership, Moment, Position, Snapshot
from islands.partition import describe_kinds, tensor_specs
from islands.placement import Leaf, Parameters
from islands.session import Session
from islands.task import DataShare, Schedule
from islands.tree import Tree

log = logs.get(__name__)

#: While the caller waits (joining, closing): how often to look for signals, and to say what is waited for.
LOOK_EVERY_S, SAY_EVERY_S = 0.2, 5.0
#: Of the step times' moving average.
STEP_TIME_MEMORY = 0.9


def join(
    address: str,
    params: Tree,
    *,
    run: str = "atoll",
    kinds: Mapping[str, str] | None = None,
    unit_axes: Mapping[str, int] | None = None,
    island_id: str = "",
    tokens_per_step: int = 0,
    state_dir: str | os.PathLike[str] | None = None,
    checkpoint_interval_s: float = 60.0,
    timeout_s: float = 120.0,
    max_message_bytes: int = 1 << 30,
    init: Callable[[int], Tree] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Island:
    """Joins a run; returns once version 0 of every fragment is here.

    Args:
        address: The broker's control address, such as ``tcp://hub:7001``.
        params: The tree that the optimizer treats as master: any nest of JAX or numpy arrays. If this island is the
            first, these values become version 0; otherwise only structure, shapes, dtypes and placement count.
        run: The run's name.
        kinds: Regular expression over parameter names -> ``rda``, ``mean``, ``local`` or ``frozen``
            (:mod:`islands.partition`).
        unit_axes: Regular expression -> leading axes that count layers or experts.
        island_id: The name to have. Empty: the run assigns one, and the same again after a restart on this host.
        tokens_per_step: Tokens in one inner step. Where it is given, the run checks counters against it, and knows
            this island's pace in tokens.
        state_dir: Directory for checkpoints of ``state`` as given to :meth:`Island.step`; None: no checkpoints.
        checkpoint_interval_s: Seconds between two of them.
        timeout_s: Silence of the run after which joining is given up; also of the end, in :meth:`Island.close`.
        max_message_bytes: Largest message accepted.
        init: seed -> initial parameters. Where it is given, version 0 is made with the run's own seed.
        check: Called several times a second while this waits; what it raises ends the waiting.

    Raises:
        ConfigError: The run refused this island, or an argument cannot work; names the tensor or field and the cure.
        Unavailable: The run stayed silent.
    """
    config = IslandConfig(
        run_id=run,
        broker=address,
        island_id=island_id,
        state_dir=None if state_dir is None else Path(state_dir),
        checkpoint_interval_s=checkpoint_interval_s,
        join_timeout_s=timeout_s,
        max_message_bytes=max_message_bytes,
    )
    if tokens_per_step < 0:
        raise ConfigError(
            "tokens_per_step", tokens_per_step, "must be the tokens of one inner step, or 0 to leave it open"
        )
    specs = tensor_specs(params, kinds, unit_axes)
    for line in describe_kinds(specs).splitlines():
        log.info("island.kinds", kind=line)
    seat = None if island_id else _Seat.take(run)
    machine = core.Island(
        island_id=island_id,
        hint="" if seat is None else seat.name,
        nonce=secrets.token_hex(8),
        tensors=tuple(spec for spec in specs if spec.kind != "local"),
        tokens_per_step=tokens_per_step,
    )
    parameters, exchange = Parameters(params), Exchange()
    session = Session(config, machine, params, parameters, exchange, init)
    session.start()
    try:
        _wait_until_startable(exchange, config, check)
    except BaseException:
        session.leave("gave up joining")
        raise
    return Island(config, machine, session, parameters, exchange, tokens_per_step, check, seat)


def _wait_until_startable(exchange: Exchange, config: IslandConfig, check: Callable[[], None]) -> None:
    began_s = time.monotonic()
    say_at_s = began_s + 1.0
    while not exchange.startable:
        if exchange.error is not None:
            raise exchange.error
        check()
        now_s = time.monotonic()
        if now_s - max(began_s, exchange.heard_at_s or 0.0) > config.join_timeout_s:
            cure = "start the broker and the aggregator of the run there, or check the address and the firewall between"
            silence = f"{config.broker} was silent for {config.join_timeout_s:g} s while {exchange.doing}"
            raise Unavailable(f"cannot join run {config.run_id}: {silence}; {cure}", definite=True)
        if now_s >= say_at_s:
            say_at_s = now_s + SAY_EVERY_S
            log.info("island.waiting", broker=config.broker, detail=exchange.doing, waited_s=round(now_s - began_s, 1))
        exchange.news.wait(LOOK_EVERY_S)
        exchange.news.clear()


class Island:
    """A place in a run, held by a training loop. Made by :func:`join`; all methods belong to the thread that trains.

    As a context manager it leaves the run on the way out, so that nobody waits for it.

    Attributes:
        id: This island's name.
        share: Its part of the data: a live view, for data generators; changes only within :meth:`step`.
        restored: Where the optimizer's state came from: ``checkpoint`` or ``fresh``; None before :meth:`restore`.
        restored_cursor: The data cursor in that checkpoint; None if fresh.
        reset_optimizer: The last :meth:`step` replaced spoilt parameters (not finite) by the global ones: go on with
            a fresh inner optimizer. True until the next step.
        inner_step: Steps run so far, over all lives of the island.
        tokens: Tokens trained so far, likewise.
    """

    def __init__(
        self,
        config: IslandConfig,
        machine: core.Island,
        session: Session,
        parameters: Parameters,
        exchange: Exchange,
        tokens_per_step: int,
        check: Callable[[], None],
        seat: _Seat | None,
    ) -> None:
        assert exchange.membership is not None
        assert exchange.share is not None
        self._config = config
        self._machine = machine
        self._session = session
        self._parameters = parameters
        self._exchange = exchange
        self._tokens_per_step = tokens_per_step
        self._check = check
        self._seat = seat
        self._membership: Membership = exchange.membership
        self._share = exchange.share
        self._stopped = self._left = False
        self._versions = [-1] * self._membership.num_fragments
        self._sync_s = 0.0
        self._first_step_at_s: float | None = None
        self._last_step_at_s = 0.0

        start = self._membership.start
        self.id = self._membership.island_id
        self.inner_step, self.tokens = start.step, start.tokens
        self.share = DataShare(
            index=self._share.index,
            count=self._share.count,
            share_epoch=self._share.share_epoch,
            cursor=start.step,
            seed=self._membership.settings.seed,
        )
        self.restored: Literal["checkpoint", "fresh"] | None = None
        self.restored_cursor: int | None = None
        self.reset_optimizer = False
        atexit.register(self.leave)

    # --- the loop ---------------------------------------------------------------------------------------------

    def restore(self, params: Tree, opt_state: Any = None) -> tuple[Tree, Any]:
        """Returns the run's parameters, and this island's own optimizer state where its checkpoint has one that fits.

        Call it once, before the first step. Parameters that are never synchronised come from the checkpoint too.

        Raises:
            LocalProtocolError: If it was called before.
        """
        if self.restored is not None:
            raise LocalProtocolError("restore was called twice: call it once, before the first step")
        self.restored = "fresh"
        params = self._boundary(params, None)
        self._session.forget_initial()
        path = self._session.checkpoint_file
        detail = "no --state-dir" if path is None else "no checkpoint yet"
        if path is not None:
            checkpoint.copied(opt_state)  # compiles the copy, which no step should wait for
            try:
                saved = checkpoint.load(path)
            except Unavailable as err:
                saved, detail = None, str(err)
            if saved is not None:
                params, opt_state, detail = self._from_checkpoint(saved, params, opt_state)
        log.info("island.restored", optimizer=self.restored, detail=detail, step=self.inner_step)
        return params, opt_state

    def _from_checkpoint(self, saved: checkpoint.Checkpoint, params: Tree, opt_state: Any) -> tuple[Tree, Any, str]:
        leaves = self._parameters.leaves(params)
        own = [(self._parameters.names[i], leaves[i]) for i in self._parameters.local]
        misfit = checkpoint.misfit(saved.state, checkpoint.leaves_of(opt_state)) or checkpoint.misfit(saved.local, own)
        if misfit:
            return params, opt_state, f"the checkpoint is of another model or optimizer: {misfit}"
        self.restored, self.restored_cursor = "checkpoint", saved.cursor
        local = [placement.from_host(a, x) for (_, _, a), (_, x) in zip(saved.local, own, strict=True)]
        if local:
            params = self._parameters.replace_local(params, local)
        return params, checkpoint.restored(opt_state, saved.state), f"of step {saved.at.step}, life {saved.incarnation}"

    def step(self, params: Tree, *, tokens: int, loss: Any = None, state: tuple[Any, int] | None = None) -> Tree:
        """Takes note of an inner step; returns the parameters to go on with.

        The result is ``params`` itself unless a version was installed; dtypes, shardings and structure never change.
        Only the result is used from then on: it may be donated, or written to, at once. An array that was replaced in
        it may not: it is still read, elsewhere.

        Args:
            params: After the update.
            tokens: Trained in this step.
            loss: Of this step, for reports: a number or a scalar on a device, which is read elsewhere and later.
            state: ``(opt_state, cursor)``; copied when a checkpoint is due, not otherwise.

        Raises:
            ConfigError: An argument does not fit what was said when joining, or the run has thrown this island out.
            LocalProtocolError: :meth:`restore` was not called, or the island has left.
        """
        began_s = time.perf_counter()
        exchange = self._exchange
        if exchange.error is not None or self._left or self.restored is None or self._first_step_at_s is None:
            self._first_or_never(params, began_s)
        elif exchange.step_time_s is None:
            exchange.step_time_s = began_s - self._last_step_at_s
        else:
            recent_s = began_s - self._last_step_at_s
            exchange.step_time_s = STEP_TIME_MEMORY * exchange.step_time_s + (1 - STEP_TIME_MEMORY) * recent_s
        self._last_step_at_s = began_s
        if tokens > self._tokens_per_step > 0:
            cure = f"island.join was told {self._tokens_per_step} tokens_per_step: give the most that a step can train"
            raise ConfigError("tokens", tokens, cure)
        self.inner_step += 1
        self.tokens += tokens
        self.reset_optimizer = False
        if loss is not None:
            exchange.losses.append(loss)
        if exchange.ready or exchange.watched or (exchange.snapshot_wanted and state is not None):
            params = self._boundary(params, state)
        exchange.position = Position(self.inner_step, self.tokens)  # after the moment: see islands.exchange
        if exchange.share is not self._share:
            self._take_share()
        ended_s = time.perf_counter()
        self._sync_s += ended_s - began_s
        exchange.sync_share = self._sync_s / max(1e-9, ended_s - (self._first_step_at_s or 0.0))
        return params

    def close(self, params: Tree) -> Tree:
        """Ends training: hands over what is left, installs what comes, leaves; returns the run's final parameters.

        Before the run is :attr:`done` nobody collects what is left: then this leaves at once, and returns ``params``.

        Raises:
            ConfigError: The run has thrown this island out.
        """
        exchange = self._exchange
        if self._left:
            return params
        if not exchange.done:
            self.leave("closed before the end of the run")
            return params
        began_s = time.monotonic()
        params = self._boundary(params, None, stopped=True)
        while not exchange.finished:
            if exchange.error is not None:
                raise exchange.error
            self._check()
            exchange.news.wait(LOOK_EVERY_S)
            exchange.news.clear()
            if exchange.ready:
                params = self._boundary(params, None, stopped=True)
            silent_s = time.monotonic() - max(began_s, exchange.heard_at_s or 0.0)
            if silent_s > self._config.join_timeout_s:
                log.warning(
                    "island.unfinished", silent_s=round(silent_s, 1), detail="the run fell silent before its end"
                )
                break
        self.leave("the run has ended" if exchange.finished else "the run fell silent")
        return params

    def leave(self, reason: str = "the process ends") -> None:
        """Says goodbye, if that was not done yet: nobody waits for this island from then on."""
        if self._left:
            return
        self._left = True
        atexit.unregister(self.leave)
        self._session.leave(reason)
        if self._seat is not None:
            self._seat.release()
        log.info("island.left", reason=reason, step=self.inner_step, tokens=self.tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave("closed" if exc_type is None else f"failed: {exc_type.__name__}")

    # --- what a loop may want to know -------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the run needs no more steps: call :meth:`close`."""
        return self._exchange.done

    @property
    def schedule(self) -> Schedule:
        """How far the whole run is, in this island's own steps; what learning rates follow."""
        settings = self._membership.settings
        unit = max(1, settings.tokens_per_fleet_step)
        # Of the core, which belongs to the other thread, this reads one value that is replaced as a whole.
        step = int(self._machine.schedule_tokens(self.tokens) / unit)
        return Schedule(step=step, total_steps=settings.total_tokens // unit)

    @property
    def schedule_step(self) -> int:
        """``schedule.step``, for loops whose schedule knows its own end."""
        return self.schedule.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment in the local parameters."""
        return tuple(self._versions)

    @property
    def sync_share(self) -> float:
        """Part of this thread's time since the first step that was spent in :meth:`step`."""
        return self._exchange.sync_share

    # --- boundaries -------------------------------------------------------------------------------------------

    def _boundary(self, params: Tree, state: tuple[Any, int] | None, *, stopped: bool = False) -> Tree:
        """What is done between two steps: install what is ready, then copy what is watched."""
        exchange, parameters = self._exchange, self._parameters
        leaves = parameters.leaves(params)
        installed: dict[int, list[Leaf]] = {}
        told: list[tuple[Install, tuple[Leaf, ...]]] = []
        while exchange.ready:
            batch = exchange.ready.popleft()
            self.reset_optimizer |= batch.fresh_optimizer
            for install in batch.installs:
                p = install.fragment_id
                before = parameters.of_fragment(leaves, p)
                installed[p] = placement.install(before, install.placed, install.keep)
                told.append((install, tuple(before) if install.keep else ()))
                self._versions[p] = install.fragment_version
        if installed:
            params = parameters.replace(params, installed)
        wanted = exchange.watched
        if stopped:
            # Everything at the last step; after that, what late installations have made of it.
            wanted = frozenset(installed if self._stopped else self._membership.moving)
            self._stopped = True
        copied = {
            p: tuple(placement.copy(installed[p] if p in installed else parameters.of_fragment(leaves, p)))
            for p in sorted(wanted)
        }
        snapshot = None
        if exchange.snapshot_wanted and state is not None:
            exchange.snapshot_wanted = False
            opt_state, cursor = state
            local = tuple(placement.copy([leaves[i] for i in parameters.local]))
            snapshot = Snapshot(state=checkpoint.copied(opt_state), cursor=int(cursor), local=local)
        moment = Moment(
            at=Position(self.inner_step, self.tokens),
            installed=tuple(told),
            copied=copied,
            snapshot=snapshot,
            stopped=stopped,
        )
        exchange.tell(moment, time.monotonic())
        return params

    def _first_or_never(self, params: Tree, now_s: float) -> None:
        """Deals with a step that is not one like all others: the first one, or one that cannot be."""
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._left:
            raise LocalProtocolError("the island has left its run: join again")
        if self.restored is None:
            raise LocalProtocolError("call restore before the first step: the run's parameters are to be trained")
        self._first_step_at_s = now_s
        self._session.place_from(self._parameters.leaves(params))

    def _take_share(self) -> None:
        share = self._exchange.share
        assert share is not None
        self._share = share
        self.share.index, self.share.count, self.share.share_epoch = share.index, share.count, share.share_epoch


class _Seat:
    """A name that survives a restart, and that no other process of this host has meanwhile: host name and number.

    The lowest number whose lock file is free. Where there is no place for a lock, there is no such name.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._file = file

    @classmethod
    def take(cls, run: str) -> _Seat | None:
        """Returns a free seat, or None if locks cannot be taken here."""
        host, directory = socket.gethostname(), Path(tempfile.gettempdir())
        for number in range(1000):
            try:
                file = open(directory / f"atoll-{os.getuid()}-{run}-{number}.lock", "wb")  # noqa: SIM115
            except OSError:
                return None
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(f"{host}/{number}", file)
            file.close()
        return None

    def release(self) -> None:
        """Lets another process have it."""
        self._file.close()
