"""A loop whose method trains clients, one after the other: no step is of two of them."""

from __future__ import annotations

import pytest
from loops import LOOP, script, write_loop
from workplace import Workplace

STEP = "            run.step(loss=loss)\n"
NOTES = f"""{STEP}            print(len(batch[0]), file=open(HERE / f"sizes-{{run.worker}}", "a"))
"""


@pytest.mark.long
def test_a_round_ends_with_the_last_client_and_a_batch_with_its_client(place: Workplace) -> None:
    """A client has 16 samples, which 12 do not divide."""
    write_loop(place, LOOP.replace(STEP, NOTES), samples=256, batch_size=12)
    place.job(
        stop="{ epochs = 3 }", workers=2, program=script(), optimizer="",
        algorithm='name = "fedavg"\nfraction = 1.0',
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=120.0)
    assert ended.code == 0, ended.err
    sizes = [int(line) for file in place.path.glob("sizes-*") for line in file.read_text().split()]
    assert sum(sizes) == place.run()["samples"] == 3 * 256
    assert sorted(set(sizes)) == [4, 12]
    place.nothing_left()
