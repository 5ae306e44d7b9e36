"""Makes a frozen set with the code of this tree. Another tree's code must make the same of it, or read the same in it.

A set is a folder::

    expected.json            the outcome of each replay, digests of the store's and the checkpoint's values
    tapes/NAME.tar.xz        the directory of one run: tapes, payloads and stores
    store.tar.xz             an aggregator's store
    island-0.checkpoint      an island's checkpoint
    frames.txt               messages as they travel: kind, then each frame in hex
    help/COMMAND.txt.gz      what --help-all prints

The small set, which the repository keeps, has no help. No file has a time of day, and the same tree makes the same
files again.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from aggregator.store.store import Store
from broker.wire import messages as m
from broker.wire.frames import encode
from broker.wire.messages import KINDS, Envelope, kind_of
from islands.session import checkpoint
from islands.session.training_state import Position, Snapshot
from ops import cli
from tests.envelopes import envelope, values
from tests.frozen.taped_runs import RUNS, SMALL, initial, record, step
from tests.unit.broker_wire.test_protocol_document import EXAMPLES

#: Messages of each kind: from runs, and drawn ones. Longest line with one: what is looked at is the form of a message.
SPOKEN, DRAWN, LONGEST = 3, 2, 4000
CHECKPOINT = "island-0.checkpoint"


def make(to: Path, *, small: bool) -> None:
    """Writes a set into a new folder; a small one has the smaller runs alone, and no help."""
    (to / "tapes").mkdir(parents=True)
    frames, expected = Frames(), {"tapes": {}}
    with tempfile.TemporaryDirectory(prefix="frozen-") as made:
        for name in SMALL if small else RUNS:
            print(f"tape {name}", flush=True)
            record(Path(made) / name, frames.said, **RUNS[name])
            expected["tapes"][name] = replayed(Path(made) / name)
            pack(Path(made) / name, to / "tapes" / f"{name}.tar.xz")
        pack(Path(made) / "plain" / "store", to / "store.tar.xz")
    with unpacked(to / "store.tar.xz") as store:
        expected["store"] = values_of_store(store)
    local = (np.arange(6, dtype=np.float32).reshape(2, 3),)
    snapshot = Snapshot(state=checkpoint.copied(_trained(5)), cursor=5, local=local, run_id="frozen")
    checkpoint.save(to / CHECKPOINT, snapshot, ["local/counts"], Position(5, 500), 2, checkpoint.Newest())
    expected["checkpoint"] = values_of_checkpoint(to / CHECKPOINT)
    (to / "frames.txt").write_text("\n".join([*frames.lines(), ""]), encoding="utf-8")
    (to / "expected.json").write_text(in_lines(expected), encoding="utf-8")
    if not small:
        (to / "help").mkdir()
        for name, text in helps().items():
            (to / "help" / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def in_lines(value: Any) -> str:
    """Returns plain data as text in which a difference has a line of its own."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def pack(folder: Path, to: Path) -> None:
    """Packs a folder without owners and times, in the order of names."""
    with tarfile.open(to, "w:xz") as file:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size = path.stat().st_size
            file.addfile(info, io.BytesIO(path.read_bytes()))


@contextlib.contextmanager
def unpacked(packed: Path) -> Iterator[Path]:
    """Yields a temporary folder with what was packed."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as made, tarfile.open(packed) as file:
        file.extractall(made, filter="data")
        yield Path(made)


# --- tapes, stores, checkpoints -----------------------------------------------------------------------------------


def replayed(run_dir: Path) -> Any:
    """Returns what ``atoll replay`` says of a run, what differs first of all, without the folder it lies in."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["replay", str(run_dir), "--json"])
    said = json.loads(out.getvalue().replace(f"{run_dir}/", "") or "{}")
    wrong = [each["difference"]["what"] for each in said.get("tapes", ()) if each["difference"]]
    return {"differences": "; ".join([*wrong, *err.getvalue().splitlines()]), "said": said, "status": status}


