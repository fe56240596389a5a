"""`dlctl kubernetes`: what is in a manifest, how its parts refer to each other, what is refused."""

from __future__ import annotations

import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dlctl.control import invitation, prepared
from dlctl.errors import Unreachable, UsageError

from .manifests import EVERY, VOLATILE, copied, objects, text

NAME = "digits-joined"


def pod_of(found: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    spec: dict[str, Any] = found["Job", name]["spec"]["template"]["spec"]
    return spec


def test_references_between_the_objects_hold() -> None:
    found = objects(text(**EVERY))
    for kind, name in (("Job", "other-control"), ("Job", "other-workers")):
        job = found[kind, name]
        labels = job["spec"]["template"]["metadata"]["labels"]
        policy = "other-control" if name == "other-control" else "other-workers"
        chosen = found["NetworkPolicy", policy]["spec"]["podSelector"]["matchLabels"]
        assert chosen.items() <= labels.items()
        spec = pod_of(found, name)
        (container,) = spec["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in found
            if secret := volume.get("secret"):
                assert ("Secret", secret["secretName"]) in found
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in found
    service = found["Service", "other"]["spec"]
    control = found["Job", "other-control"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= control.items()
    ports = [port["port"] for port in service["ports"]]
    rule = found["NetworkPolicy", "other-control"]["spec"]["ingress"][0]
    workers = found["Job", "other-workers"]["spec"]["template"]["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= workers.items()
    assert ports == list(range(rule["ports"][0]["port"], rule["ports"][0]["endPort"] + 1))
    assert {each["metadata"]["namespace"] for each in found.values()} == {"lab"}


def test_no_pod_is_root_writes_its_file_system_or_has_a_token() -> None:
    found = objects(text())
    for name in ("digits-joined-control", "digits-joined-workers"):
        spec = pod_of(found, name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert {"/tmp", "/home/dlctl", "/dev/shm"} <= writable


def test_options_are_where_kubernetes_wants_them() -> None:
    found = objects(text(**EVERY))
    workers = found["Job", "other-workers"]["spec"]
    assert (workers["completions"], workers["parallelism"]) == (2, 2)
    (worker,) = pod_of(found, "other-workers")["containers"]
    asked = {"cpu": "500m", "memory": "1.5Gi", "nvidia.com/gpu": 1}
    assert worker["resources"]["requests"] == asked
    assert worker["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert worker["workingDir"] == "/work/digits"
    claim = found["PersistentVolumeClaim", "other-state"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "5G"
    assert claim["storageClassName"] == "fast.ssd"


def test_the_job_in_the_pod_listens_there_and_is_reached_at_the_service() -> None:
    found = objects(text(namespace="lab"))
    job = tomllib.loads(found["ConfigMap", "digits-joined-job"]["data"]["job.toml"])
    service = found["Service", NAME]["spec"]["ports"]
    assert job["network"]["address"] == "digits-joined.lab.svc"
    assert job["network"]["bind"] == pod_of(found, "digits-joined-control")["hostname"]
    assert job["network"]["port"] == service[0]["port"]
    assert len(service) == 1 + job["servers"]["count"]


def test_invitations_are_of_the_keys_that_only_the_control_pod_has(tmp_path: Path) -> None:
    found = objects(text())
    file = tmp_path / "run.json"
    file.touch(0o600)
    file.write_text(found["Secret", "digits-joined-control"]["stringData"]["run.json"])
    made = prepared.load(file)
    rows = found["Secret", "digits-joined-invitations"]["stringData"]
    assert sorted(rows) == ["0.invite", "1.invite", "2.invite"]
    expected = made.invitations("tcp://digits-joined.default.svc:7100")
    for index, row in enumerate(rows.values()):
        file = tmp_path / f"{index}.invite"
        file.touch(0o600)
        file.write_text(row)
        assert invitation.load(file) == expected[index]
        assert made.key.hex() not in row
    assert [each.slot for each in made.invited] == [1, 2, 3], "behind worker-0, of the run itself"
    assert len({each.secret for each in expected}) == 3


def test_a_run_whose_state_is_in_memory_ends_with_its_pod(tmp_path: Path) -> None:
    kept, volatile = objects(text()), objects(text(copied(tmp_path, VOLATILE)))
    assert ("PersistentVolumeClaim", "digits-joined-state") in kept
    assert ("PersistentVolumeClaim", "digits-joined-state") not in volatile
    assert kept["Job", "digits-joined-control"]["spec"]["backoffLimit"] > 0
    assert volatile["Job", "digits-joined-control"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"name": "Digits_1"}, "DNS label"),
        ({"name": "d" * 41}, "DNS label"),
        ({"namespace": "a/b"}, "namespace"),
        ({"memory": "4 GB"}, "--memory"),
        ({"memory": "4000m"}, "--memory"),
        ({"control_memory": "0"}, "--control-memory"),
        ({"cpu": "1Gi"}, "--cpu"),
        ({"storage": "-5Gi"}, "--storage"),
        ({"storage_class": "a b"}, "--storage-class"),
        ({"env_from": "a: b"}, "--env-from"),
        ({"image": "a b"}, "image"),
        ({"path": "job"}, "--path"),
        ({"path": "/a/../b"}, "--path"),
        ({"path": "/tmp/job"}, "--path"),
        ({"hours": float("nan")}, "--hours"),
        ({"workers": 4}, "--workers"),
        ({"workers": 0}, "--workers"),
    ],
)
def test_options_that_kubernetes_would_refuse_are_refused(
    options: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        text(**options)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('script = "loop.py"', 'task = "train.py:task"', "task"),
        ('script = "loop.py"', 'script = "../loop.py"', "outside"),
        ("max = 4 ", "", "no worker can join"),
        ('name = "async-diloco"', 'name = "allreduce"', "allreduce|links"),
        ("[network]", '[checkpoints]\nmirror = "file:///data/ckpt"\n[network]', "mirror"),
        ("[network]", '[[hosts]]\nssh = "there"\n[network]', "hosts"),
        ('name = "digits-joined"', 'name = "digits.joined"', "DNS label"),
    ],
)
def test_jobs_whose_workers_cannot_be_pods_are_refused(
    tmp_path: Path, old: str, new: str, names: str
) -> None:
    home = tmp_path / "job"
    home.mkdir()
    file = copied(home, (old, new))
    (tmp_path / "loop.py").write_text("")
    with pytest.raises(UsageError, match=names):
        text(file)


def test_processes_of_a_worker_are_started_by_torchrun(tmp_path: Path) -> None:
    file = copied(
        tmp_path,
        ("threads = 1", "processes = 2"),
        ("stop =", 'args = ["--a b", "$(HOME)", "$$(HOME)$"]\nstop ='),
    )
    (worker,) = pod_of(objects(text(file)), "digits-joined-workers")["containers"]
    command = worker["args"][worker["args"].index("--") + 1 :]
    expected = ["loop.py", "--a b", "$$(HOME)", "$$$$(HOME)$$"]
    assert command[-4:] == expected, "Kubernetes makes one $ of two"
    assert command[0] == "torchrun"


def test_a_job_file_has_any_letter(tmp_path: Path) -> None:
    file = copied(tmp_path, ("# Every key", "# \U0001f680 \u00e9 \u2028 \\u0041 Every key"))
    manifest = text(file)
    assert manifest.isascii()
    assert "\\ud8" not in manifest, "half a letter, which kubectl refuses"
    job = objects(manifest)["ConfigMap", "digits-joined-job"]["data"]["job.toml"]
    assert "# \U0001f680 \u00e9 \u2028 \\u0041 Every key" in job


@pytest.mark.parametrize("word", ["true", "null", "no"])
def test_a_name_that_yaml_has_a_meaning_for_is_a_name(word: str) -> None:
    found = objects(text(name=word, namespace=word, storage_class=word, env_from=word))
    assert found["Service", word]["metadata"]["namespace"] == word
    labels = found["Job", f"{word}-control"]["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == word
    (worker,) = pod_of(found, f"{word}-workers")["containers"]
    assert worker["envFrom"] == [{"secretRef": {"name": word}}]


def test_a_worker_that_finds_no_run_does_not_begin_again_for_days() -> None:
    rules = objects(text())["Job", "digits-joined-workers"]["spec"]["podFailurePolicy"]["rules"]
    (final,) = (rule for rule in rules if rule["action"] == "FailIndex")
    assert Unreachable.exit_code in final["onExitCodes"]["values"]


def test_the_file_is_for_its_owner_alone_and_standard_output_is_named_if_it_is_not(
    tmp_path: Path, dlctl_command: Any
) -> None:
    """It has the keys of the run."""
    words = ("kubernetes", "--image", "me/digits:1", str(copied(tmp_path)))
    made, printed = tmp_path / "made.yaml", tmp_path / "printed.yaml"
    ended = dlctl_command(*words, "-o", str(made))
    assert (ended.code, ended.out) == (0, f"{made}\n"), ended.err
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    for mode, is_told in ((0o644, True), (0o600, False)):
        with printed.open("wb") as file:
            printed.chmod(mode)
            command = [sys.executable, "-P", "-m", "dlctl", *words]
            told = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True).stderr
        assert objects(printed.read_text()).keys() == objects(made.read_text()).keys()
        assert ("chmod 600" in told) == is_told
