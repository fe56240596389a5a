"""Checks beyond types: names, rates, targets, files, and conflicting keys.

They work on the parsed document, so that these faults are reported together with all others; the
schema reports values of a wrong type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dlctl.job.config import Network, Servers
from dlctl.job.settings import GENERAL
from dlctl.jobfile import hosts, launchers, parties, programs, stores
from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath, get
from dlctl.records.best import Best, Target
from dlctl.stores import addresses
from dlctl.util import extras, regular
from dlctl.util.names import RUN_IN_ADDRESS
from dlctl.util.regular import NotRegular

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
PORT_MAX = 65535
OFF = "off"


def check(document: dict[str, Any], directory: Path) -> Iterator[Fault]:
    """All faults of these kinds. `directory`: where the job file is."""
    yield from _check_text(document, ("job", "name"), _job_name)
    yield from programs.check(document, directory)
    yield from _check_text(document, ("job", "weights"), lambda text: _weights(text, directory))
    yield from _check_text(document, ("job", "run_dir"), _run_dir)
    yield from _check_text(document, ("job", "stop", "target"), _target)
    yield from _check_text(document, ("checkpoints", "best"), _best)
    yield from _check_text(document, ("checkpoints", "mirror"), _mirror)
    yield from _check_text(document, ("servers", "state_dir"), _state_dir)
    yield from _check_text(document, ("log", "mlflow"), stores.verdict)
    for key in ("push", "fetch", "push_window"):
        yield from _check_text(document, ("limits", key), partial(_setting, key))
    yield from _check_ports(document)
    yield from _check_extras(document)
    yield from _check_encryption(document)
    yield from _check_target_is_looked_at(document)
    yield from _check_unbiased(document)
    yield from hosts.check(document)
    yield from parties.check(document, directory, programs.check_task, _weights)


def _check_text(document: dict[str, Any], path: KeyPath, check: Any) -> Iterator[Fault]:
    text = get(document, path)
    if isinstance(text, str):
        message, suggestion = check(text)
        if message:
            yield Fault(path, message, suggestion)


Verdict = tuple[str, str]
"""The fault and a suggestion; "" if there is none."""
FINE: Verdict = ("", "")


def _job_name(text: str) -> Verdict:
    if JOB_NAME.fullmatch(text):
        return FINE
    rule = "must be 1 to 64 of a-z, 0-9, dot, underscore, dash, beginning with a letter or digit"
    meant = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")[:64]
    return rule, f'did you mean "{meant}"?' if meant else ""


def _weights(text: str, directory: Path) -> Verdict:
    """The files must exist; their content is checked when a worker builds the model."""
    if not text:
        return FINE
    if addresses.is_like(text):
        return _address(text)
    place, beside = directory / text, list[str]()
    try:
        if place.is_dir():
            has_any = any(place.glob("*.safetensors"))
            return FINE if has_any else (f'there is no .safetensors file in "{text}"', "")
        regular.check(place)
        if place.is_file():
            is_one = text.endswith(".safetensors")
            return FINE if is_one else ("must be a .safetensors file, or a directory of such", "")
        beside = [path.name for path in place.parent.glob("*.safetensors")]
    except NotRegular as error:
        return f'"{text:.200}" is {error.kind}, not a .safetensors file', ""
    except (OSError, ValueError):
        pass  # As for a name that no file can have.
    close = difflib.get_close_matches(Path(text).name, beside, n=1)
    meant = f'did you mean "{Path(text).with_name(close[0])}"?' if close else ""
    return f'there is no file or directory "{text:.200}"; it is relative to the job file', meant


def _run_dir(text: str) -> Verdict:
    if not text or "\0" in text:
        return "must be a directory's path", ""
    return FINE


def _state_dir(text: str) -> Verdict:
    if text and ("\0" in text or not text.startswith("/")):
        return 'must be a full path, or "" for the default', ""
    return FINE


def _target(text: str) -> Verdict:
    try:
        Target.parse(text)
    except ValueError as error:
        return str(error), ""
    return FINE


def _best(text: str) -> Verdict:
    try:
        Best.parse(text)
    except ValueError as error:
        return str(error), ""
    return FINE


def _mirror(text: str) -> Verdict:
    return _address(text.replace(RUN_IN_ADDRESS, "run")) if text else FINE


def _address(text: str) -> Verdict:
    fault = addresses.verdict(text)
    return fault if fault != addresses.FINE else addresses.missing_package(text)


def _setting(key: str, text: str) -> Verdict:
    """Parsed as by `dlctl set`."""
    try:
        GENERAL[key].parse(text.strip())
    except ValueError as error:
        return str(error), ""
    return FINE


def _check_ports(document: dict[str, Any]) -> Iterator[Fault]:
    port = get(document, ("network", "port"))
    servers = get(document, ("servers", "count"))
    transport = get(document, ("network", "transport"))
    if type(port) is not int or not 0 < port <= PORT_MAX:
        return
    if (transport or Network().transport) != "tcp" and not launchers.has_others(document):
        yield Fault(("network", "port"), "has a meaning only with tcp", 'add transport = "tcp"')
    servers = servers if type(servers) is int else Servers().count
    if port + servers > PORT_MAX:
        message = f"{servers} servers take the ports after it, up to {port + servers}"
        yield Fault(("network", "port"), f"{message}; the last port is {PORT_MAX}")


def _check_extras(document: dict[str, Any]) -> Iterator[Fault]:
    """The coordinator, which writes these, runs on this machine with this Python."""
    wanted = {
        "tensorboard": "tensorboard", "prometheus_port": "prometheus", "wandb": "wandb",
        "mlflow": "mlflow",
    }  # fmt: skip
    for key, extra in wanted.items():
        value = get(document, ("log", key))
        if value and value != OFF and (why := extras.missing(extra)):
            yield Fault(("log", key), why, extras.how_to_install(extra))


def _check_encryption(document: dict[str, Any]) -> Iterator[Fault]:
    path = ("network", "encryption")
    if get(document, path) == "none" and launchers.has_others(document):
        message = "without encryption only this machine can take part"
        yield Fault(path, message, 'remove it, or write "curve"')


def _check_target_is_looked_at(document: dict[str, Any]) -> Iterator[Fault]:
    path = ("evaluation", "every_epochs")
    every = get(document, path)
    is_looked_at = bool(get(document, ("evaluation", "every_steps")))
    if get(document, ("job", "stop", "target")) is not None and every == 0 and not is_looked_at:
        yield Fault(path, "must be > 0 to notice that job.stop.target is reached")


def _check_unbiased(document: dict[str, Any]) -> Iterator[Fault]:
    """Sent values are multiplied by 1 / density: float16 ends at 65,504, and the rounding errors of
    16 bits would be lost, because there is no residual for a later push.
    """
    section = partial(get, document)
    is_unbiased = section(("compression", "name")) == "randomk"
    is_unbiased &= section(("compression", "unbiased")) is True
    precision = section(("compression", "values"))
    if is_unbiased and precision in ("float16", "bfloat16"):
        message = 'must be "float32" with unbiased = true: 16 bits are not right on average'
        yield Fault(("compression", "values"), message, "remove it, or remove unbiased")
