"""The tasks of both parties in a fault test of split learning: not a model but an account.

Each part has a cell for every sample, and its gradient is exactly -1 in the cells of a batch. With
plain SGD at lr = 1 a cell is therefore the number of times that its sample was applied there. Every
process appends a line for each batch that it computes to a file that all share: who it is, and
which samples these are. The n-th line of a process is of its n-th push.

This file is copied into the folder of each party; it needs nothing of the tests.
"""

import os
import struct
import threading

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH = int(os.environ["LEDGER_CELLS"]), int(os.environ["LEDGER_BATCH"])
PAUSE_S = float(os.environ["LEDGER_PAUSE_S"])
LINE = struct.Struct(f"<{3 + BATCH}Q")
INDEX, VALUE = 0, 1
"""Columns of z: the number of a sample, and the value of its cell."""


def note(rows):
    """Write down which batch this process computes now."""
    slot = int(os.environ["DLCTL_NAME"].rpartition("-")[2])
    line = LINE.pack(slot, int(os.environ["DLCTL_INCARNATION"]), os.getpid(), *rows.tolist())
    file = os.open(os.environ["LEDGER_BLOCKS"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        assert os.write(file, line) == LINE.size
    finally:
        os.close(file)


class Account(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, z):
        rows = z[:, INDEX].long()
        if self.training:
            note(rows)
            threading.Event().wait(PAUSE_S)
        return torch.stack([z[:, INDEX], z[:, VALUE] + self.cells[rows]], 1)


class Party:
    def client_model(self):
        return Account()

    def server_model(self):
        return Account()

    def dataset(self):
        numbers = torch.arange(SAMPLES, dtype=torch.float32)
        return TensorDataset(torch.stack([numbers, torch.zeros(SAMPLES)], 1), numbers)

    def loss(self, output, y):
        return -output[:, VALUE].sum()


task = Party()
