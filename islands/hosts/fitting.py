"""Checks that hosts make one island: the same tensors, and regions that are the whole of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.wire.errors import ConfigError
from broker.wire.fragments import Region, TensorSpec, flaw_in
from islands.hosts.messages import HeldTensor, Hello
from islands.hosts.regions import owners

#: Tensor -> its regions, each with the host that hands it over.
Owners = dict[str, dict[Region, int]]


def check_alike(ours: Sequence[HeldTensor], tokens_per_step: int, host: int, hello: Hello) -> None:
    """Checks that a host trains what the speaker trains.

    Args:
        ours: The speaker's tensors.
        tokens_per_step: The speaker's.
        host: Whose word it is.
        hello: The word.

    Raises:
        ConfigError: It does not: names the tensor, and what both have.
    """
    one = {each.tensor.name: each.tensor for each in ours}
    other = {each.tensor.name: each.tensor for each in hello.tensors}
    cure = "give all hosts of an island the same model"
    for name in [*one, *other]:
        if name not in one or name not in other:
            who = "the speaker" if name in one else f"host {host}"
            raise ConfigError(f"params {name}", f"only {who} has it", cure)
        if one[name] != other[name]:
            value = f"{_shown(one[name])} at the speaker, {_shown(other[name])} at host {host}"
            raise ConfigError(f"params {name}", value, cure)
    if hello.tokens_per_step != tokens_per_step:
        value = f"{tokens_per_step} at the speaker, {hello.tokens_per_step} at host {host}"
        raise ConfigError("tokens_per_step", value, "give all hosts that of the whole island")


def owners_of(tensors: Mapping[int, Sequence[HeldTensor]]) -> Owners:
    """Returns which host hands over which region of each tensor.

    Args:
        tensors: Of every host, the same ones.

    Raises:
        ConfigError: The regions are not the whole of a tensor, each element once: names it.
    """
    found: Owners = {}
    for each in tensors[0]:
        name = each.tensor.name
        by_host = {host: one.regions for host, held in tensors.items() for one in held if one.tensor.name == name}
        found[name] = owners(by_host)
        flaw = flaw_in(tuple(found[name]), each.tensor.shape)
        if flaw:
            value = f"the regions of {len(tensors)} hosts do not make it: {flaw}"
            raise ConfigError(f"params {name}", value, "give all hosts the same mesh and the same layout")
    return found


def handed_by(host: int, owned: Owners) -> dict[str, frozenset[Region]]:
    """Returns the regions of each tensor that one host hands over."""
    return {
        name: frozenset(region for region, owner in regions.items() if owner == host) for name, regions in owned.items()
    }


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} ({tensor.kind}, {tensor.unit_axes} unit axes)"
