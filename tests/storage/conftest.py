"""S3 servers, and runs that use them. Their packages are no part of `make install`: `make storage`
has an environment of its own, and sets the variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import s3_servers
from s3_servers import BUCKET, Proxy
from workplace import Workplace, opened

collect_ignore_glob = [] if "DLCTL_STORAGE" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    with s3_servers.server("moto") as endpoint:
        s3_servers.make_bucket(endpoint)
        yield endpoint


@pytest.fixture
def proxy(moto: str) -> Iterator[Proxy]:
    proxy = Proxy(moto)
    proxy.up()
    yield proxy
    proxy.holds.set()
    proxy.down()


@pytest.fixture
def prefix(moto: str) -> Iterator[str]:
    """An empty one in the bucket, as text of an address."""
    yield f"s3://{BUCKET}/clouds"
    there = s3_servers.client(moto)
    for found in there.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        there.delete_object(Bucket=BUCKET, Key=found["Key"])


@pytest.fixture
def place(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A place whose runs reach the store through the proxy; so does the test."""
    variables: dict[str, Any] = {**s3_servers.ENV, "AWS_ENDPOINT_URL": proxy.endpoint}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with opened() as workplace:
        yield workplace
