"""Define the problem of ``tests/train`` with rows of a table: features become ids."""

import torch
from torch import nn

from hpctrain import ShardedEmbedding
from tests.train.problem import NUM_CLASSES, NUM_FEATURES

ROWS, DIM = 700, 3


def ids_of(x):
    return (x * 40).long().remainder(ROWS)


class Model(nn.Module):
    """Define rows, and a layer over them."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.layer = nn.Linear(NUM_FEATURES * DIM, NUM_CLASSES).double()

    def forward(self, x):
        return self.layer(self.table(ids_of(x)).flatten(1)).tanh()


def model():
    return Model(ShardedEmbedding(ROWS, DIM, optimizer="adam", lr=0.03, dtype=torch.float64))


def copied(table):
    with torch.no_grad():
        return table(torch.arange(ROWS)).clone()
