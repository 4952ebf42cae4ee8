"""The network cards of this host that can carry messages now."""

from pathlib import Path

CLASSES = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
"""InfiniBand, RoCE and Omni-Path register in the first, Slingshot in the second."""


def num_cards(classes: tuple[Path, ...] = CLASSES) -> int:
    """Count the fast network cards with a live port; a host without one counts as 1 (Ethernet)."""
    return max(1, len(live_cards(classes)))


def live_cards(classes: tuple[Path, ...] = CLASSES) -> list[Path]:
    """List the folders of the fast network cards with a live port, by name."""
    cards = [card for folder in classes if folder.exists() for card in folder.iterdir()]
    return sorted(filter(_is_live, cards))


def _is_live(card: Path) -> bool:
    """Say whether a port is active; a card that shows no ports is taken at its word."""
    states = list(card.glob("ports/*/state"))
    return not states or any("ACTIVE" in state.read_text() for state in states)
