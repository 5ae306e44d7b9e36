"""The beginning of an island: version 0 from a file, a base from its own disk, and digests of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.base.errors import ConfigError
from broker.base.settings import expanded
from broker.process import logs
from broker.process.demands import BASE, FILES, INIT, has_base
from broker.wire import small_files
from broker.wire.small_files import Packed
from islands.arrays.partition import OF_BASE, names_of_base
from islands.arrays.tree import Tree
from islands.interface import arguments
from islands.interface.config import JoinOptions
from islands.tasks.model_file import filled
from islands.weights.files import grouped, open_weights

log = logs.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The parameters that an island joins with.

    Attributes:
        params: With the values of the model that ``init`` names.
        init: seed -> initial parameters, where version 0 is to be made with the run's seed.
        base: Names of the parameters that never travel, since every island has them on its disk.
        inputs: Name -> digest of what must not differ between islands.
        files: The small files of the model, for the wire.
    """

    params: Tree
    init: Callable[[int], Tree] | None
    base: tuple[str, ...]
    inputs: Mapping[str, str]
    files: Packed


def beginning(
    params: Tree, init: Callable[[int], Tree] | str | os.PathLike[str] | None, options: JoinOptions
) -> Beginning:
    """Returns what an island begins with; the arguments are those of :func:`islands.join`.

    Raises:
        ConfigError: A model cannot be read or does not fit; or a base is named and no parameter of it, or the other way
            round.
    """
    inputs = dict(arguments.mapping("inputs", options.get("inputs")))
    if isinstance(init, str | os.PathLike):
        weights = open_weights(expanded("init", Path(init)))
        inputs[INIT] = weights.digest
        log.info("island.init", model=str(weights.path), tensors=len(weights), digest=weights.digest)
        partial = options.get("init_partial", False)
        cure = "name the model that this task trains, or take what fits (--init-partial, or init_partial=True)"
        kinds, source = options.get("kinds"), str(weights.path)
        params = filled(params, weights, kinds, source=source, cure=cure, partial=partial, field="init")
        init = None
    elif init is not None:
        cure = "must be a function: seed -> initial parameters, or the path of a trained model"
        arguments.function("init", init, cure)
    base = names_of_base(params, options.get("kinds"))
    path = arguments.path("base", options.get("base"))
    if base and path is None and not has_base(inputs):
        cure = "is of the base: name the model that every island has it from (base=PATH)"
        raise ConfigError(f"kinds of {base[0]}", OF_BASE, cure)
    if path is not None:
        if not base:
            cure = "has no parameter that comes from it: say which do (kinds={'PATTERN': 'base'})"
            raise ConfigError("base", str(path), cure)
        digests = open_weights(expanded("base", path), field="base").digests
        inputs |= {BASE + name: digest for name, digest in grouped(digests).items()}
    given = dict(arguments.mapping("files", options.get("files")))
    if flaw := small_files.flaw_in({name: len(content) for name, content in given.items()}):
        raise ConfigError("files", f"{len(given)} files", flaw)
    files = small_files.packed_for_wire(given)
    if given:
        inputs[FILES] = files[0]
    return Beginning(params=params, init=init, base=base, inputs=inputs, files=files)
