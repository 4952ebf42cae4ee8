"""GPT-2 of Hugging Face's transformers over bytes, without pretrained weights or downloads.

This script and ``gpt2.toml`` train the same model:

    pip install transformers
    hpctrain launch -n 2 -- python examples/gpt2.py

Text, loss and metric are imported from ``text.py``.
"""

from argparse import ArgumentParser

import text
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import hpctrain as hvd


class ByteModel(nn.Module):
    """Guesses each byte of a window from those before it."""

    def __init__(self, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        shape = {"n_embd": width, "n_layer": depth, "n_head": num_heads}
        ends = {"bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(vocab_size=256, n_positions=text.CONTEXT, **shape, **ends)
        self.network = GPT2LMHeadModel(config)

    def forward(self, windows: Tensor) -> Tensor:
        """Turn ``(n, CONTEXT + 1)`` bytes into ``(n, CONTEXT, 256)`` scores of the next ones."""
        scores: Tensor = self.network(windows[:, :-1].long(), use_cache=False).logits
        return scores


def model(width: int = 64, depth: int = 2, num_heads: int = 4) -> ByteModel:
    """Make the network."""
    return ByteModel(width, depth, num_heads)


def main() -> None:
    """Train by the four lines."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4000, help="learnt from, once each")
    parser.add_argument("--folder", default="runs/text-data", help="of the data sets")
    options = parser.parse_args()
    hvd.init()  # 1
    train, test = text.data(hvd.current().comm, options.folder, options.windows, num_test=500)
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())  # 2
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)  # 3
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    loader = hvd.shard_data(loader, optimizer)  # 4
    for batch in loader:
        optimizer.zero_grad()
        text.loss(network(batch["bytes"]), batch["bytes"]).backward()
        optimizer.step()
    network.eval()
    bits = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in hvd.shard_data(DataLoader(test, batch_size=50)):
            found = text.bits_per_byte(network(batch["bytes"]), batch["bytes"])
            bits += torch.tensor([found.sum(), len(found)])
    total, number = hvd.allreduce(bits, op=hvd.Sum).tolist()
    if hvd.rank() == 0:
        print(f"test bits_per_byte {total / number:.4f}")


if __name__ == "__main__":
    main()
