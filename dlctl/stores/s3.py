"""s3://, by s3fs: Amazon's and all that speak its protocol.

Endpoint, region and credentials are those of the AWS tools: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws, the role of the machine. Every process reads them again: a
renewed token in a file counts without a restart of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dlctl.stores import layout
from dlctl.stores.addresses import Address
from dlctl.stores.fsspec_objects import FsspecObjects, words
from dlctl.stores.objects import Cause, StoreError

PART_BYTES = 8 << 20
"""Progress is told part by part, all that are sent at a time together: over a slow uplink they must
arrive before the process counts as hung (`daemons/coordinator/mirroring.py`).
"""
PARTS_MAX = 9_000
"""Of 10,000 that the protocol allows."""
AT_ONCE = 2
"""Parts that are sent at a time: so many are in memory."""
CONNECT_S, READ_S, ATTEMPTS = 10, 60, 3
CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
ENDPOINT = "set AWS_ENDPOINT_URL if it is not Amazon's"
CODES: Mapping[str, tuple[Cause, str, str]] = {
    "NoSuchBucket": ("missing", "there is no such bucket", "create it, or correct the address"),
    "AccessDenied": ("denied", "access is denied", "it takes rights to list, read, write, delete"),
    "403": ("denied", "access is denied", "it takes rights to list, read, write, delete"),
    "AllAccessDisabled": ("denied", "access is denied", ""),
    "MethodNotAllowed": ("denied", "it is read-only", ""),
    "ExpiredToken": ("expired", "the token of the credentials has expired", "renew it"),
    "ExpiredTokenException": ("expired", "the token of the credentials has expired", "renew it"),
    "RequestExpired": ("expired", "the token of the credentials has expired", "renew it"),
    "InvalidToken": ("expired", "the token of the credentials is not valid", "renew it"),
    "InvalidAccessKeyId": ("credentials", "the access key does not exist", CREDENTIALS),
    "SignatureDoesNotMatch": ("credentials", "the secret key is wrong", CREDENTIALS),
    "RequestTimeTooSkewed": ("other", "this machine's clock is wrong", "timedatectl"),
    "SlowDown": ("throttled", "it is throttling (SlowDown)", ""),
    "ServiceUnavailable": ("throttled", "it is throttling (503)", ""),
    "RequestLimitExceeded": ("throttled", "it is throttling", ""),
    "503": ("throttled", "it is throttling (503)", ""),
    "InternalError": ("unreachable", "it has an internal error (500)", ""),
    "500": ("unreachable", "it has an internal error (500)", ""),
    "502": ("unreachable", "its gateway fails (502)", ""),
    "504": ("unreachable", "its gateway fails (504)", ""),
}
"""Codes of the protocol -> cause, words, and what to do."""
CLASSES: Mapping[str, tuple[Cause, str, str]] = {
    "NoCredentialsError": ("credentials", "there are no credentials", CREDENTIALS),
    "PartialCredentialsError": ("credentials", "the credentials are not complete", CREDENTIALS),
    "ProfileNotFound": ("credentials", "there is no such AWS_PROFILE", CREDENTIALS),
    "TokenRetrievalError": ("expired", "the token of the credentials has expired", "renew it"),
    "UnauthorizedSSOTokenError": ("expired", "the SSO session has expired", "aws sso login"),
    "EndpointConnectionError": ("unreachable", "", ENDPOINT),
    "ConnectTimeoutError": ("unreachable", "", ENDPOINT),
    "ReadTimeoutError": ("unreachable", "", ""),
    "ConnectionClosedError": ("unreachable", "", ""),
    "ProxyConnectionError": ("unreachable", "", "see HTTPS_PROXY"),
    "HTTPClientError": ("unreachable", "", ""),
    "ResponseParserError": ("throttled", "its answer is no answer of S3", ENDPOINT),
    "InvalidRegionError": ("other", "", "see AWS_REGION"),
}
"""Classes of botocore -> the same; without words: those of the error."""


def opened(address: Address) -> FsspecObjects:
    """Raises ImportError if the extra is not installed."""
    from botocore.exceptions import BotoCoreError  # imported late: an extra brings them
    from s3fs import S3FileSystem

    from dlctl.stores import quiet

    quiet.silence("aiobotocore", "botocore", "s3fs")
    filesystem = S3FileSystem(
        anon=False, skip_instance_cache=True, use_listings_cache=False, max_concurrency=AT_ONCE,
        default_fill_cache=False,
        config_kwargs={
            "connect_timeout": CONNECT_S, "read_timeout": READ_S,
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        },
    )  # fmt: skip
    filesystem.retries = ATTEMPTS

    def translate(error: BaseException) -> StoreError | None:
        if isinstance(response := getattr(error, "response", None), Mapping):
            return _of_code(response)
        if not isinstance(error, BotoCoreError):
            return None
        for kind in type(error).__mro__:
            if kind.__name__ in CLASSES:
                cause, text, hint = CLASSES[kind.__name__]
                return StoreError(text or words(error), cause, hint=hint or None)
        return StoreError(words(error), "other")

    root = f"{address.bucket}/{address.key}".rstrip("/")

    def sweep() -> None:
        _abort_uploads(filesystem, address)

    return FsspecObjects(str(address), root, filesystem, translate, _put_options, sweep)


def _of_code(response: Mapping[str, Any]) -> StoreError | None:
    error = response.get("Error") or {}
    code = str(error.get("Code", ""))
    status = str((response.get("ResponseMetadata") or {}).get("HTTPStatusCode", ""))
    if code in ("404", "NoSuchKey", "PreconditionFailed", "412"):
        return None
    known = CODES.get(code) or CODES.get(status)
    if known is None:
        return StoreError(f"{code}: {words(Exception(error.get('Message', '')))}", "other")
    cause, text, hint = known
    return StoreError(text, cause, hint=hint or None)


def _put_options(nbytes: int) -> Mapping[str, Any]:
    return {"chunksize": max(PART_BYTES, -(-nbytes // PARTS_MAX))}


def _abort_uploads(filesystem: Any, address: Address) -> None:
    """End multipart uploads of a process that was killed: they cost, and no listing shows them.
    Only those of this store: others may upload to the bucket, and below the address. Not every
    store can list them.
    """
    where, after = {"Bucket": address.bucket}, dict[str, str]()
    prefix = f"{address.key}/".lstrip("/")
    with suppress(Exception):
        while True:
            found = filesystem.call_s3("list_multipart_uploads", **where, Prefix=prefix, **after)
            for upload in found.get("Uploads", ()):
                key, number = upload["Key"], upload["UploadId"]
                if key.startswith(prefix) and layout.has(key.removeprefix(prefix)):
                    filesystem.call_s3("abort_multipart_upload", **where, Key=key, UploadId=number)
            before, markers = after, ("KeyMarker", "UploadIdMarker")
            after = {name: found[f"Next{name}"] for name in markers if found.get(f"Next{name}")}
            if not found.get("IsTruncated") or after in ({}, before):
                return
