"""The pods of a manifest as containers of this machine, made of what the kernel has: namespaces, an
overlay of this machine's files as the image, users without rights. It does what a kubelet does with
the fields that the manifest has; Jobs, Services and network policies are not carried out, but for
the address of the Service. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from dlctl.util import processes

from .manifests import ROOT

TOOLS = ("unshare", "nsenter", "setpriv", "catatonit", "ip", "nft")
SERVICE_IP = "10.99.0.100"
USER, GROUP_MODE, SHARED_MODE = 1000, 0o440, 0o2775
SETUP_S = 30.0
PROGRAMS = (ROOT, Path(sys.prefix), Path(sys.base_prefix))


def missing() -> str:
    """Why there can be no pods here; "" if there can."""
    if os.geteuid() != 0:
        return "not root"
    gone = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"no {', '.join(gone)}" if gone else ""


class Node:
    """Runs pods, one network for all of them."""

    def __init__(self, objects: dict[tuple[str, str], dict[str, Any]], image: Path) -> None:
        """image: the directory that is at the pods' working directory."""
        self.objects, self.image = objects, image
        self.folder = Path(tempfile.mkdtemp(prefix="dlctl-pods-"))
        self.folder.chmod(0o755)
        self._pods: list[subprocess.Popen[bytes]] = []
        self._net = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        while os.readlink(f"/proc/{self._net.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert self._net.poll() is None
        for words in (
            "link set lo up",
            "addr add 10.99.0.1/32 dev lo",
            "route add 10.99.0.0/24 dev lo",
        ):
            self._inside("ip", *words.split())
        self._inside("nft", "add", "table", "ip", "service")
        hook = "{ type nat hook output priority -100; }"
        self._inside("nft", "add", "chain", "ip", "service", "output", hook)

    def _inside(self, *argv: str) -> None:
        subprocess.run(
            ["nsenter", f"--net=/proc/{self._net.pid}/ns/net", *argv], check=True, timeout=SETUP_S
        )

    def claim(self, name: str) -> Path:
        """The directory of a persistent volume."""
        assert ("PersistentVolumeClaim", name) in self.objects
        return self._volume(self.folder / f"claim-{name}")

    def _volume(self, path: Path) -> Path:
        if not path.exists():
            path.mkdir()
            os.chown(path, 0, USER)
            path.chmod(SHARED_MODE)
        return path

    def _source(self, volume: dict[str, Any], pod: Path) -> Path:
        """The directory of this machine that is a volume of a pod."""
        if claim := volume.get("persistentVolumeClaim"):
            return self.claim(claim["claimName"])
        path = self._volume(pod / volume["name"])
        key = ("Secret", volume["secret"]["secretName"]) if "secret" in volume else None
        key = key or (("ConfigMap", volume["configMap"]["name"]) if "configMap" in volume else None)
        if key is not None:
            content = self.objects[key]
            for name, text in (content.get("data") or content["stringData"]).items():
                (path / name).write_text(text)
                os.chown(path / name, 0, USER)
                (path / name).chmod(GROUP_MODE)
        return path

    def start(
        self, job: str, number: int, *, index: int | None = None, args: list[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A pod of a Job. number: another one for each; its address is 10.99.0.<number>."""
        spec = self.objects["Job", job]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        pod = self.folder / f"pod-{number}"
        pod.mkdir()
        address = f"10.99.0.{number}"
        self._inside("ip", "addr", "add", f"{address}/32", "dev", "lo")
        if "hostname" in spec:  # The control pod, whose ports the Service has.
            self._inside("nft", "flush", "chain", "ip", "service", "output")
            rule = f"ip daddr {SERVICE_IP} dnat to {address}"
            self._inside("nft", "add", "rule", "ip", "service", "output", *rule.split())
        script = pod / "pod.sh"
        script.write_text(self._script(spec, container, pod, address, index, args))
        with (pod / "log").open("wb") as log:
            started = subprocess.Popen(
                [
                    "nsenter", f"--net=/proc/{self._net.pid}/ns/net", "unshare", "--mount", "--pid",
                    "--uts", "--ipc", "--fork", "--kill-child=SIGKILL", "sh", "-eu", str(script),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._pods.append(started)
        return started

    def _script(
        self, spec: dict[str, Any], container: dict[str, Any], pod: Path, address: str,
        index: int | None, args: list[str] | None,
    ) -> str:  # fmt: skip
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        root, workdir = pod / "upper" / "root", container["workingDir"]
        name = spec.get("hostname", f"pod-{address}")
        (service,) = [n for kind, n in self.objects if kind == "Service"]
        hosts = f"127.0.0.1 localhost\n{address} {name}\n{SERVICE_IP} {service}.default.svc\n"
        (pod / "hosts").write_text(hosts)
        lines = [
            "mount --make-rprivate /",
            f"mkdir {pod}/upper",
            f"mount -t tmpfs none {pod}/upper",
            f"mkdir {pod}/upper/new {pod}/upper/work {root}",
            f"mount -t overlay -o lowerdir=/,upperdir={pod}/upper/new,workdir={pod}/upper/work "
            f"none {root}",
            f"mkdir -p {root}{workdir}",
            f"cp -r {self.image}/. {root}{workdir}",
            f"cp {pod}/hosts {root}/etc/hosts",
            f"hostname {name}",
            f"mount --rbind /dev {root}/dev",
            f"mount -t proc none {root}/proc",
        ]
        for path in {*Path(sys.base_prefix).parents, *ROOT.parents} - {Path("/")}:
            lines.append(f"chmod o+x {root}{path}")  # Of an image everybody reads the programs.
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            hidden = [path for path in PROGRAMS if path.is_relative_to(mount["mountPath"])]
            assert not hidden, (
                f"pods have a {mount['mountPath']} of their own, so that they lack {hidden[0]}: "
                "run this in a clone elsewhere"
            )
            volume, target = volumes[mount["name"]], f"{root}{mount['mountPath']}"
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                lines += [f"mount -t tmpfs -o mode=1777 none {target}"]
                continue
            source = self._source(volume, pod) / mount.get("subPath", "")
            make = "touch" if "subPath" in mount else "mkdir -p"
            lines += [f"{make} {target}", f"mount --bind {source} {target}"]
            if mount.get("readOnly"):
                lines += [f"mount -o remount,ro,bind {target}"]
        user = spec["securityContext"]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            **{row["name"]: row["value"] for row in container["env"]},
            **({} if index is None else {"JOB_COMPLETION_INDEX": str(index)}),
        }
        variables = shlex.join(f"{key}={value}" for key, value in environment.items())
        command = shlex.join(["catatonit", "--", *(args or container["args"])])
        lines += [
            f"mount -o remount,ro {root}",
            f"cd {root}",
            f"exec chroot . setpriv --reuid {user['runAsUser']} --regid {user['runAsGroup']} "
            "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "
            f"env -i -C {workdir} {variables} {command}",
        ]
        return "\n".join(lines) + "\n"

    def signal(self, pod: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to the first process of a pod."""
        (first,) = psutil.Process(pod.pid).children()
        first.send_signal(number)

    def logs(self) -> str:
        found = sorted(self.folder.glob("pod-*/log"))
        return "\n".join(f"== {log.parent.name}\n{log.read_text()[-3000:]}" for log in found)

    def close(self) -> None:
        for pod in self._pods:
            for each in psutil.Process(pod.pid).children() if pod.poll() is None else ():
                processes.send_signal(each.pid, processes.start_of(each.pid), signal.SIGKILL)
            pod.wait(SETUP_S)
        self._net.kill()
        self._net.wait()
        shutil.rmtree(self.folder)
