"""The HTTP endpoint that Prometheus scrapes. Shell.

It has threads of its own. What it serves is collected when somebody asks, so it costs nothing while nobody does.
Nothing is changed by asking, and there is no password: whoever reaches the port sees numbers and names of islands.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from socket import AF_INET, AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from broker.base.errors import ConfigError, cure_of_listening
from broker.metrics.family import Family
from broker.process import logs
from broker.process.release import install
from broker.process.signals import in_children

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logs.get(__name__)

T = TypeVar("T")

#: A process that does not answer for so long is as good as down: the scrape fails.
ANSWER_WITHIN_S = 5.0
#: Silence of a client after which its connection is closed.
CLIENT_SILENT_S = 10.0


class NoAnswer(Exception):
    """The process is too busy to say how it is, or is ending."""


class MetricsServer:
    """Serves metrics until it is closed.

    ``collect`` returns the families of the moment; threads of the server call it. It may raise :class:`NoAnswer`.

    Raises:
        ConfigError: The address cannot be listened on, or the packages of the extra are missing.
    """

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Family]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
            from prometheus_client.exposition import make_wsgi_app
        except ImportError as err:
            cure = f"needs a package that is not installed ({err.name}): {install('prometheus-client')}"
            raise ConfigError("metrics_port", port, cure) from err
        registry = CollectorRegistry()
        registry.register(_Collector(collect))
        ProcessCollector(registry=registry)
        exposition = make_wsgi_app(registry)

        def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            try:
                return exposition(environ, start_response)  # type: ignore[no-any-return]
            except NoAnswer as err:
                start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"{err}\n".encode()]

        family = AF_INET6 if ":" in host else AF_INET
        server_class = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server = server_class((host.strip("[]"), port), _Handler)
        except OSError as err:
            cure = f"cannot be listened on at {host} ({err.strerror or err}): {cure_of_listening(err)}, or 0 for none"
            raise ConfigError("metrics_port", port, cure) from err
        self._server.set_app(application)
        self._thread = threading.Thread(target=self._server.serve_forever, name="atoll-metrics", daemon=True)
        self._thread.start()
        self._forget = in_children(self._server.socket.close)  # who outlives this process must not hold its port
        log.info("metrics.ready", address=f"http://{host}:{self.port}/metrics")

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Ends the server; requests under way may get no answer."""
        self._forget()
        self._server.shutdown()
        self._server.server_close()


@asynccontextmanager
async def served(
    host: str, port: int, collect: Callable[[], T], families_of: Callable[[T], Iterable[Family]]
) -> AsyncIterator[None]:
    """Serves metrics while the body runs; at port 0 it serves nothing, and needs no package for that.

    When somebody asks, ``collect`` is called in this event loop, between two callbacks of it: it returns the figures of
    the moment, and nothing that will change. ``families_of`` makes metrics of them, in a thread of the server. Raises
    ConfigError as :class:`MetricsServer` does.
    """
    if not port:
        yield
        return
    ask = _in_loop(asyncio.get_running_loop(), collect)
    server = MetricsServer(host, port, lambda: families_of(ask()))
    try:
        yield
    finally:
        await asyncio.to_thread(server.close)


def _in_loop(loop: asyncio.AbstractEventLoop, collect: Callable[[], T]) -> Callable[[], T]:
    """Returns ``collect`` as other threads may call it."""

    async def collected() -> T:
        return collect()

    def ask() -> T:
        work = collected()
        try:
            return asyncio.run_coroutine_threadsafe(work, loop).result(ANSWER_WITHIN_S)
        except TimeoutError as err:
            raise NoAnswer(f"the process has not answered within {ANSWER_WITHIN_S:g} s") from err
        except (RuntimeError, concurrent.futures.CancelledError) as err:
            work.close()
            if not (loop.is_closed() or isinstance(err, concurrent.futures.CancelledError)):
                raise
            raise NoAnswer("the process is ending") from err

    return ask


class _Collector:
    """Our families, as the library wants them."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return [_converted(each) for each in self._collect()]

    def describe(self) -> Iterable[Metric]:
        return ()  # else it would collect while it registers


def _converted(family: Family) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if family.name.endswith("_total") else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in family.samples.items():
        metric.add_metric(labels, value)
    return metric


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, which nobody waits for."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without a look-up of the address's name: a name server that is away would block it."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    """Logs nothing: one line a second is none worth reading."""

    timeout = CLIENT_SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing."""
