"""The task of the fault tests: not a model but an account.

Its parameters are cells, one whole account per shard. The n-th gradient of a process is exactly -1
in one cell of every account, and no other gradient has that cell; with plain SGD at lr = 1 each
cell is therefore the number of times that its gradient was applied. Cells are given out in blocks:
a process appends a line to a file that all share, and the place of the line is the block. Nobody
holds a lock, so a process may be stopped or killed at any point.

This file is copied beside the job file; it needs nothing of the tests.
"""

import os
import struct

import torch
from torch import nn

SHARDS, CELLS = int(os.environ["LEDGER_SHARDS"]), int(os.environ["LEDGER_CELLS"])
BLOCK_CELLS = int(os.environ["LEDGER_BLOCK_CELLS"])
WORK = int(os.environ["LEDGER_WORK"])
LINE = struct.Struct("<QQQQ")
MATRIX_ROWS = 192


class Account(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(SHARDS * CELLS))


class Ledger:
    def __init__(self):
        self.gradients = 0
        self.first_cell = 0
        self.matrix = torch.rand(MATRIX_ROWS, MATRIX_ROWS) / MATRIX_ROWS

    def model(self):
        return Account()

    def dataset(self):
        return torch.utils.data.TensorDataset(torch.zeros(int(os.environ["LEDGER_SAMPLES"])))

    def loss(self, model, batch):
        product = self.matrix
        for _ in range(WORK):
            product = product @ self.matrix
        number = self.gradients
        self.gradients += 1
        if number % BLOCK_CELLS == 0:
            self.first_cell = self.take_block(number // BLOCK_CELLS)
        cell = self.first_cell + number % BLOCK_CELLS
        return -model.cells.view(SHARDS, CELLS)[:, cell].sum()

    def take_block(self, number):
        """The first cell of a block that nobody else has or ever will have."""
        slot = int(os.environ["DLCTL_NAME"].rpartition("-")[2])
        line = LINE.pack(slot, int(os.environ["DLCTL_INCARNATION"]), os.getpid(), number)
        file = os.open(os.environ["LEDGER_BLOCKS"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            assert os.write(file, line) == LINE.size
            end = os.lseek(file, 0, os.SEEK_CUR)  # behind what this call has appended
        finally:
            os.close(file)
        first = (end // LINE.size - 1) * BLOCK_CELLS
        assert first + BLOCK_CELLS <= CELLS, "the ledger is full"
        return first


task = Ledger()
