"""A server process that speaks Azure's blob storage, for tests: Azurite's, where it is installed.

``npm install azurite`` makes ``node_modules/.bin/azurite-blob``; put it on PATH, or name it in the variable
ATOLL_AZURITE. Whoever wants none of it is told why its tests are left out.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import urllib.request
from dataclasses import dataclass
from email.utils import formatdate

from ops.processes.cluster import free_ports
from tests.s3_server import running

SERVER = os.environ.get("ATOLL_AZURITE") or shutil.which("azurite-blob")
WHY_NOT = "no azurite-blob on PATH, and no ATOLL_AZURITE: npm install azurite"
#: The account that every Azurite has, as its documentation says.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CREDENTIALS = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
CONTAINER = "atoll-test"
VERSION = "2021-08-06"


@dataclass(frozen=True)
class Azure:
    """A server that runs."""

    port: int

    def url(self, prefix):
        return f"az://{CONTAINER}/{prefix}?endpoint=http://127.0.0.1:{self.port}/{ACCOUNT}"

    def make_container(self):
        date = formatdate(usegmt=True)
        place = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        to_sign = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{VERSION}", place])
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), to_sign.encode(), hashlib.sha256)).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{ACCOUNT}/{CONTAINER}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": VERSION,
                "Authorization": f"SharedKey {ACCOUNT}:{signature}",
                "Content-Length": "0",
            },
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 201


@contextlib.contextmanager
def azure_server(log):
    """Yields a server with an empty container; its process is gone afterwards."""
    server = Azure(free_ports(1))
    flags = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    with running([SERVER, "--blobHost", "127.0.0.1", "--blobPort", str(server.port), *flags], server.port, log):
        server.make_container()
        yield server
