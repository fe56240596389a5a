"""Which kinds of objects a cluster has, as kubectl asks an API server before it reads a manifest.

There is no cluster here. So this answers the discovery of real kubectl and nothing else: every
other request is refused, and fails the test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {
    "v1": {
        "ConfigMap": "configmaps", "Secret": "secrets", "Service": "services",
        "PersistentVolumeClaim": "persistentvolumeclaims",
    },
    "batch/v1": {"Job": "jobs"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
}  # fmt: skip


def _group(name: str) -> dict[str, Any]:
    group, _, version = name.partition("/")
    served = {"groupVersion": name, "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _resources(name: str) -> dict[str, Any]:
    verbs = ["create", "get", "list", "patch"]
    rows = [
        {"name": many, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for kind, many in KINDS[name].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": name, "resources": rows}


def _answers(version: str) -> dict[str, Any]:
    major, minor, _ = version.split(".")
    groups = [_group(name) for name in KINDS if "/" in name]
    return {
        "/version": {"major": major, "minor": minor, "gitVersion": f"v{version}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
        "/api/v1": _resources("v1"),
        **{f"/apis/{name}": _resources(name) for name in KINDS if "/" in name},
    }


@contextmanager
def server(version: str, asked: list[str]) -> Iterator[str]:
    """The address of one that says it is of this version; asked: gets what it has refused."""
    answers = _answers(version)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            is_object = "/namespaces/" in path  # "apply" looks whether it is there.
            if path not in answers and not is_object:
                asked.append(path)
            body = json.dumps(answers.get(path, {"kind": "Status", "code": 404})).encode()
            self.send_response(200 if path in answers else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
