"""Servers of others, moto and s3rver for S3 and an emulator for gs://, and a proxy in front of one
that breaks on demand.

`make storage` has an environment with them, and says where s3rver is.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STARTED_S = 60.0
BUCKET = "bucket"
ENV = {
    "AWS_ACCESS_KEY_ID": "S3RVER",
    "AWS_SECRET_ACCESS_KEY": "S3RVER",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
GS_ENV = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
"""The emulator has no gRPC."""
SERVERS = ("moto", "s3rver", "gs")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Start a server; gives its endpoint."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="dlctl-s3-")
    command = {
        "moto": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "s3rver": [
            os.environ.get("DLCTL_S3RVER", "s3rver"), "-d", folder, "-a", "127.0.0.1",
            "-p", str(port), "--configure-bucket", BUCKET,
        ],
        "gs": [
            str(Path(sys.executable).with_name("gcp-storage-emulator")), "start", "-H", "127.0.0.1",
            "--port", str(port), "--default-bucket", BUCKET, "--in-memory",
        ],
    }[kind]  # fmt: skip
    with open(Path(folder, "log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _until_there(port, process, Path(folder, "log"))
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)


def _until_there(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTED_S
    while True:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        threading.Event().wait(0.05)


def make_bucket(endpoint: str, name: str = BUCKET) -> None:
    import boto3

    boto3.client("s3", endpoint_url=endpoint, **_keys()).create_bucket(Bucket=name)


def client(endpoint: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint, **_keys())


def _keys() -> dict[str, str]:
    names = ("aws_access_key_id", "aws_secret_access_key")
    return {**dict.fromkeys(names, "S3RVER"), "region_name": "us-east-1"}


Fault = Callable[[str, str, dict[str, str]], tuple[int, str] | None]
"""Method, path and headers of a request -> status and code of S3 to answer with; None: none."""


class Proxy:
    """In front of a server: passes requests on, unless `fault` says what to answer."""

    def __init__(self, backend: str) -> None:
        self.fault: Fault = lambda method, path, headers: None
        self.requests: list[tuple[str, str]] = []
        """(method, path) of all that came."""
        self.holds = threading.Event()
        """Unless it is set, uploads wait here."""
        self.holds.set()
        host, _, port = backend.removeprefix("http://").partition(":")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                if proxy._server is None:  # Of a connection that was open before.
                    self.close_connection = True
                    return
                nbytes = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(nbytes) if nbytes else b""
                proxy.requests.append((self.command, self.path))
                if self.command == "PUT":
                    proxy.holds.wait(STARTED_S)
                found = proxy.fault(self.command, self.path, dict(self.headers))
                if found is not None:
                    self._refuse(*found)
                    return
                there = HTTPConnection(host, int(port), timeout=STARTED_S)
                there.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for key, value in self.headers.items():
                    there.putheader(key, value)
                there.endheaders(body)
                answer = there.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for key, value in answer.getheaders():
                    if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(key, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                there.close()

            def _refuse(self, status: int, code: str) -> None:
                text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
                data = text.encode() if self.command != "HEAD" else b""
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._kind = Handler
        self._server: ThreadingHTTPServer | None = None
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._kind)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def down(self) -> None:
        """No connection is accepted any more, and none that is open answers."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5.0).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
