"""Joins a run: from the arguments of :func:`join` to the first version of the parameters."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from broker.base.errors import ConfigError, Unavailable
from broker.base.settings import expanded
from broker.process import chance, clocks, logs, user_files
from broker.process.demands import demands_of, inputs_demanded
from broker.process.limits import memory_bytes
from broker.process.signals import in_children
from broker.transport.keys import JOIN, JoinFile, own_name
from broker.wire.headers import room_bytes
from broker.wire.messages import Departure, Reason
from islands.agreed_steps import AgreedSteps
from islands.arrays.partition import describe_kinds, tensor_specs
from islands.arrays.tree import Tree, flatten
from islands.beginning import beginning
from islands.hosts.host_session import HostSession
from islands.hosts.other_hosts import OtherHosts
from islands.hosts.plans import Plans
from islands.hosts.rendezvous import gather, spread_over
from islands.hosts.speaker import SpeakerSession
from islands.interface import arguments
from islands.interface.config import SETTINGS, IslandConfig, JoinOptions, refuse_unknown
from islands.loop import Island
from islands.protocol import core
from islands.protocol.paused import Paused
from islands.session import checkpoint, paused_file
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange
from islands.session.machine import THIS, Machine
from islands.session.session import Session
from islands.session.thread import CommunicationThread

log = logs.get(__name__)

#: How often to say what is waited for, and after which time to begin.
SAY_EVERY_S, SAY_FIRST_S = 5.0, 1.0
#: What those have to be that are numbers or paths; others IslandConfig checks alone.
_SECONDS = "must be a number of seconds"
_NUMBERS = dict.fromkeys(("checkpoint_interval_s", "donor_wait_s", "timeout_s", "broker_silent_s"), _SECONDS)
_COUNTS = {
    "connections": "must be a number of connections",
    "max_message_bytes": "must be a number of bytes",
    "metrics_port": "must be the number of a port, or 0",
}
_PATHS = "key", "state_dir"


def _nothing() -> None:
    """Stands in for a function that nobody has given."""


def join(
    address: str | os.PathLike[str] | Sequence[str],
    params: Tree,
    *,
    init: Callable[[int], Tree] | str | os.PathLike[str] | None = None,
    **options: Unpack[JoinOptions],
) -> Island:
    """Joins a run; returns once version 0 of every fragment is here.

    Where the parameters are spread over the processes of a ``jax.distributed`` job, these are the hosts of one island:
    each of them calls this, and every method of what it returns, at the same steps.

    Args:
        address: The broker's control address, such as ``tcp://hub:7001``; of several brokers a list, or one text with
            commas between them. An island speaks through one of them, and goes on to the next when that falls silent.
            Or the path of a join file, ``paris.join`` (``atoll keys new island paris --join HOST``), which has the
            address, the run and the key.
        params: The tree that the optimizer steps from: any nest of JAX or numpy arrays. Where bfloat16 parameters
            are cast from float32 masters in the optimizer's state, hand over the masters: what :meth:`Island.step`
            returns must be what the next step starts from. If this island is the first, these values become version
            0; otherwise only structure, shapes, dtypes and placement count.
        init: seed -> initial parameters. Where it is given, version 0 is made with the run's own seed. Or the path of
            a trained model that version 0 comes from, as for :func:`islands.load`. Its digest is one of ``inputs``: an
            island that joins with another one is refused, and one without it takes the run's version.
        **options: As follows; in parentheses what stands where one is not given.

    Options:
        run: The run's name ("atoll").
        kinds: Regular expression over parameter names -> ``rda``, ``mean``, ``local``, ``frozen`` or ``base``
            (:mod:`islands.arrays.partition`).
        unit_axes: Regular expression -> leading axes that count layers or experts.
        key: This island's secret key file, with ``broker.public`` beside it (``atoll keys``); needed for a broker on
            another machine.
        insecure: Do without a key there.
        island_id: The name to have. Empty: that of the key; without one the run assigns it, and the same again after a
            restart on this host.
        tokens_per_step: Tokens in one inner step. Where it is given, the run checks counters against it, and knows
            this island's pace in tokens.
        inner_optimizer: Its name, such as ``adamw`` or ``muon``. What the run's recipe leaves open suits that of the
            first island.
        recipe: Settings of the run's recipe that this island insists on, as in the table ``[recipe]``: where the run
            has another value, the island is refused. None: whatever the run has.
        init_partial: Of the model that ``init`` names take what fits by name and shape, and say in the log what does
            not (False: refuse it).
        base: Path of a trained model that every island has on its own disk. The parameters whose kind is ``base`` come
            from it, such as what LoRA adapts: load them before. Training must not move them, and they never travel.
            Digests of the bytes in its files are among ``inputs``, so an island may hold them in another number format.
        inputs: Name -> digest or short value of what else must not differ between islands, such as the tokenizer.
            Those of the first island are the run's; one that has others is refused, and told the first that differs.
        files: Name -> bytes of the small files of the model, such as configuration and tokenizer; 32 MB at most. Those
            of the first island are kept beside the run, which can then be exported where no model is.
        state_dir: Directory for checkpoints of ``state`` as given to :meth:`Island.step`, and for what
            :meth:`Island.pause` keeps; None: neither.
        checkpoint_interval_s: Seconds between two of them (60).
        donor_wait_s: Seconds that :meth:`Island.restore` may look for another island's optimizer state where there is
            no checkpoint that fits (60); 0: start fresh.
        timeout_s: Seconds of silence of the run, or of refusals that may end, after which joining is given up (120);
            also of silence of the end, in :meth:`Island.close`.
        broker_silent_s: Seconds of silence of a broker after which the next one is tried (2).
        connections: TCP connections that tensors are spread over, of each host (1); one cannot fill a link that is
            long and fast (docs/regions.md).
        max_message_bytes: Largest message accepted (0: a quarter of the memory of this machine, at least 4 GiB).
        speaker_address: Of an island of several hosts: the name or address under which the others reach process 0.
            Empty: the address from which that one reaches the broker.
        metrics_port: Port at which this process serves metrics for Prometheus (0: none). Of an island of several hosts
            process 0 serves them.
        metrics_host: Address for that (127.0.0.1); 0.0.0.0 shows them to everybody.
        check: Called several times a second while this waits; what it raises ends the waiting.

    Raises:
        ConfigError: The run refused this island, or an argument cannot work; names the tensor or field and the cure.
        TypeError: An option is none of these; names the nearest.
        RunEnded: The run is over, and its aggregator has gone.
        Unavailable: The run stayed silent, or for all that time had no room or no leader.
    """
    return join_on(THIS, address, params, init=init, **options)


def join_on(
    machine: Machine,
    address: str | os.PathLike[str] | Sequence[str],
    params: Tree,
    *,
    init: Callable[[int], Tree] | str | os.PathLike[str] | None = None,
    **options: Unpack[JoinOptions],
) -> Island:
    """Joins a run from a machine that need not be this one; :func:`join` says all the rest."""
    refuse_unknown(options)
    config = _config(address, options)
    run, island_id = config.run_id, config.island_id
    cure = "must be the tokens of one inner step, or 0 to leave it open"
    tokens_per_step = arguments.whole("tokens_per_step", options.get("tokens_per_step", 0), cure, may_wait=True)
    check = options.get("check", _nothing)
    arguments.function("check", check, "must be a function without arguments")
    begins = beginning(params, init, options)
    params = begins.params
    if config.state_dir is not None:
        checkpoint.prepare(config.state_dir)
    demands = demands_of(arguments.mapping("recipe", options.get("recipe"))) + inputs_demanded(begins.inputs)
    _name_others(run)
    specs = tensor_specs(params, options.get("kinds"), options.get("unit_axes"))
    for line in describe_kinds(specs).splitlines():
        log.info("island.kinds", kind=line)
    tensors = tuple(spec for spec in specs if spec.kind != "local")
    arguments.check_join(tensors, run, config.limits())
    spread = spread_over(flatten(params), tensors)
    array_work = ArrayWork(params, begins.init, several=spread is not None, base=begins.base, machine=machine)
    exchange = Exchange(machine)
    hosts = plans = None
    if spread is not None:
        name = options.get("speaker_address", "")
        contact, link = gather(
            spread, machine, broker=config.brokers[0], speaker_address=name, within_s=config.join_timeout_s
        )
        plans = Plans(exchange, speaks=link is not None)
        if link is None:
            other = HostSession(config, spread, contact, tokens_per_step, plans, array_work, exchange)
            return _started(other, config, array_work, exchange, tokens_per_step, check, plans=plans)
        hosts = OtherHosts(spread, contact, link, tokens_per_step, plans, exchange)
    host = None if island_id else HostIdentity.take(run)
    own, release = (island_id, _nothing) if host is None else (host.name, host.release)
    unmerged = paused_file.path_of(config.state_dir, run, own) if config.state_dir is not None and own else None
    paused = None if unmerged is None else _kept(unmerged, config)
    island_core = core.Island(
        island_id=island_id,
        hint="" if host is None else host.name,
        nonce=chance.hexadecimal(8),
        tensors=tensors,
        tokens_per_step=tokens_per_step,
        inner_optimizer=options.get("inner_optimizer", ""),
        demands=demands,
        brokers=len(config.brokers),
        broker_silent_s=config.broker_silent_s,
        paused=paused,
        files=begins.files,
        several_hosts=hosts is not None,
    )
    sequence = 0 if paused is None else paused.sequence
    session = (
        Session(config, island_core, array_work, exchange, sequence=sequence)
        if hosts is None
        else SpeakerSession(config, island_core, array_work, exchange, hosts, sequence=sequence)
    )
    try:
        kept = None if hosts else unmerged
        island = _started(session, config, array_work, exchange, tokens_per_step, check, release, kept, plans)
    except BaseException:
        session.leave("gave up joining", Departure.STOPPED if unmerged is None else Departure.PAUSED)
        if unmerged is not None and (again := session.paused()) is not None:
            array_work.keep(unmerged, again)
        release()
        raise
    if unmerged is not None:
        paused_file.remove(unmerged)
    _joined.append((weakref.ref(island), run, threading.get_ident()))
    return island


def begin(
    address: str | os.PathLike[str] | Sequence[str],
    params: Tree,
    opt_state: Any = None,
    *,
    init: Callable[[int], Tree] | str | os.PathLike[str] | None = None,
    **options: Unpack[JoinOptions],
) -> tuple[Island, Tree, Any]:
    """Joins a run and restores; returns the island, the run's parameters, and the optimizer's state.

    It is :func:`join`, whose arguments it takes, and :meth:`Island.restore`, whose errors it raises, too.
    """
    island = join(address, params, init=init, **options)
    try:
        return island, *island.restore(params, opt_state)
    except BaseException as err:
        island.leave(f"failed: {type(err).__name__}")
        raise


class HostIdentity:
    """A name of host and number that survives a restart, and is no other process's here meanwhile.

    A restarted process gets its island's id again by it. The number is the lowest whose lock file is free. Where there
    is no place for a lock, there is no such name. A host of the same name, or another temporary directory of this one,
    may give it away as well: the run decides what it is worth.
    """

    def __init__(self, name: str, lock: int) -> None:
        self.name = name
        self._lock = lock
        # Else the workers of a killed process, if they live on, would hold its name against the next one.
        self._forget = in_children(self.release)

    @classmethod
    def take(cls, run: str) -> HostIdentity | None:
        """Returns a free name of this host, or None if locks cannot be taken here."""
        for number in range(1000):
            try:
                lock = user_files.lock(f"seat-{run}-{number}")
            except BlockingIOError:
                continue
            return None if lock is None else cls(f"{socket.gethostname()}/{number}", lock)
        return None

    def release(self) -> None:
        """Lets another process have it; a forked child lets its parent have it alone."""
        self._forget()
        os.close(self._lock)


#: Islands that this process has joined, each with its run and the thread that joined it.
_joined: list[tuple[weakref.ref[Island], str, int]] = []


def _name_others(run: str) -> None:
    """Warns of islands of the run that this thread has joined and not left, and steps no more.

    A notebook's cell that is run again leaves one behind, which lives on and makes no steps.
    """
    here = run, threading.get_ident()
    for island in [island for island, *by in _joined if tuple(by) == here]:
        other = island()
        if other is None or other.left:
            continue
        cure = "call its leave() first, unless this thread steps both"
        detail = f"this thread is an island of the run already, at step {other.inner_step}: {cure}"
        log.warning("island.joined_before", run=run, island=other.id, detail=detail)


def _started(
    session: CommunicationThread,
    config: IslandConfig,
    array_work: ArrayWork,
    exchange: Exchange,
    tokens_per_step: int,
    check: Callable[[], None],
    release: Callable[[], None] = _nothing,
    unmerged: Path | None = None,
    plans: Plans | None = None,
) -> Island:
    """Starts a session; returns the island once version 0 of every fragment is here."""
    session.start()
    try:
        _wait_until_startable(exchange, config, check)
    except ConfigError as err:
        if plans is not None:
            plans.refused(err)
        raise
    return Island(
        config=config,
        session=session,
        array_work=array_work,
        exchange=exchange,
        tokens_per_step=tokens_per_step,
        check=check,
        release=release,
        unmerged=unmerged,
        between=None if plans is None else AgreedSteps(array_work, exchange, plans),
    )


def _kept(path: Path, config: IslandConfig) -> Paused | None:
    """Returns what an earlier process of this island has kept for this one, if anything."""
    try:
        return paused_file.load(path, config.limits())
    except Unavailable as err:
        log.warning("progress.lost", detail=str(err))
        return None


def _config(address: str | os.PathLike[str] | Sequence[str], options: JoinOptions) -> IslandConfig:
    """Returns the settings of an island; its errors name the arguments of :func:`join`."""
    if isinstance(address, str | os.PathLike) and os.fspath(address).endswith(JOIN):
        joins = expanded("address", Path(address))
        file = JoinFile.read(joins)
        if options.get("run", file.run_id) != file.run_id:
            raise ConfigError("run", options["run"], f"does not go with {joins}, which is for {file.run_id}")
        address, options = file.broker, {"key": joins, **options, "run": file.run_id}
    settings: dict[str, Any] = {"broker": arguments.addresses(address)}
    for name, value in options.items():
        if name in _PATHS and (path := arguments.path(name, value)) is not None:
            value = expanded(name, path)
        elif name in _NUMBERS:
            value = arguments.number(name, value, _NUMBERS[name])
        elif name in _COUNTS:
            value = arguments.whole(name, value, _COUNTS[name])
        setting = SETTINGS.get(name, name)
        if setting in IslandConfig.__dataclass_fields__:
            settings[setting] = value
    settings["island_id"] = settings.get("island_id") or own_name(settings.get("key"))
    settings["max_message_bytes"] = settings.get("max_message_bytes") or room_bytes(memory_bytes())
    try:
        return IslandConfig(**settings)
    except ConfigError as err:
        cure = err.cure.replace("--key", "key=").replace("--insecure", "insecure=True")
        arguments_of = {"broker": "address", **{setting: name for name, setting in SETTINGS.items()}}
        raise ConfigError(arguments_of.get(err.field, err.field), err.value, cure) from err


def _wait_until_startable(exchange: Exchange, config: IslandConfig, check: Callable[[], None]) -> None:
    began_s = clocks.monotonic()
    say_at_s = began_s + SAY_FIRST_S
    while not exchange.startable:
        now_s = clocks.monotonic()
        if now_s - max(began_s, exchange.heard_at_s or 0.0) > config.join_timeout_s:
            raise Unavailable(f"cannot join run {config.run_id}: {_why_not(exchange, config)}", definite=True)
        if now_s >= say_at_s:
            say_at_s = now_s + SAY_EVERY_S
            refused = exchange.refused
            detail = exchange.doing if refused is None else f"refused for now, {refused.reason}: {refused.detail}"
            log.info("island.waiting", broker=config.broker, detail=detail, waited_s=round(now_s - began_s, 1))
        exchange.wait(check)


def _why_not(exchange: Exchange, config: IslandConfig) -> str:
    """Says for people why joining is given up, and what would help."""
    refused = exchange.refused
    if refused is not None:
        cure = "; start the aggregator of the run" if refused.reason is Reason.NOT_LEADER else ""
        last = f"{refused.reason}: {refused.detail}{cure}"
        return f"{config.broker} took no join for {config.join_timeout_s:g} s, and said at last {last}"
    cure = "start the broker and the aggregator of the run there, or check the address and the firewall between"
    if config.key is not None or config.insecure:
        cure += "; a broker that does not let this key in says so in its own log"
    return f"{config.broker} was silent for {config.join_timeout_s:g} s while {exchange.doing}; {cure}"
