"""Runs with a mirror: its store is away, throttles, refuses; its process is killed; all is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import s3_servers
from s3_servers import Proxy
from safetensors.numpy import save_file
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.records.manifest import has_updates
from dlctl.stores import addresses, checkpoint_store, s3
from dlctl.stores.checkpoint_store import Contents

PATIENCE_S = 200.0
SAMPLES, EPOCHS = 256, 4


def job(place: Workplace, mirror: str, stop: str = ENDLESS, more: str = "") -> None:
    place.job(stop=stop, checkpoint_every_s=1.0, more=more)
    path = place.path / "job.toml"
    path.write_text(
        path.read_text().replace("every_s = 1.0", f'every_s = 1.0\nmirror = "{mirror}"')
    )


def start(place: Workplace) -> Path:
    ended = place.dlctl("start", "job.toml", timeout_s=PATIENCE_S)
    assert ended.code == 0, ended.err
    return place.directory


def look(address: str) -> Contents:
    return checkpoint_store.at(addresses.parse(address)).look()


def mirror_of(place: Workplace) -> dict[str, Any]:
    found: dict[str, Any] = place.run().get("mirror") or {}
    return found


def newer(place: Workplace, than: int = 0) -> Callable[[], int | None]:
    """A step in the mirror above this one."""

    def found() -> int | None:
        step = mirror_of(place).get("step")
        return step if step is not None and step > than else None

    return found


def processes(place: Workplace, module: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(str(place.path) in word for word in words) and (not module or module in words):
            found.append(process)
    return found


def lose_all(place: Workplace) -> None:
    """Every process is gone, and every file but the job's."""
    for process in processes(place):
        process.send_signal(signal.SIGKILL)
    place.until("all are gone", lambda: not processes(place))
    for name in ("runs", "state", "x"):
        shutil.rmtree(place.path / name)
    (place.path / "x").mkdir(mode=0o700)


def test_all_machines_are_lost_and_a_new_one_goes_on_with_every_sample(
    place: Workplace, prefix: str
) -> None:
    place.task(pause_s=SLOW_S, samples=SAMPLES)
    seen = place.count_samples()
    job(place, prefix, stop=f"{{ epochs = {EPOCHS} }}")
    old = start(place)
    place.until("a checkpoint with updates is mirrored", newer(place), PATIENCE_S)
    lose_all(place)
    contents = look(prefix)
    name = contents.order()[0]
    saved = contents.manifests[name]
    assert has_updates(saved)
    Path(f"{place.path / 'train.py'}.seen").write_text("")

    refused = place.dlctl("start", "job.toml", timeout_s=PATIENCE_S)
    assert refused.code == 1, refused.err
    assert f"dlctl start --from {prefix}" in refused.err
    began = place.dlctl("start", "--from", prefix, "job.toml", timeout_s=PATIENCE_S)
    assert began.code == 0, began.err
    assert f"from the checkpoint of {old.name} at step {saved['step']}" in began.err
    ended = place.dlctl("wait", timeout_s=PATIENCE_S)
    assert ended.code == 0, ended.err
    run = place.run()
    assert (run["state"], run["samples"]) == ("finished", SAMPLES * EPOCHS)
    assert seen().total() == SAMPLES * EPOCHS - saved["samples"]
    contents = look(prefix)
    assert contents.whose() == place.directory.name
    assert contents.manifests[contents.order()[0]]["samples"] == SAMPLES * EPOCHS
    assert name in contents.names, "what it has started from stays"
    place.nothing_left()


def test_a_store_that_fails_holds_up_nothing_and_gets_the_newest_when_it_is_back(
    place: Workplace, prefix: str, proxy: Proxy
) -> None:
    place.task(pause_s=SLOW_S)
    job(place, prefix)
    start(place)
    before = place.until("one is mirrored", newer(place), PATIENCE_S)
    for code, fault in (
        ("mirror-behind", (503, "SlowDown")),
        ("mirror-refused", (400, "ExpiredToken")),
        ("mirror-refused", (403, "AccessDenied")),
        ("mirror-behind", None),
    ):
        if fault is None:
            proxy.down()
        else:
            proxy.fault = lambda method, path, headers, fault=fault: fault
        found = place.until(f"{code} is reported", lambda c=code: problem(place, c), PATIENCE_S)
        assert found["facts"]["address"] == prefix
        step = place.run()["step"]
        place.until("it trains on", lambda s=step: place.run()["step"] > s + 20, PATIENCE_S)
        proxy.fault = lambda method, path, headers: None
        if fault is None:
            proxy.up()
        before = place.until("it is mirrored again", newer(place, before), PATIENCE_S)
        place.until("the problem is over", lambda c=code: problem(place, c) is None, PATIENCE_S)
        contents = look(prefix)
        assert not any(contents.missing(name) for name in contents.names)
    assert place.dlctl("stop", timeout_s=PATIENCE_S).code == 0
    contents = look(prefix)
    assert contents.manifests[contents.order()[0]]["step"] == place.run()["step"]
    place.nothing_left()


def problem(place: Workplace, code: str) -> dict[str, Any] | None:
    found = [each for each in place.run().get("problems", []) if each["code"] == code]
    return found[0] if found else None


