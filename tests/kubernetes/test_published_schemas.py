"""The manifest against the published schemas of three versions of Kubernetes, and real kubectl."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from .discovery import server
from .manifests import EVERY, VOLATILE, copied, objects, text

OLDEST, MIDDLE, NEWEST = "1.29.0", "1.33.0", "1.37.0"
VERSIONS = (OLDEST, MIDDLE, NEWEST)
TIMEOUT_S = 60.0


@pytest.fixture(params=["as it is", "every option", "in memory"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "in memory":
        return text(copied(tmp_path, VOLATILE))
    return text(**(EVERY if request.param == "every option" else {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(manifest: str, version: str) -> None:
    for each in objects(manifest).values():
        assert kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("change", [("backoffLimitPerIndex", "backoffLimitPerindex"), ("100", "a")])
def test_a_mistake_is_found(version: str, change: tuple[str, str]) -> None:
    def validate(manifest: str) -> None:
        for each in yaml.safe_load_all(manifest):
            kubernetes_validate.validate(each, version, strict=True)

    validate(text())
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(text().replace(*change))


@pytest.mark.parametrize("version", VERSIONS)
def test_kubectl_takes_it(manifest: str, version: str, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("there is no kubectl: apt-get install kubernetes-client")
    asked: list[str] = []
    with server(version, asked) as address:
        argv = [
            kubectl, "--server", address, "apply", "--dry-run=client", "--validate=false",
            "-f", "-", "-o", "yaml",
        ]  # fmt: skip
        ended = subprocess.run(
            argv, input=manifest, capture_output=True, text=True, timeout=TIMEOUT_S,
            env=os.environ | {"HOME": str(tmp_path), "KUBECONFIG": "/dev/null"},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert not asked
    listed = yaml.safe_load(ended.stdout)["items"]
    understood = {(each["kind"], each["metadata"]["name"]): each for each in listed}
    wanted = objects(manifest)
    assert understood.keys() == wanted.keys()
    for key, each in wanted.items():
        assert understood[key].get("spec") == each.get("spec"), "nothing is dropped"
