"""A run for trainers with callbacks, or with one state that holds everything: :class:`Hook`.

    with islands.Hook("tcp://hub:7001", run="demo", tokens_per_step=4096) as hook:
        params, opt_state = hook.start(params, opt_state)  # when training begins
        for batch in islands.batches(source, hook.island, batch=32):
            params, opt_state, loss = train(params, opt_state, batch)
            params, opt_state = hook.step(params, opt_state, loss=loss)  # at the end of each step
        params = hook.finish(params)  # when training ends

Each call takes the parameters and the rest of the training state and returns them: what a callback reads from its
trainer it writes back. It is a thin cover of :class:`islands.Island`, which has more to say.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

from broker.base.errors import ConfigError, LocalProtocolError
from broker.process import logs
from broker.process.signals import Handlers
from broker.wire.messages import Departure
from islands.arrays.tree import Tree
from islands.interface.config import JoinOptions, refuse_unknown
from islands.joining import join
from islands.loop import Island

log = logs.get(__name__)


class Hook:
    """An island that joins when training begins. Its methods belong to one thread.

    As a context manager it leaves the run on the way out. On the main thread it then takes Ctrl-C and SIGTERM as well,
    unless the program has handlers of its own. The step that runs is ended first, as parameters and state fit together
    there: the island pauses (:meth:`Island.pause`), and ``KeyboardInterrupt``, or ``SystemExit`` with 143, is raised.
    The second signal is raised at once. Processes that the program forks have the handlers of before.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | Sequence[str],
        *,
        fresh: Callable[[Tree], Any] | None = None,
        init: Callable[[int], Tree] | str | os.PathLike[str] | None = None,
        **options: Unpack[JoinOptions],
    ) -> None:
        """Takes note of a run; nothing is connected before :meth:`start`.

        Args:
            address: As for :func:`islands.join`.
            fresh: parameters -> new state, for when spoilt parameters (not finite) were replaced by the global ones.
                None: the state is kept, and a warning says so.
            init: As for :func:`islands.join`.
            **options: As for :func:`islands.join`. What :meth:`step` counts where it is not told ``tokens`` is
                ``tokens_per_step``.

        Raises:
            TypeError: One of the options is none; names the nearest.
        """
        refuse_unknown(options)
        self._address, self._init, self._options = address, init, options
        self._tokens_per_step, self._fresh = options.get("tokens_per_step", 0), fresh
        self._users_check = options.get("check", lambda: None)
        self._island: Island | None = None
        self._last: Tree = None  # the parameters that were returned last
        self._handlers = Handlers(self._receive)
        self._asked: int | None = None  # the signal that asked for the end

    @property
    def island(self) -> Island:
        """The island that has joined: its share of the data, its versions, its schedule.

        Raises:
            LocalProtocolError: :meth:`start` was not called.
        """
        if self._island is None:
            raise LocalProtocolError("the hook has not joined: call start first, when training begins")
        return self._island

    @property
    def done(self) -> bool:
        """True when the run needs no more steps: end training, and call :meth:`finish`."""
        return self._island is not None and self._island.done

    def start(self, params: Tree, state: Any = None) -> tuple[Tree, Any]:
        """Joins the run; returns its parameters, and the state to begin with.

        Args:
            params: What is trained and merged, as for :func:`islands.join`.
            state: All else that training changes: the optimizer's state, statistics, random keys. It comes from a
                checkpoint or another island where there is one, as in :meth:`Island.restore`.

        Raises:
            ConfigError: The run refused this island, or an argument cannot work.
            RunEnded: The run is over, and its aggregator has gone.
            Unavailable: The run stayed silent.
            LocalProtocolError: It was called before.
        """
        if self._island is not None:
            raise LocalProtocolError("start was called twice: call it once, when training begins")
        options: JoinOptions = {**self._options, "check": self._check}
        self._island = join(self._address, params, init=self._init, **options)
        self._last, state = self._island.restore(params, state)
        return self._last, state

    def step(self, params: Tree, state: Any = None, *, loss: Any = None, tokens: int | None = None) -> tuple[Tree, Any]:
        """Takes note of an inner step; returns the parameters and the state to go on with. It never waits.

        Args:
            params: After the update, as for :meth:`Island.step`.
            state: After the update; for checkpoints, and for other islands.
            loss: Of this step, for reports.
            tokens: Trained in this step; None: ``tokens_per_step``.

        Raises:
            ConfigError: See :meth:`Island.step`.
            LocalProtocolError: :meth:`start` was not called, or the island has left.
            KeyboardInterrupt: Ctrl-C was pressed; the island has paused.
            SystemExit: SIGTERM came; the island has paused.
        """
        tokens = self._tokens_per_step if tokens is None else tokens
        if not tokens:
            raise ConfigError("tokens", tokens, "say how many this step trained, or give tokens_per_step to the hook")
        island = self.island
        self._last = params = island.step(params, tokens=tokens, loss=loss, state=_without_cursor(state))
        if island.reset_optimizer:
            how = "kept: give fresh=, parameters -> state" if self._fresh is None else "made anew"
            log.warning("hook.reset", step=island.inner_step, detail=f"parameters were not finite; the state is {how}")
            state = state if self._fresh is None else self._fresh(params)
        if self._asked is not None:
            island.pause(params, _without_cursor(state), reason=f"interrupted by {signal.Signals(self._asked).name}")
            self._check()
        return params, state

    def finish(self, params: Tree | None = None) -> Tree:
        """Hands over the rest and leaves; returns the run's final parameters, as :meth:`Island.close` does.

        Args:
            params: As :meth:`step` returned them; None: those that it returned last.

        Raises:
            ConfigError: The run has thrown this island out.
            LocalProtocolError: :meth:`start` was not called.
        """
        self._last = self.island.close(self._last if params is None else params)
        return self._last

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            self._handlers.take(*(number for number, handler in usual.items() if signal.getsignal(number) is handler))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.give_back()
        if self._island is None:
            return
        if self._asked is not None:
            self._island.leave(f"interrupted by {signal.Signals(self._asked).name}", Departure.PAUSED)
        self._island.__exit__(exc_type, exc, trace)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self._asked = self._asked is not None, number
        if again:
            self._check()

    def _check(self) -> None:
        """Raises what a signal asks for; also called while the island waits for the run."""
        if self._asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self._asked is not None:
            raise KeyboardInterrupt
        self._users_check()


def _without_cursor(state: Any) -> tuple[Any, None] | None:
    """Returns a state as the island takes it, without a cursor: data follow the island's share."""
    return None if state is None else (state, None)
