"""Communication-efficient SGD: fewer bits in a message, or fewer messages.

    hpctrain launch -n 2 -- python examples/tour/07_communication_efficient.py

Fewer bits: QSGD sends the norm of a gradient, and for each entry a sign and one of a few levels,
which is drawn so that the entry is unbiased. The variance is known and decreases with more levels;
with one level most entries are zero. Fewer messages: in local SGD each rank takes H steps before
the weights are averaged. If all ranks draw from the same examples, local SGD needs about as many
steps as averaging in every step, with 1 / H of the messages.

Source: Alistarh et al. 2017, arXiv:1610.02132; Stich 2019, arXiv:1805.09767.
"""

import torch
from claim import claim
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hpctrain as hvd

LENGTH, NUM_DRAWS = 4096, 1000  # of each rank


def quantized(vector: Tensor, levels: int, random: torch.Generator) -> Tensor:
    """Return an unbiased quantization of ``vector`` to signs and ``levels`` levels."""
    norm = vector.norm()
    scaled = vector.abs() * levels / norm
    drawn = torch.rand(len(vector), generator=random, dtype=torch.float64)
    level = scaled.floor() + (drawn < scaled.frac())
    return norm * vector.sign() * level / levels


def steps_to_target(steps_of_a_round: int) -> int:
    """Return the steps that local SGD needs to separate two classes."""
    torch.manual_seed(0)
    x = torch.randn(2000, 20)
    y = (x @ torch.randn(20) + torch.randn(2000) > 0).float()
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(1 + hvd.rank())  # its own examples
    with hvd.LocalSGD(model, optimizer, steps=steps_of_a_round):
        for step in range(1, 2001):
            part = torch.randint(len(x), (16,), generator=random)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(x[part])[:, 0], y[part]).backward()
            optimizer.step()
            if step % 4 == 0:
                with torch.no_grad():
                    loss = binary_cross_entropy_with_logits(model(x)[:, 0], y)
                if hvd.allreduce(loss) < 0.375:
                    return step
    return 2000


def main() -> None:
    """Test mean and variance of quantized gradients, then steps and messages of local SGD."""
    hvd.init()
    vector = torch.randn(LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1 + hvd.rank())
    for levels in (1, 4, 64):
        draws = torch.stack([quantized(vector, levels, random) for _ in range(NUM_DRAWS)])
        mean = hvd.allreduce(draws.mean(dim=0))
        spread = hvd.allreduce((draws - vector).square().sum(dim=1).mean())
        variance = (spread / vector.norm() ** 2).item()
        share = (vector.abs() * levels / vector.norm()).frac()
        expected = (share * (1 - share)).sum().item() / levels**2
        bias = ((mean - vector).norm() / (spread / NUM_DRAWS / hvd.size()) ** 0.5).item()
        sent = draws.count_nonzero().item() / draws.numel()
        claim(
            f"levels {levels}: {sent:.1%} of the entries are sent, the variance is {variance:.2f} "
            f"|v|^2, by theory {expected:.2f}; the mean is off by {bias:.2f} of its noise",
            holds=abs(variance / expected - 1) < 0.02 and abs(bias - 1) < 0.1,
        )

    often, seldom = steps_to_target(1), steps_to_target(4)
    claim(
        f"an average every 4 steps takes {seldom} steps instead of {often}: "
        f"{seldom // 4} messages instead of {often}",
        holds=seldom <= 1.15 * often and often < 2000,
    )


if __name__ == "__main__":
    main()
