"""Writes a run's model as other tools read it: for Hugging Face, Orbax or torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.store.layout import model_path, read_run
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.process.demands import BASE, other_input
from broker.wire.messages import recipe_line
from islands.interface.config import LANGUAGE
from ops.models.global_model import DTYPES, GlobalModel, read_model, stores_of

#: (name -> values, the new directory, number format, whether adapters are merged into their base) -> nothing.
Save = Callable[[Mapping[str, Any], Path, str, bool], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of formats other than one safetensors file; one at a time."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--hf", type=sources.as_path, metavar="DIR", help="write a model's directory for from_pretrained")
    one.add_argument("--orbax", type=sources.as_path, metavar="DIR", help="write an Orbax checkpoint")
    one.add_argument("--dcp", type=sources.as_path, metavar="DIR", help="write a torch distributed checkpoint")
    parser.add_argument(
        "--merge", action="store_true", help="with --hf, of a run of adapters: merge them into their base"
    )
    help_ = "with --hf: file that names the task, of islands elsewhere (default: that of RUN_DIR, or what they sent)"
    parser.add_argument("--config", type=sources.as_path, metavar="FILE", help=help_)
    parser.add_argument(
        "--base", type=sources.as_path, metavar="DIR", help="with --hf: where the model is here that the run began with"
    )


def wanted(args: argparse.Namespace) -> bool:
    """Returns True if a flag asks for one of these formats.

    Raises:
        ConfigError: A flag stands without the one that it goes with.
    """
    for name in ("merge", "base", "config"):
        if getattr(args, name) and args.hf is None:
            raise ConfigError(name, getattr(args, name), "goes with --hf DIR")
    return any(getattr(args, name) is not None for name in ("hf", "orbax", "dcp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A model's directory: where it is, and what is in it."""

    path: str
    run_id: str
    versions: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"{self.path}: run {self.run_id}, fragment versions {' '.join(map(str, self.versions))}"


def write(args: argparse.Namespace, directory: Path, stores: Sequence[Sequence[Path]]) -> Written:
    """Writes the newest model in stores in the format that flags ask for.

    Args:
        args: As :func:`add_flags` declares them, with ``dtype``.
        directory: Of the run: its ``config.toml`` names the task, which knows how its model is saved.
        stores: Of each shard its stores, or those of a snapshot.

    Raises:
        ConfigError: The task does not know its model, a base is another one, or the place is taken.
        Unavailable: There is no model yet, or something cannot be written.
    """
    folder: Path = args.hf or args.orbax or args.dcp
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "hf" if args.hf else "orbax" if args.orbax else "dcp", str(folder), "is there: name a new one"
        )
    save = _saver(args, directory, stores[0][0])
    model = read_model(stores)
    # Whole or not at all: whoever finds the directory finds all of it.
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save(model, part)
        for each in part.rglob("*"):
            each.chmod(0o755 if each.is_dir() else 0o644)  # some libraries leave files to their owner alone
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except OSError as err:
        raise Unavailable(f"cannot write {folder} ({err.strerror or err}): {cure_of(err)}", definite=True) from err
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Written(path=str(folder), run_id=model.run_id, versions=model.versions, digest=model.digest)


def _saver(args: argparse.Namespace, directory: Path, store: Path) -> Callable[[GlobalModel, Path], None]:
    if args.hf is None:
        module = "islands.weights.orbax" if args.orbax else "islands.torch.checkpoints"
        write_checkpoint = importlib.import_module(module).write
        dtype = DTYPES[args.dtype]
        return lambda model, folder: write_checkpoint(
            {name: array.astype(dtype, copy=False) for name, array in model.tensors.items()}, folder
        )
    config = args.config or directory / "config.toml"
    tables = sources.read_file(config) if args.config or config.is_file() else {}
    options = dict(tables.get("task", {})) | ({} if args.base is None else {"model": str(args.base)})
    name = tables.get("island", {}).get("task", LANGUAGE)
    kept = next((path for path in map(model_path, stores_of(directory)[0]) if path.is_dir()), None)
    if kept is not None and name == LANGUAGE and args.config is None and args.base is None:  # of a hub's islands
        from islands.tasks.task import named_function

        of_files = named_function("islands.hf.saving:of_files", field="hf", kind="ours")
        write_model: Save = of_files(kept)
    elif tables:
        write_model = _of_task(args, name, options, store)
    else:
        cure = "is not there, and names the task that knows the model: give --config, as islands have it"
        raise ConfigError("config", str(config), cure)

    def save(model: GlobalModel, folder: Path) -> None:
        folder.mkdir()
        (folder / "README.md").write_text(_card(model, directory, options), "utf-8")
        write_model(model.tensors, folder, args.dtype, args.merge)

    return save


def _of_task(args: argparse.Namespace, name: str, options: Mapping[str, Any], store: Path) -> Save:
    from islands.tasks.task import load_task  # after the flags are checked: the task loads its libraries

    task = load_task(name, options)
    if task.save is None:
        cure = f"is for tasks that know their model, as islands.hf:task does; this run trained {name}: --out FILE"
        if name == LANGUAGE:
            cure += ", or --config with the task of its islands; the small files of its model have not come here"
        raise ConfigError("hf", str(args.hf), cure)
    record = read_run(store) or {}
    begun: Mapping[str, str] = record.get("inputs", {})
    ours, theirs = ({n: d for n, d in each.items() if n.startswith(BASE)} for each in (begun, task.inputs))
    if difference := other_input(ours, theirs):
        raise ConfigError("base", options.get("model", ""), f"is not what the run began with: {difference}")
    return task.save


def _card(model: GlobalModel, directory: Path, options: Mapping[str, Any]) -> str:
    """Returns a model card: what it was trained from, by which run, and how well it does."""
    try:
        report = json.loads((directory / "report.json").read_text("utf-8"))
    except (OSError, ValueError):
        report = {}
    began = str(options.get("model", ""))
    source = f" from {Path(began).name}" if began else ""
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {began}"] if began and "/" in began and not began.startswith((".", "/")) else []),
        "---",
        "",
        f"# {model.run_id}",
        "",
        f"Trained by Atoll{source}: run `{model.run_id}`, {model.tokens:,} tokens,",
        f"fragment versions {' '.join(map(str, model.versions))}, digest `{model.digest}`.",
        "",
    ]
    if recipe := report.get("recipe"):
        lines.append(f"* Recipe: {recipe_line(recipe)}")
        lines += [f"* {name}: `{value}`" for name, value in recipe.get("inputs", {}).items()]
    for name, each in report.get("metrics", {}).items():
        # One that only later evaluations have, as of a harness beside the run, has no value before.
        known = [f"{each[when]:.4f} {when}" for when in ("before", "after") if each[when] is not None]
        lines += [f"* Held-out {name}: {', '.join(known)}"] if known else []
    return "\n".join(lines) + "\n"
