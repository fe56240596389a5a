"""A method that compares losses of the whole dataset tells of modules that make them differ."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from daemons.worker.building import warn_of_changing_losses


class KeepsStatistics(nn.Sequential):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1 (BatchNorm1d)"),
        (nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0)), "0 (Dropout)"),
        (nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.1)), "0 (LSTM)"),
        (nn.Dropout2d(0.1), "the model (Dropout2d)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_is_named_with_what_to_do(model, named, caplog) -> None:
    warn_of_changing_losses("sandblaster", model.train())
    assert f"parameters: {named}; use p = 0" in caplog.text


def test_of_many_some_are_named(caplog) -> None:
    warn_of_changing_losses("sandblaster", nn.Sequential(*(nn.Dropout(0.1) for _ in range(30))))
    assert " more; use p = 0" in caplog.text


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0)),
        KeepsStatistics(nn.BatchNorm1d(2)),
        nn.TransformerEncoderLayer(4, 2, dropout=0.0),
    ],
    ids=["nothing random", "eval", "a transformer"],
)
def test_what_depends_on_the_parameters_alone_is_fine(model, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_changing_losses("sandblaster", model.train())
    assert not caplog.text
