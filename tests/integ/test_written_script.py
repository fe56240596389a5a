"""The program that `dlctl init --script` writes trains as it is."""

from __future__ import annotations

import pytest
from workplace import Workplace


@pytest.mark.long
def test_the_written_program_trains_in_two_workers(place: Workplace) -> None:
    assert place.dlctl("init", "--script", "--force", ".").code == 0
    file = place.path / "job.toml"
    file.write_text(file.read_text().replace("seconds = 300", "epochs = 4"))
    ended = place.dlctl("run", "job.toml", timeout_s=120.0)
    assert ended.code == 0, ended.err
    run = place.run()
    assert (run["state"], run["samples"]) == ("finished", 4 * 8192)
    assert run["evaluation"]["accuracy"] > 0.6
    place.nothing_left()
