"""Finds an island's speaker for its hosts, by a broadcast of the framework that joined them. Shell.

The speaker listens, and tells all others the address, keys and a token. That is the only collective operation of ours,
and no step has been run by then.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import msgpack
import zmq

from broker.base.errors import ConfigError, Unavailable
from broker.process import chance
from broker.wire.fragments import TensorSpec
from islands.arrays.in_place import is_in_place, region_here
from islands.arrays.regions import HeldTensor
from islands.arrays.tree import loaded_jax
from islands.hosts.link import Contact, SpeakerLink, listen
from islands.session.machine import Machine

#: Bytes of the broadcast: every host hands over an array of the same length.
_BROADCAST_BYTES = 1024
#: Returns on every host the bytes that host 0 has given.
Broadcast = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralHosts:
    """An island's parameters are spread over several hosts.

    Attributes:
        host: Which one this is, from 0: the speaker.
        hosts: How many there are.
        tensors: What is trained, with the regions that are here.
        broadcast: Of the framework that has brought them together.
    """

    host: int
    hosts: int
    tensors: tuple[HeldTensor, ...]
    broadcast: Broadcast


def gather(
    spread: SeveralHosts, machine: Machine, *, broker: str, speaker_address: str, within_s: float
) -> tuple[Contact, SpeakerLink | None]:
    """Returns how to reach the speaker, and at the speaker its end, once every host has called this.

    Args:
        spread: Over which hosts.
        machine: That this one runs on.
        broker: Address of the broker: by default the speaker is reached where this machine reaches the broker from.
        speaker_address: A name or an address of the speaker's machine, where that is wrong.
        within_s: How long the others may take.

    Raises:
        ConfigError: The speaker cannot listen at ``speaker_address``.
        Unavailable: Some host did not come in time.
    """
    link, said = None, b""
    if spread.host == 0:
        name = speaker_address or _way_to(broker)
        try:
            interface = "127.0.0.1" if name in ("127.0.0.1", "localhost") else "*"
            link, port, public = listen(machine.context(), interface, spread.hosts)
        except zmq.ZMQError as err:
            raise ConfigError("speaker_address", name, f"nobody can listen there ({err})") from err
        own, secret = zmq.curve_keypair()
        contact = Contact(
            address=f"tcp://{f'[{name}]' if ':' in name else name}:{port}",
            speaker_public=public,
            public=own.decode(),
            secret=secret.decode(),
            token=chance.hexadecimal(16),
        )
        said = msgpack.packb(asdict(contact))
    try:
        told = machine.within(within_s, lambda: spread.broadcast(said.ljust(_BROADCAST_BYTES, b"\0")))
    except TimeoutError as err:
        cure = "call islands.join on every host, with the same arguments, and look why one of them does not"
        missing = f"not all {spread.hosts} hosts of this island have joined within {within_s:g} s"
        raise Unavailable(f"{missing}: {cure}", definite=True) from err
    return Contact(**msgpack.unpackb(told.rstrip(b"\0"))), link


def _way_to(broker: str) -> str:
    """Returns the address of this machine from which it reaches the broker."""
    where = urlsplit(broker)
    try:
        family, _, _, _, to = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(to)  # sends nothing: only asks for the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def spread_over(leaves: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> SeveralHosts | None:
    """Returns the hosts that train these parameters together: the processes of a job of JAX or PyTorch.

    None: this process alone has them.

    Args:
        leaves: The parameters, by name.
        tensors: Those that are synchronised.

    Raises:
        ConfigError: They are spread over some of the processes only, or mixed with arrays of numpy.
    """
    first = next(iter(leaves.values()), None)
    if is_in_place(first):
        found = first.processes()
        if found is None:
            return None
        here = ((each, region_here(leaves[each.name])) for each in tensors)
        held = tuple(HeldTensor(tensor=each, regions=(region,) if region.size else ()) for each, region in here)
        return SeveralHosts(host=found[0], hosts=found[1], tensors=held, broadcast=found[2])
    jax = loaded_jax()
    return None if jax is None else _spread_over_jax(leaves, tensors)


# --- JAX --------------------------------------------------------------------------------------------------------


def _spread_over_jax(leaves: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> SeveralHosts | None:
    import jax

    places = {
        name: {device.process_index for device in leaf.sharding.device_set}  # type: ignore[attr-defined]
        for name, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    }
    if not places:
        return None
    everyone = set(range(jax.process_count()))
    for name, processes in places.items():
        if processes != everyone:
            some = ", ".join(map(str, sorted(processes)))
            cure = f"an island is all {len(everyone)} processes of a job: spread it over a mesh of jax.devices()"
            raise ConfigError(f"params {name}", f"on the devices of processes {some}", cure)
    from islands.arrays.host_shards import held_tensors

    def broadcast(said: bytes) -> bytes:
        import numpy as np
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(said, np.uint8))).tobytes()

    held = held_tensors(tensors, leaves)
    return SeveralHosts(host=jax.process_index(), hosts=jax.process_count(), tensors=held, broadcast=broadcast)
