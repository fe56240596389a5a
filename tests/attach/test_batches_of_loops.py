"""Loops that accumulate, skip steps, compile and load in processes of their own: each sample is in
one step, and each step that was made is in an exchange.
"""

from __future__ import annotations

from collections import Counter

import pytest
from loops import script, write_loop
from workplace import Workplace

SAMPLES, EPOCHS, WORKERS = 200, 3, 2
SCALED = """

def main(way):
    model = task.model()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run = dlctl.attach(compiled, optimizer, task.evaluate, scaler=scaler)
    if way == "gradients":
        optimizer = run.optimizer(compiled)
    group, groups = [], 0
    with run, open(HERE / f"steps-{run.worker}", "w") as file:
        for points, label in run.loader(task.dataset(), 8, num_workers=2):
            scaler.scale(task.loss(compiled, (points, label)) / 3).backward()
            group += [point.numpy().tobytes().hex() for point in points]
            if not run.micro(of=3):
                continue
            groups += 1
            overflows = groups % 5 == 2
            if overflows:
                model[0].weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.step()
            print("skipped" if overflows else "made", *group, file=file, flush=True)
            group.clear()
    print("not in a step", *group, file=open(HERE / f"left-{run.worker}", "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
METHODS = {
    "own": ('name = "diloco"\nlocal_steps = 4', ""),
    "gradients": ('name = "sync"', '[optimizer]\nname = "sgd"\nlr = 0.05\n'),
}


@pytest.mark.timeout(200)
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("way", METHODS)
def test_no_sample_is_lost_and_no_exchange_skipped(place: Workplace, way: str) -> None:
    write_loop(place, SCALED, samples=SAMPLES, pause_s=0.01)
    algorithm, optimizer = METHODS[way]
    place.job(
        stop=f"{{ epochs = {EPOCHS} }}", program=script(way), workers=WORKERS,
        algorithm=algorithm, optimizer=optimizer, more="\n[evaluation]\nevery_epochs = 1.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=180.0)
    assert ended.code == 0, ended.err
    kinds: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    made = 0
    for worker in range(WORKERS):
        assert (place.path / f"left-{worker}").read_text() == "not in a step\n"
        for line in (place.path / f"steps-{worker}").read_text().splitlines():
            kind, *group = line.split()
            assert 0 < len(group) <= 3 * 8
            kinds[kind] += 1
            samples.update(group)
            made += len(group) if kind == "made" else 0
    assert len(samples) == SAMPLES
    assert set(samples.values()) == {EPOCHS}, "each sample once in each epoch"
    assert kinds["skipped"] > 1
    assert (place.run()["step"], place.run()["samples"]) == (kinds["made"], made)
    assert place.dlctl("verify").code == 0
    place.nothing_left()
