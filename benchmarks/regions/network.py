"""Makes the regions and carries their packets: network namespaces with a TUN device as only way out.

Nothing outside these namespaces is changed, and they are gone with this process. Root is not needed where users may
make namespaces of their own. This kernel's delays (netem) are not needed either: packets are held back here. Programs
in a region see real TCP of the kernel over a device with an address; nothing is proxied.

As a process it is told as JSON what to make. It prints the process numbers of the regions, then what passed for every
line it reads, until its standard input ends.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from benchmarks.fleet import ROOT_ENVIRONMENT, module_command
from benchmarks.regions.links import Core, Shape
from broker.base.errors import Unavailable

MTU = 9000  #: bytes of a packet, at most
#: Of the carrier: a packet that leaves late because training has the processor would not be the link's doing.
NICE = -10
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_FLAGS = 0x8916, 0x891C, 0x8922, 0x8914
_UP_AND_RUNNING = 0x41
_DEVICE = b"wan"
_PACKET = 65_536


def address(region: int) -> str:
    """Returns the address of a region."""
    return f"10.77.0.{region + 1}"


class Network:
    """The regions, as others see them.

    Attributes:
        pids: A process in each region, which holds its namespaces.
    """

    def __init__(self, process: subprocess.Popen[str], pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._process = process

    def inside(self, region: int, command: Sequence[str]) -> list[str]:
        """Returns the command that runs ``command`` in a region."""
        own = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.pids[region]), *own, "-n", "-u", "--", *command]

    def counted(self) -> dict[str, Any]:
        """Returns bytes up and down of every region so far, with IP and TCP headers, and packets dropped.

        Raises:
            Unavailable: The carrier has ended.
        """
        try:
            _stdin(self._process).write("\n")
            _stdin(self._process).flush()
        except OSError as err:
            raise Unavailable("the carrier of the regions' packets has ended", definite=True) from err
        return _line(self._process)


@contextmanager
def regions(number: int, *, round_trip_ms: float, mbit: float) -> Iterator[Network]:
    """Makes regions for the body of a ``with`` block.

    Raises:
        Unavailable: This machine does not let us, with what it said.
    """
    told = {"regions": number, "round_trip_ms": round_trip_ms, "mbit": mbit}
    with subprocess.Popen(
        module_command("benchmarks.regions.network", json.dumps(told)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ROOT_ENVIRONMENT,
    ) as process:
        try:
            yield Network(process, _line(process)["pids"])
        finally:
            with contextlib.suppress(OSError):
                _stdin(process).close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line:
        said = process.stderr.read()[-600:].strip()
        cure = "it needs /dev/net/tun, and root or leave to make user namespaces"
        raise Unavailable(f"regions cannot be made here ({cure}): {said}", definite=True)
    found: dict[str, Any] = json.loads(line)
    return found


# --- the carrier ----------------------------------------------------------------------------------------------------


def _carry(devices: Sequence[int], core: Core) -> None:
    """Carries packets until standard input ends."""
    poll = select.epoll()
    by_fd = {fd: i for i, fd in enumerate(devices)}
    for fd in devices:
        os.set_blocking(fd, False)
        poll.register(fd, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN)
    while True:
        next_s = core.next_s()
        for fd, _ in poll.poll(-1 if next_s is None else max(0.0, next_s - time.monotonic())):
            region = by_fd.get(fd)
            if region is None:
                if not os.read(sys.stdin.fileno(), 64):
                    return
                print(json.dumps(_counts(core)), flush=True)
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    core.offer(region, os.read(fd, _PACKET), time.monotonic())
        for region, packet in core.take(time.monotonic()):
            with contextlib.suppress(OSError):  # the device is down: so the packet is lost
                os.write(devices[region], packet)


def _counts(core: Core) -> dict[str, Any]:
    return {
        "up_bytes": [each.passed_bytes for each in core.up],
        "down_bytes": [each.passed_bytes for each in core.down],
        "dropped": [a.dropped + b.dropped for a, b in zip(core.up, core.down, strict=True)],
    }


def _hold(region: int, channel: socket.socket) -> None:
    """In the namespaces of a region: makes its device, hands it over, and stays until the carrier ends."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, text in ((_SET_ADDRESS, address(region)), (_SET_MASK, "255.255.255.0")):
            name = struct.pack("16sH2x4s8x", _DEVICE, socket.AF_INET, socket.inet_aton(text))
            fcntl.ioctl(control, request, name)
        fcntl.ioctl(control, _SET_MTU, struct.pack("16si20x", _DEVICE, MTU))
        for name in (_DEVICE, b"lo"):
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", name, _UP_AND_RUNNING))
    # Gloo takes the address that the host's name stands for.
    host = address(region).encode()
    if ctypes.CDLL(None, use_errno=True).sethostname(host, len(host)):
        raise OSError(ctypes.get_errno(), "sethostname")
    channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    channel.recv(1)  # until the carrier is gone


def _start(region: int) -> tuple[subprocess.Popen[bytes], int, socket.socket]:
    """Returns the process that holds a region, its device, and the channel that keeps it."""
    ours, theirs = socket.socketpair()
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    told = json.dumps({"hold": region, "channel": theirs.fileno()})
    command = ["unshare", *own, "--net", "--uts", *module_command("benchmarks.regions.network", told)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    data, control, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    if not data:
        raise OSError(f"region {region} could not be made")
    return process, struct.unpack("i", control[0][2][:4])[0], ours


def main() -> None:
    """Runs the carrier, or what holds a region."""
    told = json.loads(sys.argv[1])
    if "hold" in told:
        _hold(told["hold"], socket.socket(fileno=told["channel"]))
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    started = [_start(region) for region in range(told["regions"])]
    print(json.dumps({"pids": [process.pid for process, _, _ in started]}), flush=True)
    try:
        shape = Shape.of(round_trip_ms=told["round_trip_ms"], mbit=told["mbit"])
        _carry([device for _, device, _ in started], Core(told["regions"], shape))
    finally:
        for process, _, channel in started:
            channel.close()
            process.wait()


if __name__ == "__main__":
    main()
