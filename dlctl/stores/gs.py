"""gs://, by gcsfs: Google Cloud Storage, with its application default credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dlctl.stores.addresses import Address
from dlctl.stores.fsspec_objects import FsspecObjects, words
from dlctl.stores.objects import Cause, StoreError

PART_BYTES = 8 << 20
"""Progress is told part by part, see `s3.PART_BYTES`. Google wants multiples of 256 KiB."""
EMULATOR = "STORAGE_EMULATOR_HOST"
CREDENTIALS = "set GOOGLE_APPLICATION_CREDENTIALS, or: gcloud auth application-default login"
STATUS: Mapping[int, tuple[Cause, str, str]] = {
    401: ("credentials", "the credentials are not accepted", CREDENTIALS),
    403: ("denied", "access is denied", "it takes rights to list, read, write, delete"),
    408: ("unreachable", "it does not answer in time", ""),
    429: ("throttled", "it is throttling (429)", ""),
    500: ("unreachable", "it has an internal error (500)", ""),
    502: ("unreachable", "its gateway fails (502)", ""),
    503: ("throttled", "it is throttling (503)", ""),
    504: ("unreachable", "its gateway fails (504)", ""),
}
CLASSES: Mapping[str, tuple[Cause, str, str]] = {
    "DefaultCredentialsError": ("credentials", "there are no credentials", CREDENTIALS),
    "RefreshError": ("expired", "the credentials have expired", CREDENTIALS),
    "ClientConnectorError": ("unreachable", "", ""),
    "ClientError": ("unreachable", "", ""),
}
"""Classes of google-auth and aiohttp -> cause, words, and what to do."""


def opened(address: Address) -> FsspecObjects:
    """Raises ImportError if the extra is not installed."""
    from gcsfs import GCSFileSystem  # imported late: an extra brings it

    from dlctl.stores import quiet

    quiet.silence("gcsfs", "google")
    token = "anon" if os.environ.get(EMULATOR) else "google_default"
    filesystem = GCSFileSystem(token=token, skip_instance_cache=True, use_listings_cache=False)
    root = f"{address.bucket}/{address.key}".rstrip("/")
    return FsspecObjects(str(address), root, filesystem, translate, lambda _: OPTIONS)


_BUCKET = re.compile(r"b/[^/]+/o")
"""What gcsfs says if the objects of a bucket cannot be listed."""
OPTIONS: Mapping[str, Any] = {"chunksize": PART_BYTES}


def translate(error: BaseException) -> StoreError | None:
    code = getattr(error, "code", None)
    if type(code) is int and code in STATUS:
        cause, text, hint = STATUS[code]
        return StoreError(text, cause, hint=hint or None)
    if isinstance(error, FileNotFoundError) and _BUCKET.fullmatch(str(error)):
        return StoreError("there is no such bucket", "missing", hint="create it, or correct it")
    for kind in type(error).__mro__:
        if kind.__name__ in CLASSES:
            cause, text, hint = CLASSES[kind.__name__]
            return StoreError(text or words(error), cause, hint=hint or None)
    return None
