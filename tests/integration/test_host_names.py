"""A broker whose host is given by name: several addresses, ones that change, a name service that is slow or away."""

import asyncio
import contextlib
import socket
import threading

import pytest
import zmq

from broker.base.errors import ConfigError
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context, configure_socket
from broker.wire.addresses import check_address
from broker.wire.messages import Channel, Envelope, Leave
from ops.processes.cluster import free_ports
from tests.coroutines import given_by

WAIT_S = 40.0  # for anything that must happen
HOST = "hub.test"
SIX, FOUR = "::1", "127.0.0.1"


def has_six():
    with contextlib.suppress(OSError), socket.create_server((SIX, 0), family=socket.AF_INET6):
        return True
    return False


needs_six = pytest.mark.skipif(not has_six(), reason="this machine has no ::1")


class Names:
    """A name service: the addresses of ``hub.test``, none of them while it is not known."""

    def __init__(self, *addresses):
        self.addresses = addresses
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, host, port, *args, **kwargs):
        assert host == HOST
        self.asked += 1
        assert self.answers.wait(WAIT_S)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {SIX: socket.AF_INET6, FOUR: socket.AF_INET}
        return [(families[each], socket.SOCK_STREAM, 6, "", (each, port)) for each in self.addresses]


@pytest.fixture
def names(monkeypatch):
    made, real = Names(SIX, FOUR), socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        return (made if host == HOST else real)(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield made
    made.answers.set()


@contextlib.asynccontextmanager
async def hub(context, at, port, channel=Channel.CONTROL):
    """A ROUTER that stands for the broker, on one address."""
    router = context.socket(zmq.ROUTER)
    configure_socket(router, channel)
    router.linger = 0
    router.bind(f"tcp://[{at}]:{port}" if ":" in at else f"tcp://{at}:{port}")
    try:
        yield router
    finally:
        router.close()


def in_a_context(use):
    async def main():
        context = Context()
        try:
            async with asyncio.timeout(WAIT_S):
                await use(context)
        finally:
            context.term()

    asyncio.run(main())


@pytest.fixture
def port():
    return free_ports(2)


async def delivers(endpoint, router):
    """A message goes up."""
    leave = Leave(inner_step=1, tokens=1, reason="")
    sent = Envelope(run_id="demo", sender="a", incarnation=1, sequence=1, to="aggregator", message=leave)
    while not (await endpoint.ready(0.1) and await endpoint.send(sent)):
        pass
    assert len(await router.recv_multipart()) == 2


async def lost(endpoint):
    """The endpoint has seen that its connection is gone: until then it sends into it, and nobody hears that."""
    while await endpoint.line(True, 0.1):
        pass


@needs_six
@pytest.mark.parametrize("at", [SIX, FOUR])
@pytest.mark.parametrize("order", [(SIX, FOUR), (FOUR, SIX)], ids=["6 first", "4 first"])
@given_by(in_a_context)
async def test_a_broker_that_listens_on_one_of_its_addresses_is_reached(context, names, port, order, at):
    names.addresses = order
    async with (
        hub(context, at, port) as router,
        Endpoint(context, f"tcp://{HOST}:{port}", Channel.CONTROL) as endpoint,
    ):
        await delivers(endpoint, router)
        assert endpoint.traffic.renewals == 0, "a round over all addresses is no renewal"


@needs_six
@given_by(in_a_context)
async def test_a_stranger_at_one_address_hides_no_broker_at_another(context, names, port):
    async def stranger(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        writer.close()

    server = await asyncio.start_server(stranger, SIX, port)
    async with (
        server,
        hub(context, FOUR, port) as router,
        Endpoint(context, f"tcp://{HOST}:{port}", Channel.CONTROL) as endpoint,
    ):
        await delivers(endpoint, router)


@needs_six
@given_by(in_a_context)
async def test_a_name_that_moves_is_followed(context, names, port):
    names.addresses = (SIX,)
    async with Endpoint(context, f"tcp://{HOST}:{port}", Channel.CONTROL) as endpoint:
        async with hub(context, SIX, port) as router:
            await delivers(endpoint, router)
        names.addresses = (FOUR,)
        await lost(endpoint)
        async with hub(context, FOUR, port) as router:
            await delivers(endpoint, router)


@given_by(in_a_context)
async def test_a_name_that_is_not_known_is_said_now_and_then_and_looked_up_again(context, names, port, caplog):
    caplog.set_level("WARNING")
    names.addresses = ()
    address = f"tcp://{HOST}:{port}"
    async with Endpoint(context, address, Channel.CONTROL) as endpoint:
        while names.asked < 4:
            assert not await endpoint.ready(0.1)
        assert endpoint.no_address == "Name or service not known"
        names.addresses = (FOUR,)
        async with hub(context, FOUR, port) as router:
            await delivers(endpoint, router)
        assert endpoint.no_address == ""
    (said,) = [each.getMessage() for each in caplog.records if "connection.no_address" in each.getMessage()]
    assert said.startswith(f'connection.no_address address={address} detail="Name or service not known" cure="check')


@given_by(in_a_context)
async def test_a_slow_name_service_holds_up_nothing_else(context, names, port):
    names.addresses = (FOUR,)
    names.answers.clear()
    async with (
        hub(context, FOUR, port) as router,
        Endpoint(context, f"tcp://{FOUR}:{port}", Channel.CONTROL) as other,
        Endpoint(context, f"tcp://{HOST}:{port}", Channel.CONTROL) as endpoint,
    ):
        for _ in range(20):
            assert not await endpoint.ready(0.01)
            await delivers(other, router)
        assert names.asked == 1
        names.answers.set()
        await delivers(endpoint, router)


@pytest.mark.parametrize("host", ["a..b", "." * 3, "a" * 64 + ".test"])
def test_what_can_be_no_name_is_refused_at_once(host):
    with pytest.raises(ConfigError, match="must have 1 to 63 characters"):
        check_address(f"tcp://{host}:7001")