def digest(value: Any) -> str:
    """Returns a digest of a text, or dtype, shape and a digest of an array's bytes."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()[:16]
    return f"{value.dtype}{list(value.shape)} {hashlib.sha256(np.ascontiguousarray(value)).hexdigest()[:16]}"


def values_of_store(directory: Path) -> dict[str, Any]:
    """Opens a store as an aggregator does; returns digests of run record and ledger, and of each array by name."""
    found = {}
    with Store.open(directory) as store:
        loaded = store.load()
        for p, commit in sorted(loaded.fragments.items()):
            state = store.newest_file(p).verified()._asdict()
            arrays = {name: array for name, array in state.items() if isinstance(array, np.ndarray)}
            found |= {f"{p}:{commit.fragment_version} {name}": digest(array) for name, array in arrays.items()}
    rows = [json.loads(line) for line in (directory / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    return found | {"run": digest(in_lines(loaded.run)), "ledger": digest(in_lines(rows))}


def _trained(steps: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns an optimizer's state with leaves of all sorts, so many steps later; the parameters are in it."""
    if state is None:
        params, momentum = initial(1)
        state = {"params": params, "momentum": momentum, "count": 0, "half": jnp.full(3, 1.5, jnp.bfloat16)}
        state["key"] = jax.random.key(7)
    for _ in range(steps):
        params, momentum = step(state["params"], state["momentum"], state["count"])
        state = state | {"params": params, "momentum": momentum, "count": state["count"] + 1}
    return state


def values_of_checkpoint(path: Path) -> dict[str, Any]:
    """Opens a checkpoint and goes on from it for three steps; returns its values' digests, and those after that."""
    found, fresh = checkpoint.load(path), _trained(0)
    at = [found.run_id, found.incarnation, found.cursor, found.at.step, found.at.tokens]
    arrays = {f"{name} {sort}": digest(array) for name, sort, array in (*found.state, *found.local)}
    misfit = checkpoint.misfit(found.state, checkpoint.leaves_of(fresh))
    state = _trained(3, checkpoint.restored(fresh, found.state))
    after = {f"{part}/{name}": digest(x) for part in ("params", "momentum") for name, x in state[part].items()}
    return {"at": at, "values": arrays, "misfit": misfit, f"at step {state['count']}": after}


# --- frames -------------------------------------------------------------------------------------------------------


class Frames:
    """Collects messages: the protocol's examples, the first ones that runs send, and drawn ones of every kind."""

    def __init__(self) -> None:
        self._lines = [f"{json.loads(written)['kind']} {' '.join(frames.split())}" for written, frames in EXAMPLES]
        self._counts: Counter[str] = Counter()

    def said(self, sent: Envelope) -> None:
        """Takes one message of a run, unless there are enough of its kind."""
        kind = kind_of(sent.message)
        if self._counts[kind] < SPOKEN:
            self._counts[kind] += 1
            self._lines.append(frame_line(sent))

    def lines(self) -> list[str]:
        """Returns a line for each message."""
        return [*self._lines, *(line for kind in sorted(KINDS) for line in _drawn(kind))]


def frame_line(sent: Envelope) -> str:
    """Returns kind and frames of a message, in hex; an empty frame is a dash."""
    return " ".join([kind_of(sent.message), *(bytes(frame).hex() or "-" for frame in encode(sent))])


def _drawn(kind: str) -> list[str]:
    """Returns the longest of some messages that the annotations allow; the same ones each time."""
    lines: set[str] = set()
    quiet = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}

    @settings(derandomize=True, max_examples=30, phases=[Phase.generate], **quiet)
    @given(values(KINDS[kind], ""))
    def draw(message: m.Message) -> None:
        lines.add(frame_line(envelope(message)))

    draw()
    return sorted((line for line in lines if len(line) < LONGEST), key=lambda line: (len(line), line))[-DRAWN:]


# --- help ---------------------------------------------------------------------------------------------------------


def helps() -> dict[str, str]:
    """Returns command -> its whole help, with that of its subcommands."""
    found = {"atoll": cli.overview("atoll")}
    for name, command in cli.COMMANDS.items():
        parser = cli.parser_of(name)
        importlib.import_module(command.module).add_arguments(parser)
        found[name] = "\n".join(_helps(parser))
    return found


def _helps(parser: Any) -> Iterator[str]:
    yield parser.format_help_all()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _helps(each)
