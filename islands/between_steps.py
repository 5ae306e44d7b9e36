"""The training thread's work before the first step and between steps: restores, installs and copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import Unavailable
from broker.process import clocks, logs
from broker.wire.messages import StateSource
from islands.arrays.placement import Leaf, from_host, here
from islands.arrays.regions import Spread
from islands.arrays.tree import Tree
from islands.interface.arguments import is_floating
from islands.interface.config import IslandConfig
from islands.protocol import lockstep
from islands.session import checkpoint, state_parts
from islands.session.array_work import ArrayWork
from islands.session.checkpoint import Checkpoint
from islands.session.exchange import Exchange, Install, Moment, StateFound
from islands.session.samples import FrozenLeaves, Samples, sample
from islands.session.training_state import Needed, Position

log = logs.get(__name__)

#: A fragment whose round opens soon is copied ahead where a step takes this long or longer: the round would wait for
#: the end of one. With shorter steps it is copied at the first boundary after the round has opened, and only then.
COPY_AHEAD_FROM_S = 0.25


class InitialValues:
    """Host copies of parameters that are never synchronised, to restore spoilt ones.

    The run has none of them. Batch statistics that are not finite would make the next step not finite again, whatever
    the global parameters and however fresh the optimizer, and the island would be refused for ever.

    Args:
        leaves: The unsynchronised parameters; waits until a device has computed them.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._arrays = [_copied(here(leaf)) for leaf in leaves]

    def restored(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns ``leaves``, in the same order, with those that can be spoilt as they were; never waits.

        Counters, masks and random keys cannot be infinite or NaN: they go on where they are.
        """
        return [
            from_host(array, leaf) if is_floating(array.dtype) or array.dtype.kind == "c" else leaf
            for array, leaf in zip(self._arrays, leaves, strict=True)
        ]


def _copied(value: npt.NDArray[Any] | Spread) -> npt.NDArray[Any] | Spread:
    if isinstance(value, Spread):
        return Spread(value.shape, value.dtype, {region: np.array(part) for region, part in value.parts.items()})
    return np.array(value)


class BetweenSteps:
    """The boundaries of one island's steps.

    Args:
        array_work: Whose fragments are installed and copied.
        exchange: With the communication thread; the island is a member.

    Attributes:
        several: The island has several hosts (:class:`islands.agreed_steps.AgreedSteps`).
        versions: Of each fragment, in the local parameters.
        owes_data: Data are dealt to it, and nobody has asked which.
        lockstep: The steps at which all islands hand over, where the recipe has such.
        samples: Of the adoptions that are looked at.
        frozen: Parameters that are never copied; None before training begins.
        initial: Values for local parameters that are spoilt.
        given: Leaves of the optimizer's state as restore was given it: (name, leaf, or its form); None once a state was
            shown that is another one.
        recovered: The last boundary replaced spoilt parameters: the inner optimizer is to start afresh.
    """

    several = False

    def __init__(self, array_work: ArrayWork, exchange: Exchange) -> None:
        assert exchange.membership is not None
        self._array_work, self._exchange = array_work, exchange
        self._membership = exchange.membership
        self._stopped = False
        #: What was urgent as copies were last made. Short steps make no more until the other thread has seen those.
        self._answered: frozenset[int] = lockstep.NONE
        self.versions = [-1] * self._membership.num_fragments
        self.lockstep = lockstep.Lockstep(self._membership.settings.recipe, self._membership.moving)
        self.owes_data = True
        self.samples = Samples(exchange)
        self.frozen: FrozenLeaves | None = None
        self.initial = InitialValues(())
        self.given: Sequence[tuple[str, Any]] | None = None
        self._waited_s = 0.0
        self.recovered = False

    def beginning(
        self, needed: Needed, path: Path | None, config: IslandConfig, check: Callable[[], None]
    ) -> StateFound:
        """Returns the state to begin with; may wait for another island's.

        Args:
            needed: What must fit.
            path: Of the checkpoint, if there may be one.
            config: Of the island.
            check: Raises where a wait is to end.
        """
        source = StateSource.CHECKPOINT
        saved, detail = _from_checkpoint(path, needed, config.run_id)
        if saved is None:
            source = StateSource.FRESH
            if config.donor_wait_s and (needed.state or needed.local):
                # Before the parameters are installed: until then no round waits for this island.
                found = wait_for_state(self._exchange, needed, check)
                saved, detail = found.found, f"{detail}; {found.detail}"
                source = StateSource.FRESH if saved is None else StateSource.DONOR
        self._exchange.begun = StateFound(found=saved, detail=detail, source=source)
        return self._exchange.begun

    def due(self, step: int, state: Any) -> bool:
        """Returns True if the boundary after ``step`` has work.

        Args:
            step: Steps run so far.
            state: Of the optimizer, if the caller shows it.
        """
        return self._has_come(state) or bool(self._to_copy(step))

    def has_news(self, state: Any) -> bool:
        """Returns True if there is work for a training that stands still, before its end or after it."""
        return self._has_come(state)

    def _has_come(self, state: Any) -> bool:
        """Returns True if a version is ready, or the state that the caller shows is wanted."""
        due = self._exchange.due
        return bool(due.ready or (due.snapshot_wanted and state is not None))

    def fall_out(self, leave: Callable[[], None], *, ending: bool) -> None:
        """Leaves in the middle of something; ``ending``: at the end of the process."""
        leave()

    def _compares(self, install: Install, *, looks: bool, first: bool) -> bool:
        """Returns whether what has just been overwritten is compared with its version: it takes a copy.

        Not all fragments at once, before the first step. Where a recipe always overwrites, those looked at anyway.
        """
        recipe = self._membership.settings.recipe
        usual = not (recipe.keep or recipe.mix) and not self._stopped and not install.flaw
        return not first and (looks or not usual)

    def _to_copy(self, step: int) -> frozenset[int]:
        """Returns the fragments to copy at the boundary after ``step``."""
        exchange, watched = self._exchange, self._exchange.due.watched
        if watched and (exchange.step_time_s or 0.0) < COPY_AHEAD_FROM_S:
            watched &= exchange.urgent if exchange.urgent is not self._answered else lockstep.NONE
        return watched | self.lockstep.due(step, self.versions)

    def look_at_samples(self, params: Tree) -> None:
        """Samples what was adopted in the parameters that the caller has come back with."""
        with self._beside_computations(params):
            self.samples.returned(params, self._array_work.parameters)

    def take_waited_s(self) -> float:
        """Returns how long training has waited here for computations of the loop, since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @contextlib.contextmanager
    def _beside_computations(self, params: Tree) -> Iterator[None]:
        """Takes note of waits for computations of the loop, which were dispatched before ours.

        On CPUs JAX has 32 under way at most. One more waits as it is dispatched: by the loop itself, or by a copy here.
        """
        if not self._array_work.parameters.are_computed_now(params):
            yield
            return
        began_s, own_s = clocks.monotonic(), time.thread_time()
        yield
        self._waited_s += max(0.0, clocks.monotonic() - began_s - (time.thread_time() - own_s))

    def compare(self, opt_state: Any) -> None:
        """Logs, once, how a state that is about to be copied differs from the one given to restore."""
        differs = checkpoint.difference(opt_state, self.given) if self.given is not None else ""
        if differs:
            self.given = None
            detail = f"restore was given another one, and no checkpoint of this fits it: {differs}"
            log.warning("island.state_differs", detail=detail)

    def _look_at_data(self, at: Position) -> None:
        if self.owes_data and at.step > self._membership.start.step:
            self.owes_data = False
            detail = "it trains on other data than the run deals to it, and books these as trained: take batches from "
            detail += "islands.batches, or ask island.share for each; of data that only this island has, by share.own"
            log.warning("data.not_taken", step=at.step, detail=detail)

    def run(self, params: Tree, at: Position, state: tuple[Any, int | None] | None, *, stopped: bool = False) -> Tree:
        """Installs ready versions, then copies the fragments that are watched, or due in lockstep.

        Args:
            params: As the caller has them.
            at: The counters.
            state: ``(opt_state, cursor)``, for a snapshot; None: the caller shows none.
            stopped: No further step will be run.

        Returns:
            The parameters to go on with.

        Raises:
            ConfigError: They are not those of the join: others, more or fewer, or of another shape or dtype.
        """
        with self._beside_computations(params):
            return self._run(params, at, state, stopped=stopped)

    def _run(self, params: Tree, at: Position, state: tuple[Any, int | None] | None, *, stopped: bool) -> Tree:
        self._look_at_data(at)
        exchange, due, placements = self._exchange, self._exchange.due, self._array_work.placements
        parameters = self._array_work.parameters
        parameters.check_form(params)
        installed: dict[int, list[Leaf]] = {}
        told: list[tuple[Install, tuple[Leaf, ...]]] = []
        adopted: list[tuple[Install, Sequence[Leaf], list[Leaf]]] = []
        first = at.step == self._membership.start.step
        looks = bool(due.ready) and not stopped and self.samples.looks(first=first)
        recovered = False
        answered = exchange.urgent  # before the look at it: what becomes urgent meanwhile is not answered
        wanted = self._to_copy(at.step)
        while due.ready:
            batch = due.ready.popleft()
            recovered |= batch.fresh_optimizer
            for install in batch.installs:
                p = install.fragment_id
                ours = parameters.of_fragment(params, p)
                sampled = sample(ours, install) if looks else ()
                # Copies, where installing writes to the leaves.
                beside = placements[p].before(ours, install.placed) if install.rounds else ()
                installed[p] = placements[p].install(ours, install.placed, install.keep)
                if install.keep == 0 and self._compares(install, looks=looks, first=first):
                    beside = placements[p].copy(installed[p])
                told.append((install, tuple(beside)))
                adopted.append((install, sampled, installed[p]))
                self.versions[p] = install.fragment_version
        if stopped:
            # Everything at the last step; after that, what late installations have made of it.
            wanted = frozenset(installed if self._stopped else self._membership.moving)
            self._stopped = True
        copied = {
            p: tuple(placements[p].copy(installed[p] if p in installed else parameters.of_fragment(params, p)))
            for p in sorted(wanted)
        }
        if copied:
            self._answered = answered
        if installed:
            params = parameters.replace(params, installed)
            if looks and not recovered:
                self.samples.take(at.step, adopted, parameters, first=first)
        if recovered:
            self.recovered = True
            params = parameters.replace_local(params, self.initial.restored(parameters.of_none(params)))
        snapshot = None
        if due.snapshot_wanted and state is not None:
            due.snapshot_wanted = False
            self.compare(state[0])
            snapshot = checkpoint.snapshot_of(params, state, parameters, self._membership.run_id)
        frozen = self.frozen.look(params) if copied and self.frozen is not None else ()
        moment = Moment(at=at, installed=tuple(told), copied=copied, frozen=frozen, snapshot=snapshot, stopped=stopped)
        exchange.tell(moment, clocks.monotonic())
        return params


def _from_checkpoint(path: Path | None, needed: Needed, run_id: str) -> tuple[Checkpoint | None, str]:
    """Returns this island's own checkpoint if it has one that fits, and what there is to say about it."""
    try:
        saved = None if path is None else checkpoint.load(path)
    except Unavailable as err:
        return None, str(err)
    if saved is None:
        return None, "no --state-dir" if path is None else "no checkpoint yet"
    flaw = state_parts.unfit(saved, needed)
    if saved.run_id != run_id:
        flaw = f"it is of run {saved.run_id}" if saved.run_id else "it does not say of which run it is"
    if flaw:
        return None, f"the checkpoint does not serve: {flaw}"
    return saved, f"of step {saved.at.step}, life {saved.incarnation}"


def wait_for_state(exchange: Exchange, needed: Needed, check: Callable[[], None]) -> StateFound:
    """Returns a state if one comes that fits, and what there is to say about it; waits for that."""
    exchange.state_needed = needed
    exchange.wake()
    while exchange.state_found is None:
        exchange.wait(check)
    found, exchange.state_found = exchange.state_found, None
    return found
