"""Google's storage, for tests, as far as its XML requests are those of S3: a gateway to moto's server.

No server that can be installed takes what obstore sends to Google: emulators speak the JSON requests, obstore the XML
ones. Those are S3's but for two headers, which this gateway translates: who asks, and that an object must be new. It
knows nothing of Google's credentials and generations.
"""

import contextlib
import http.client
import http.server
import json
import threading

from tests.s3_server import BUCKET, s3_server

#: Any will do for moto.
_SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_OWN = {"authorization", "connection", "content-length", "date", "host", "server", "transfer-encoding"}
#: Whom the library asks without a token.
ACCOUNT = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})


class _Gateway(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port = 0  # of moto

    def translate(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
        headers["Authorization"] = _SIGNED
        if headers.pop("x-goog-if-generation-match", None) == "0":
            headers["If-None-Match"] = "*"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as server:
            path = self.path.replace("%2D", "-").replace("%2F", "/")
            server.request(self.command, path, body, headers)
            answer = server.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = translate

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def google_server(log):
    """Yields a function from prefixes to addresses in an empty bucket; nothing listens afterwards."""
    with s3_server(log) as s3:
        handler = type("Gateway", (_Gateway,), {"port": s3.port})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as gateway:
            threading.Thread(target=gateway.serve_forever, daemon=True).start()
            try:
                yield lambda prefix: f"gs://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{gateway.server_port}"
            finally:
                gateway.shutdown()
