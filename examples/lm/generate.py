"""Write text by a model that was saved in whatever layout, in one process.

python examples/lm/generate.py runs/lm "def __init__(self"
"""

import json
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from model import Transformer


def saved(run: Path) -> Transformer:
    """Return the model that ``train.py`` saved."""
    if not (run / "facts.json").is_file():
        raise SystemExit(f"{run} has no run of train.py; pass its --output")
    facts = json.loads((run / "facts.json").read_text())
    model = Transformer(**{name: facts[name] for name in ("width", "depth", "num_heads")})
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=run / f"step-{facts['step']}", no_dist=True)
    model.load_state_dict(weights)
    return model


def exported(file: Path, num_heads: int = 4) -> Transformer:
    """Return what ``hpctrain checkpoint export --only model`` has written."""
    weights = torch.load(file, weights_only=True)
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    width = weights["embedding.weight"].shape[1]
    model = Transformer(width=width, depth=depth, num_heads=num_heads)
    model.load_state_dict(weights)
    return model


def main(words: list[str] | None = None) -> None:
    """Load, and draw byte after byte."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    output = "what train.py has as --output, or model.pt of hpctrain checkpoint export"
    parser.add_argument("run", type=Path, help=output)
    parser.add_argument("begin", nargs="?", default="def __init__(self")
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args(words)
    model = exported(options.run) if options.run.is_file() else saved(options.run)
    torch.manual_seed(0)
    text = torch.tensor([list(options.begin.encode())])
    with torch.no_grad():
        for _ in range(options.bytes):
            scores = model(text[:, -128:])[0, -1] / options.temperature
            text = torch.cat([text, torch.multinomial(scores.softmax(0), 1)[None]], dim=1)
    print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
