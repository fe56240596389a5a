"""A replica that joins where all of its host share one model: it waits until that is the run's."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.errors import JobFailed
from dlctl.roles.worker.services.taking_over import LOOK_S, SHARED_S, Sharing


def test_it_waits_until_another_one_has_put_the_model_there():
    mark = np.zeros(1, np.uint8)
    joins = Sharing(mark)
    assert not joins.advance(5.0)
    assert joins.deadline() == 5.0 + LOOK_S, "nobody tells of it: it looks again"
    mark[0] = 1
    assert joins.advance(5.1)


def test_it_gives_up_when_nobody_does():
    joins = Sharing(np.zeros(1, np.uint8))
    assert not joins.advance(5.0)
    assert not joins.advance(4.9 + SHARED_S)
    with pytest.raises(JobFailed):
        joins.advance(5.0 + SHARED_S)
