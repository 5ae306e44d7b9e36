"""What the kernel says of connections, and forgets with them: on real sockets."""

import contextlib
import os
import socket
import time

import pytest

from broker.transport.descriptors import forget_unsent, hang_up, hold, received_bytes

WITHIN_S = 10.0
HANDSHAKE_BYTES = 1  # the beginning of a connection is acknowledged like a byte


@pytest.fixture
def pair():
    """A client and its connection at the server, of loopback TCP; the server reads nothing unless it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client = socket.create_connection(listening.getsockname(), timeout=WITHIN_S)
        server, _ = listening.accept()
        server.settimeout(WITHIN_S)
        with client, server:
            yield client, server


def port_of(server):
    return server.getsockname()[1]


def filled(client):
    """Sends until the kernel takes no more; returns how much it took."""
    client.setblocking(False)
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            taken += client.send(bytes(1 << 20))
    return taken


def until(condition):
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_has_arrived_is_counted(pair):
    client, server = pair
    client.sendall(b"x" * 5_000)
    server.sendall(b"y" * 300)
    until(lambda: received_bytes(server.fileno()) == 5_000)
    until(lambda: received_bytes(client.fileno()) == 300)


@pytest.mark.parametrize("name", ["\0atoll-test", "socket"])
def test_a_connection_to_a_unix_socket_of_ours_is_ended_and_no_other(name, tmp_path):
    path = str(tmp_path / name) if name == "socket" else f"{name}-{tmp_path.name}-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        listening, client = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        listening.bind(path)
        listening.listen()
        client.connect(path)
        server = stack.enter_context(listening.accept()[0])
        client.settimeout(WITHIN_S)
        assert not hang_up(server.fileno(), {path.encode() + b"x", 7001})
        assert hold(server.fileno(), {path.encode() + b"x"}) is None
        stack.enter_context(hold(server.fileno(), {path.encode()}))
        assert hang_up(server.fileno(), {path.encode()})
        assert client.recv(1) == b""


@pytest.mark.parametrize("kind", ["file", "pipe between processes", "closed"])
def test_what_is_no_tcp_connection_carries_nothing_that_is_known(kind, tmp_path):
    with contextlib.ExitStack() as stack:
        if kind == "file":
            fd = stack.enter_context((tmp_path / "f").open("w")).fileno()
        else:
            ends = [stack.enter_context(each) for each in socket.socketpair()]
            fd = ends[0].fileno()
        if kind == "closed":
            stack.close()
        assert received_bytes(fd) is None
        assert not forget_unsent(fd, 7001)
        assert not hang_up(fd, {7001, b""})


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_was_not_sent_is_sent_after_a_close_unless_it_is_forgotten(pair, forgotten):
    client, server = pair
    taken = filled(client)
    if forgotten:
        assert forget_unsent(client.fileno(), port_of(server))
    client.close()
    came = 0
    with contextlib.suppress(ConnectionResetError):
        while data := server.recv(1 << 20):
            came += len(data)
    assert (came < taken) == forgotten
