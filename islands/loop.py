"""The interface of a training loop: join, then one call per inner step (reference.md, section 13).

    island, params, opt_state = islands.begin("paris.join", params, opt_state, tokens_per_step=4096)
    for batch in islands.batches(source, island, batch=32):
        params, opt_state, loss = train(params, opt_state, batch, island.schedule_step)
        params = island.step(params, opt_state, loss=loss)
    params = island.close(params)

:meth:`Island.step` waits for nothing of ours, network or thread: it reads a few attributes, and dispatches a copy or an
addition when one is due. Only recipes in lockstep have it wait for versions (:mod:`islands.protocol.lockstep`).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broker.base.errors import LocalProtocolError, Unavailable
from broker.process import clocks, logs
from broker.process.signals import Interrupted, in_children
from broker.wire.messages import Departure
from islands.arrays import placement
from islands.arrays.parameters import Ties
from islands.arrays.tree import Tree
from islands.between_steps import BetweenSteps, InitialValues
from islands.interface import arguments
from islands.interface.config import IslandConfig
from islands.protocol.fleet import ScheduleTokens
from islands.session import checkpoint
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange, JoinedRun
from islands.session.samples import FrozenLeaves
from islands.session.thread import CommunicationThread
from islands.session.training_state import Needed, Position, step_time_s
from islands.tasks.task import DataShare, Schedule

log = logs.get(__name__)

#: A disk that hangs must not keep an island from leaving.
SAVE_WITHIN_S = 5.0
#: When an island pauses: how long its contributions may take, and how often to look. Of the ten seconds that container
#: engines leave a process, or the five of an impatient user, the files need some.
PAUSE_WITHIN_S, PAUSE_LOOK_EVERY_S = 1.5, 0.02


class Island:
    """A training loop's place in a run, made by :func:`islands.join`; its methods belong to one thread.

    As a context manager it leaves the run on the way out, so that nobody waits for it.

    Attributes:
        id: This island's name.
        restored: Origin of the optimizer's state: ``checkpoint``, ``donor``, ``fresh``; None before :meth:`restore`.
        restored_cursor: The data cursor in that checkpoint; None if there was no checkpoint, or no cursor in it.
        reset_optimizer: The last :meth:`step` replaced spoilt parameters (not finite) by the global ones, and those
            that are never synchronised by what :meth:`restore` returned: go on with a fresh inner optimizer.
        inner_step: Steps run so far, over all lives of the island; ``tokens``: trained in them.
    """

    def __init__(
        self,
        *,
        config: IslandConfig,
        session: CommunicationThread,
        array_work: ArrayWork,
        exchange: Exchange,
        tokens_per_step: int,
        check: Callable[[], None],
        release: Callable[[], None],
        unmerged: Path | None = None,
        between: BetweenSteps | None = None,
    ) -> None:
        assert exchange.membership is not None
        self._config = config
        self._session = session
        self._array_work = array_work
        self._parameters = array_work.parameters
        self._exchange = exchange
        self._tokens_per_step = tokens_per_step
        self._check = check
        self._release = release
        self._unmerged = unmerged
        self._membership: JoinedRun = exchange.membership
        self._left = False
        self._elsewhere: LocalProtocolError | None = None  # in a child that this process has forked
        self._between = between or BetweenSteps(array_work, exchange)
        self._schedule = ScheduleTokens()
        self._ties = Ties(self._parameters.tied)
        self._sync_s = 0.0
        self._counted_from_s: float | None = None  # the end of the first step
        self._last_step_at_s = 0.0

        start = self._membership.start
        self.id = self._membership.island_id
        self.inner_step, self.tokens = start.step, start.tokens
        self._share = exchange.data_share()
        self.restored: str | None = None
        self.restored_cursor: int | None = None
        self.reset_optimizer = False
        atexit.register(self._at_exit)
        self._forget = in_children(self._forked)

    # --- the loop ---------------------------------------------------------------------------------------------

    def restore(self, params: Tree, opt_state: Any = None) -> tuple[Tree, Any]:
        """Returns the run's parameters, and an optimizer state that knows the run where there is one.

        The state comes from this island's own checkpoint; where it has none that fits, from another island that has
        trained for a while and has the same optimizer, within ``donor_wait_s``. Else ``opt_state`` is returned as it
        is. :attr:`restored` and the log say which, and why. Parameters that are never synchronised come from the same
        place. Call it once, before the first step; :func:`islands.begin` does.

        Raises:
            ConfigError: ``params`` are not those of the join, a leaf of ``opt_state`` can be in no checkpoint, or the
                run has thrown this island out.
            LocalProtocolError: If it was called before.
        """
        self._check_process()
        if self.restored is not None:
            raise LocalProtocolError("restore was called twice: call it once, before the first step")
        self._parameters.check(params)
        self.restored = "fresh"
        local = list(zip(self._parameters.local, self._parameters.of_none(params), strict=True))
        checkpoint.check(opt_state)
        needed = Needed(state=checkpoint.leaves_of(opt_state), local=local)
        self._between.given = checkpoint.forms_of(needed.state)
        checkpoint.copied(opt_state)  # compiles the copy, which no step should wait for
        begun = self._between.beginning(needed, self._session.checkpoint_file, self._config, self._check)
        saved = begun.found
        self.restored, self.restored_cursor = begun.source.value, None if saved is None else saved.cursor
        params = self._boundary(params, None)
        self._exchange.deal(self._share)
        self._array_work.forget_initial()
        if saved is not None:
            leaves = [placement.from_host(a, x) for (_, _, a), (_, x) in zip(saved.local, local, strict=True)]
            params = self._parameters.replace_local(params, leaves) if leaves else params
            opt_state = checkpoint.restored(opt_state, saved.state)
        self._between.initial = InitialValues(self._parameters.of_none(params))
        self._between.frozen = FrozenLeaves(params, self._parameters)
        self._ties.begin(params)
        log.info("island.restored", optimizer=self.restored, detail=begun.detail, step=self.inner_step)
        return params, opt_state

    def step(
        self,
        params: Tree,
        opt_state: Any = arguments.NOT_GIVEN,
        *,
        tokens: int | None = None,
        loss: Any = None,
        state: tuple[Any, int | None] | None = None,
    ) -> Tree:
        """Takes note of an inner step; returns the parameters to go on with.

        The result is ``params`` itself unless a version was installed; dtypes, shardings and structure never change.
        It may be donated, or written to, at once; an array that was replaced may not, as it is still read elsewhere.

        Args:
            params: After the update.
            opt_state: After the update; copied when a checkpoint is due, or another island needs it, not otherwise. Its
                leaves are arrays, numbers, text or bytes.
            tokens: Trained in this step: a whole number on the host. None: ``tokens_per_step`` of the join.
            loss: Of this step, for reports: a number or a scalar on a device, which is read elsewhere and later.
            state: ``(opt_state, cursor)`` in place of ``opt_state``. The cursor is a place in the caller's data that
                :attr:`restored_cursor` gives back, from 0, or None.

        Raises:
            ConfigError: An argument is not what stands here, or does not fit what was said when joining, such as
                ``params`` that do not go on from what was adopted; or the run has thrown this island out.
            LocalProtocolError: :meth:`restore` was not called, or the island has left.
        """
        began_s = clocks.monotonic()
        exchange = self._exchange
        state = state if opt_state is arguments.NOT_GIVEN else (opt_state, None)
        tokens, loss, state = arguments.of_step(tokens, loss, state, self.tokens, self._tokens_per_step)
        if exchange.error is not None or self._left or self.restored is None or self._counted_from_s is None:
            self._first_or_never(params, state)
        else:
            exchange.step_time_s = step_time_s(exchange.step_time_s, began_s - self._last_step_at_s)
        self._last_step_at_s = began_s
        if self._ties.looks:
            self._ties.look(params)
        if self._between.samples.waiting:
            self._between.look_at_samples(params)
        # Before the moment, as the position comes after it: see islands.session.exchange.
        exchange.trained.append((self.inner_step, self._share.trained()))
        self.inner_step += 1
        self.tokens += tokens
        self.reset_optimizer = False
        if loss is not None:
            exchange.losses.append(loss)
        if self._between.due(self.inner_step, state):
            params = self._boundary(params, state)
        exchange.position = Position(self.inner_step, self.tokens)
        while self._between.lockstep.holds(self.inner_step, self._between.versions) and not exchange.due.done:
            exchange.wait(self._check)
            params = self._take_news(params, state)
        exchange.deal(self._share)
        self._hear_progress()
        ended_s, waited_s = clocks.monotonic(), self._between.take_waited_s()
        if self._counted_from_s is None:
            self._counted_from_s = ended_s  # when the first step's training began is not known here
        else:
            self._sync_s += ended_s - began_s - waited_s
            exchange.sync_share = self._sync_s / max(1e-9, ended_s - self._counted_from_s)  # a clock may stand still
        return params

    def close(self, params: Tree) -> Tree:
        """Ends training: hands over the rest, installs the last versions; returns the run's final parameters.

        Before the run is :attr:`done` it leaves as soon as the aggregator has what is left: the run goes on without
        this island, and ends if every island has closed. The parameters are then those that there are.

        Raises:
            ConfigError: The run has thrown this island out.
        """
        self._check_process()
        exchange = self._exchange
        if self._left:
            return params
        early = not exchange.due.done
        if early:
            log.info("island.closing", step=self.inner_step, detail="before the run's end: hands over what is left")
        began_s = clocks.monotonic()
        params = self._boundary(params, None, stopped=True)
        while not exchange.finished and not (early and exchange.delivered and not exchange.due.done):
            exchange.wait(self._check)
            params = self._take_news(params, stopped=True)
            silent_s = clocks.monotonic() - max(began_s, exchange.heard_at_s or 0.0)
            if silent_s > self._config.join_timeout_s:
                log.warning("island.unfinished", silent_s=round(silent_s, 1), detail="the run fell silent")
                break
        self._hear_progress()
        early_reason = "closed before the end of the run" if exchange.delivered else "the run fell silent"
        self.leave("the run has ended" if exchange.finished else early_reason, Departure.CLOSED)
        return params

    def pause(self, params: Tree, state: tuple[Any, int | None] | None = None, *, reason: str = "paused") -> None:
        """Leaves for a while: the next process of this island goes on as if this one had only been silent.

        Hands over what the aggregator takes within :data:`PAUSE_WITHIN_S`. With ``state_dir``, what is not known to be
        merged by then is kept there beside a checkpoint; without, it is lost with this process.

        Args:
            params: As :meth:`step` returned them.
            state: ``(opt_state, cursor)``, as for the next :meth:`step`; None: no checkpoint is written.
            reason: For people.
        """
        self._check_process()
        if self._left:
            return
        if self._between.several:
            detail = "of several hosts, what was not handed over is lost; the next life begins at the last checkpoint"
            log.info("island.pausing", detail=detail)
            self._fall_out(reason, Departure.PAUSED)
            return
        if state is not None:
            self.save(params, state)
        exchange, until_s = self._exchange, clocks.monotonic() + PAUSE_WITHIN_S
        if self._counted_from_s is not None:
            params = self._boundary(params, None, stopped=True)
            while not exchange.delivered and exchange.error is None and clocks.monotonic() < until_s:
                exchange.machine.sleep(PAUSE_LOOK_EVERY_S)
                params = self._take_news(params, stopped=True)
        self.leave(reason, Departure.PAUSED)

    def _hear_progress(self) -> None:
        progress = self._exchange.due.progress
        if progress is not self._schedule.progress:
            self._schedule.hear(progress, self.tokens)

    def _take_news(self, params: Tree, state: Any = None, *, stopped: bool = False) -> Tree:
        """Installs versions that have come between two steps, or after the last one."""
        return self._boundary(params, state, stopped=stopped) if self._between.has_news(state) else params

    def _boundary(self, params: Tree, state: tuple[Any, int | None] | None, *, stopped: bool = False) -> Tree:
        params = self._between.run(params, Position(self.inner_step, self.tokens), state, stopped=stopped)
        self.reset_optimizer, self._between.recovered = self.reset_optimizer or self._between.recovered, False
        return params

    def save(self, params: Tree, state: tuple[Any, int | None]) -> None:
        """Writes a checkpoint now, before leaving for a while.

        Does nothing without ``state_dir``, before a step, or with several hosts, which have to agree about the step.

        Args:
            params: As :meth:`step` returned them.
            state: ``(opt_state, cursor)``, as for the next :meth:`step`.

        Raises:
            ConfigError: ``state`` is no such pair, or a leaf of the first can be in no checkpoint.
        """
        self._check_process()
        state = arguments.pair(state)
        path = self._session.checkpoint_file
        if path is None or self._counted_from_s is None or self._between.several:
            return
        self._between.compare(state[0])
        snapshot = checkpoint.snapshot_of(params, state, self._parameters, self._config.run_id)
        at = Position(self.inner_step, self.tokens)
        try:
            self._array_work.save_now(path, snapshot, at, self._exchange.due.life, within_s=SAVE_WITHIN_S)
        except Unavailable as err:
            log.warning("checkpoint.failed", detail=str(err))
        else:
            log.info("checkpoint.saved", step=self.inner_step)

    def leave(self, reason: str = "the process ends", departure: Departure = Departure.STOPPED) -> None:
        """Says goodbye, if that was not done yet: nobody waits for this island from then on.

        Of one that has ``PAUSED`` contributions that were not merged are kept, where there is a place for them.
        """
        if self._left:
            return
        self._left = True
        atexit.unregister(self._at_exit)
        self._forget()
        if departure is Departure.PAUSED and self._unmerged is None:
            departure = Departure.STOPPED
        self._session.leave(str(reason), departure)
        if departure is Departure.PAUSED and self._unmerged is not None:
            paused = self._session.paused()
            if paused is not None:
                self._array_work.keep(self._unmerged, paused)
        self._release()
        log.info("island.left", reason=reason, step=self.inner_step, tokens=self.tokens)

    def waited(self, seconds: float) -> None:
        """Counts time of the training thread that synchronisation took outside of :meth:`step`."""
        self._sync_s += seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        match exc:
            case None:
                self.leave("closed")
            case Interrupted():
                self._fall_out(str(exc), Departure.PAUSED)
            case KeyboardInterrupt():
                self._fall_out("interrupted", Departure.PAUSED)
            case _:
                self._fall_out(f"failed: {type(exc).__name__}")

    def _at_exit(self) -> None:
        self._fall_out("the process ends", ending=True)

    def _fall_out(self, reason: str, departure: Departure = Departure.STOPPED, *, ending: bool = False) -> None:
        if not self._left:
            self._between.fall_out(lambda: self.leave(reason, departure), ending=ending)

    def _forked(self) -> None:
        """Ends the island in a forked child: thread, files and the place in the run are the parent's."""
        atexit.unregister(self._at_exit)
        self._left, self._elsewhere = True, self._exchange.forked(self.id)
        self._share.lose(self._elsewhere)

    def _check_process(self) -> None:
        if self._elsewhere is not None:
            raise self._elsewhere

    # --- what a loop may want to know -------------------------------------------------------------------------

    @property
    def share(self) -> DataShare:
        """Its part of the data: a live view, for data generators; changes only within :meth:`step`."""
        self._between.owes_data = False
        return self._share

    @property
    def left(self) -> bool:
        """True once it has left the run."""
        return self._left

    @property
    def done(self) -> bool:
        """True when the run needs no more steps: call :meth:`close`."""
        return self._exchange.due.done

    @property
    def schedule(self) -> Schedule:
        """The progress of the whole run in steps of this island, for learning rates."""
        start, settings = self._membership.start, self._membership.settings
        unit = settings.tokens_per_fleet_step  # of as many islands as are expected
        if not self._tokens_per_step:  # that was left open: the average so far says it
            steps, tokens = self.inner_step - start.step, self.tokens - start.tokens
            unit = max(1, tokens * settings.islands // max(1, steps))
        return Schedule(int(self._schedule.at(self.tokens) / unit), settings.total_tokens // unit)

    @property
    def schedule_step(self) -> int:
        """``schedule.step``, for loops whose schedule knows its own end."""
        return self.schedule.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment in the local parameters."""
        return tuple(self._between.versions)

    @property
    def sync_share(self) -> float:
        """Part of the time since the first step that :meth:`step` took, but for waits for the loop's work."""
        return self._exchange.sync_share

    @property
    def heard_ago_s(self) -> float | None:
        """Seconds since anything came from the broker; None if nothing has. A second or two when all is well."""
        heard_at_s = self._exchange.broker_heard_at_s
        return None if heard_at_s is None else clocks.monotonic() - heard_at_s

    def _first_or_never(self, params: Tree, state: tuple[Any, int | None] | None) -> None:
        """Deals with a step that is not one like all others: the first one, or one that cannot be."""
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._left:
            raise LocalProtocolError("the island has left its run: join again")
        if self.restored is None:
            raise LocalProtocolError("call restore before the first step: the run's parameters are to be trained")
        self._exchange.shows_state = state is not None
        self._array_work.place_from(params)
        if state is not None:
            checkpoint.check(state[0])
            self._between.compare(state[0])
        elif self._session.checkpoint_file is not None:
            detail = "no state was given to step: until one is, no checkpoint is written into state_dir"
            log.info("checkpoint.waits", detail=detail)
