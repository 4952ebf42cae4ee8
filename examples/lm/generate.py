"""Write text by a model that ``train.py`` has saved in whatever layout, in one process.

python examples/lm/generate.py runs/lm "def __init__(self"
"""

import json
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from model import Transformer


def main(words: list[str] | None = None) -> None:
    """Load, and draw byte after byte."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="what train.py has as --output")
    parser.add_argument("begin", nargs="?", default="def __init__(self")
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args(words)
    facts = json.loads((options.run / "facts.json").read_text())
    model = Transformer(**{name: facts[name] for name in ("width", "depth", "num_heads")})
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=options.run / f"step-{facts['step']}", no_dist=True)
    model.load_state_dict(weights)
    torch.manual_seed(0)
    text = torch.tensor([list(options.begin.encode())])
    with torch.no_grad():
        for _ in range(options.bytes):
            scores = model(text[:, -128:])[0, -1] / options.temperature
            text = torch.cat([text, torch.multinomial(scores.softmax(0), 1)[None]], dim=1)
    print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
