"""The address of an MLflow store, `[log] mlflow`."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from dlctl.job.config import Log
from dlctl.util.redact import has_credentials

Verdict = tuple[str, str]
"""The fault and a suggestion; "" if there is none."""
FINE: Verdict = ("", "")
ENV, FILE, SQLITE = "env:", "file:", "sqlite:///"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.ASCII)
_HOST = re.compile(r"[\w.-]+:\d+(?:/.*)?|localhost", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def verdict(text: str) -> Verdict:
    """What is wrong with an address of the job file. No message repeats one with a password."""
    if not text:
        return FINE
    if text.startswith(ENV):
        return _of_variable(text.removeprefix(ENV))
    if has_credentials(text):
        hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        if not text.startswith("http"):
            hint = 'write "env:MLFLOW_TRACKING_URI" and set that variable'
        return "must not have credentials: the file is copied into the run directory", hint
    return _scheme(text)


def _of_variable(name: str) -> Verdict:
    if not _VARIABLE.fullmatch(name):
        return "names no environment variable", 'as in "env:MLFLOW_TRACKING_URI"'
    value = os.environ.get(name, "")
    if not value:
        return f"the environment variable {name:.100} is not set", ""
    if value.startswith(ENV) or _scheme(value) != FINE:
        return f"{name:.100} has no address with a scheme, as http:// or sqlite:///", ""
    return FINE


def _scheme(text: str) -> Verdict:
    found = _SCHEME.match(text)
    if "\0" in text or any(character.isspace() for character in text):
        return "must be an address without spaces", ""
    if text.startswith(FILE) or (found and text != found.group()):
        return FINE
    wanted = "must be an address with a scheme"
    if found:
        return f"{wanted} and a host or a path", ""
    if _HOST.fullmatch(text):
        return wanted, f'did you mean "http://{text:.200}"?'
    return wanted, 'as "http://mlflow:5000", "sqlite:///mlflow.db" or "file:mlruns"'


def located(log: Log, home: Path) -> Log:
    """The section with full paths. `home`: the directory of the job file."""
    text = log.mlflow
    for scheme in (SQLITE, FILE):
        path = text.removeprefix(scheme)
        if path != text and path and not path.startswith("/"):
            whole = (home / path).as_uri() if scheme == FILE else f"{SQLITE}{home / path}"
            return dataclasses.replace(log, mlflow=whole)
    return log