def test_an_upload_that_is_killed_is_no_checkpoint_and_is_made_again(
    place: Workplace, prefix: str, proxy: Proxy
) -> None:
    place.task(pause_s=SLOW_S)
    job(place, prefix)
    start(place)
    before = place.until("one is mirrored", newer(place), PATIENCE_S)
    for victim in ("daemons.mirror", "daemons.coordinator"):
        proxy.requests.clear()
        proxy.holds.clear()
        place.until("an upload hangs", lambda: uploads(proxy), PATIENCE_S)
        complete = look(prefix).names
        (process,) = processes(place, victim)
        process.send_signal(signal.SIGKILL)
        place.until("it is gone", lambda p=process: not p.is_running(), PATIENCE_S)
        contents = look(prefix)
        assert contents.names == complete
        proxy.holds.set()
        before = place.until("a newer one is mirrored", newer(place, before), PATIENCE_S)
        contents = look(prefix)
        assert not any(contents.missing(name) for name in contents.names)
    assert place.dlctl("stop", timeout_s=PATIENCE_S).code == 0
    place.nothing_left()


def uploads(proxy: Proxy) -> list[str]:
    return [path for method, path in [*proxy.requests] if method == "PUT" and "shard" in path]


def test_the_end_of_a_run_waits_for_its_store_as_long_as_the_job_says(
    place: Workplace, prefix: str, proxy: Proxy
) -> None:
    place.task(pause_s=SLOW_S)
    job(place, prefix, more="[timeouts]\nmirror_s = 2.0\n")
    start(place)
    place.until("one is mirrored", newer(place), PATIENCE_S)
    proxy.down()
    assert place.dlctl("stop", timeout_s=PATIENCE_S).code == 0
    (late,) = place.events("late")
    assert "mirroring" in late
    assert prefix in late
    ended = json.loads(place.dlctl("status", "--json").out)
    assert ended["mirror"]["step"] < ended["step"]
    assert any(each["code"].startswith("mirror-") for each in ended["problems"])
    proxy.up()
    start(place)
    place.until("the rest is uploaded", newer(place, ended["mirror"]["step"]), PATIENCE_S)
    assert place.dlctl("stop", timeout_s=PATIENCE_S).code == 0
    place.nothing_left()


def test_what_is_wrong_with_a_store_is_said_before_anything_is_started(
    place: Workplace, prefix: str, proxy: Proxy
) -> None:
    place.task()
    readonly = (403, "AccessDenied")
    for mirror, fault, why in (
        ("s3://no-such-bucket/x", None, "there is no such bucket"),
        (prefix, readonly, "access is denied"),
    ):
        job(place, mirror)
        proxy.fault = lambda method, path, headers, fault=fault: fault if method == "PUT" else None
        for command in (("start", "job.toml"), ("doctor", "job.toml")):
            refused = place.dlctl(*command, timeout_s=PATIENCE_S)
            assert (refused.code, why in refused.err + refused.out) == (1, True), refused.err
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        secret = place.env.pop(key)
    refused = place.dlctl("start", "job.toml", timeout_s=PATIENCE_S)
    assert refused.code == 1
    assert "AWS_ACCESS_KEY_ID" in refused.err
    assert secret not in refused.err
    assert not (place.path / "runs").exists()
    place.nothing_left()


def test_weights_and_data_come_from_a_store(place: Workplace, prefix: str, moto: str) -> None:
    """Once for both workers."""
    place.task(samples=32)
    text = (place.path / "train.py").read_text()
    reads = 'import dlctl; assert dlctl.fetched("s3://bucket/clouds/data/x").read_text() == "x"'
    (place.path / "train.py").write_text(f"{reads}\n{text}")
    place.env["XDG_CACHE_HOME"] = str(place.path / "cache")
    there = s3_servers.client(moto)
    there.put_object(Bucket=s3_servers.BUCKET, Key="clouds/data/x", Body=b"x")
    shapes = {"0.weight": (8, 2), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    file = place.path / "w.safetensors"
    save_file({key: np.full(shape, 0.25, np.float32) for key, shape in shapes.items()}, file)
    there.upload_file(str(file), s3_servers.BUCKET, "clouds/w.safetensors")
    program = f'task = "train.py:task"\nweights = "{prefix}/w.safetensors"'
    place.job(stop="{ steps = 1 }", workers=2, program=program)
    ended = place.dlctl("run", "job.toml", timeout_s=PATIENCE_S)
    assert ended.code == 0, ended.err
    found = [*(place.directory / "weights").rglob("*.safetensors")]
    assert [path.read_bytes() for path in found] == [file.read_bytes()]
    place.job(program=program.replace("w.safe", "v.safe"))
    refused = place.dlctl("start", "--fresh", "job.toml", timeout_s=PATIENCE_S)
    assert (refused.code, "v.safetensors" in refused.err) == (4, True), refused.err
    place.nothing_left()


def test_a_large_file_is_sent_in_parts(place: Workplace, prefix: str, proxy: Proxy) -> None:
    file = place.path / "large"
    file.write_bytes(os.urandom(1 << 20) * 70)
    objects = checkpoint_store.objects_at(addresses.parse(prefix))
    sent: list[int] = []
    objects.put("large", file, sent.append)
    parts = [path for method, path in proxy.requests if method == "PUT" and "partNumber" in path]
    assert len(parts) == -(-file.stat().st_size // s3.PART_BYTES)
    assert sum(sent) == file.stat().st_size
    assert objects.size("large") == file.stat().st_size
    for nbytes in (1, 5 << 30, 5 << 40):
        part_bytes = s3._put_options(nbytes)["chunksize"]
        assert nbytes / part_bytes < 10_000
        assert part_bytes < 5 << 30
