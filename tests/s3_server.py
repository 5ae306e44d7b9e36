"""A server process that speaks S3, for tests: moto's, where it is installed.

``pip install 'moto[server,s3]'`` puts ``moto_server`` on PATH; it may also lie in an environment of its own, which the
variable ATOLL_MOTO_SERVER names. Whoever wants none of it is told why its tests are left out.
"""

import contextlib
import os
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass

from ops.processes.cluster import free_ports, wait_until_listening

SERVER = os.environ.get("ATOLL_MOTO_SERVER") or shutil.which("moto_server")
WHY_NOT = "no moto_server on PATH, and no ATOLL_MOTO_SERVER: pip install 'moto[server,s3]'"
#: Any will do for that server.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
BUCKET = "atoll-test"


@dataclass(frozen=True)
class S3:
    """A server that runs."""

    port: int

    def url(self, prefix):
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}"

    def make_bucket(self):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200


@contextlib.contextmanager
def running(command, port, log):
    """Runs a server until the end of the block, which begins when it listens on the port."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        assert wait_until_listening(port, alive=lambda: process.poll() is None, within_s=50.0), log.read_text()
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def s3_server(log, port=0):
    """Yields a server with an empty bucket; its process is gone afterwards."""
    server = S3(port or free_ports(1))
    with running([SERVER, "-H", "127.0.0.1", "-p", str(server.port)], server.port, log):
        server.make_bucket()
        yield server
