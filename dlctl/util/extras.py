"""Packages that only some users need: named in pyproject.toml, imported when they are used."""

from __future__ import annotations

from importlib import util

from dlctl.errors import DlctlError

PACKAGES = {
    "gs": "gcsfs",
    "mlflow": "mlflow",
    "plot": "matplotlib",
    "prometheus": "prometheus_client",
    "s3": "s3fs",
    "sweep": "optuna",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Extra of dlctl -> the module that it installs."""


def is_there(extra: str) -> bool:
    return util.find_spec(PACKAGES[extra]) is not None


def how_to_install(extra: str) -> str:
    return f"pip install 'dlctl[{extra}]'"


def missing(extra: str) -> str:
    """The error, as part of a sentence; "" if the package is installed."""
    package = PACKAGES[extra].replace("_", "-")
    return "" if is_there(extra) else f'needs the package "{package}", which is not installed'


def require(extra: str, what: str) -> None:
    """Raises DlctlError if the package is missing; what: the feature, as in "dlctl plot"."""
    if why := missing(extra):
        raise DlctlError(f"{what} {why}", hint=how_to_install(extra))
