"""Residual networks of bottleneck blocks, after He et al. 2015, arXiv:1512.03385.

The 3x3 convolution of a block has the stride, as in most current implementations.
`imagenet_resnet50.py` and `synthetic_benchmark.py` train these networks.
"""

import torch
from torch import nn

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Blocks of the four stages for each depth: three layers a block, and the first and the last."""
EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = EXPANSION * width
        self.layers = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        nn.init.zeros_(self.layers[-1].weight)  # a block begins as its short cut
        self.short_cut = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.short_cut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn ``(n, num_in, h, w)`` into ``(n, 4 * width, h / stride, w / stride)``."""
        return torch.relu(self.layers(x) + self.short_cut(x))


class ResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, the mean over the image, a linear layer."""

    def __init__(self, depth: int = 50, width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        num_in = width
        for stage, num_blocks in enumerate(BLOCKS[depth]):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(num_in, width * 2**stage, stride))
                num_in = EXPANSION * width * 2**stage
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(num_in, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn ``(n, 3, h, w)`` images into ``(n, num_classes)`` scores."""
        return self.head(self.features(x).mean(dim=(2, 3)))
