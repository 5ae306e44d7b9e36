"""What shows a run while it trains, from outside: its page, its metrics, a collector of its traces."""

import gzip
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """What the server of a dashboard answers."""

    def __init__(self, address):
        self.address = address

    def ask(self, path):
        with urlopen(f"{self.address}/{path}", timeout=10) as answer:
            return answer.read()

    def data(self, path):
        return json.loads(self.ask(path))

    def state(self, island):
        return self.data("frame")["islands"][island]["state"]


@contextmanager
def dashboard(*arguments):
    """Starts one, yields its page, and ends it as a person does."""
    command = [sys.executable, "-m", "ops", "dashboard", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Page(re.search(r"http://[^/\s]+", process.stderr.readline()).group())
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


class Scrape:
    """The samples of one process at one moment."""

    def __init__(self, text):
        self.text = text
        self.samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def all(self, name, **labels):
        return [
            each.value
            for each in self.samples
            if each.name == name and all(each.labels[key] == value for key, value in labels.items())
        ]

    def one(self, name, **labels):
        (value,) = self.all(name, **labels)
        return value


def scrape(port):
    """Returns what is served at a port of metrics; None while its process starts."""
    with suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return Scrape(answer.read().decode())
    return None


class Collector:
    """Takes traces in, as a collector does at its port for OTLP over HTTP; keeps each request in a file."""

    def __init__(self, folder):
        self.folder, self._count = folder, 0
        folder.mkdir()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def take(self, path, body):
        self._count += 1
        (self.folder / f"{self._count:03}{path.replace('/', '-')}").write_bytes(body)
