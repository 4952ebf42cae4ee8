"""The protocol of mailboxes."""

from typing import Protocol

from hpctrain.comm.control_channel.message_tree import Tree


class Mailbox(Protocol):
    """This rank's mailboxes to its parent and its children.

    One thread at a time sends, receives and sleeps; any thread rings.
    """

    tree: Tree

    def send(self, to: int, message: bytes) -> None:
        """Send ``message`` to a neighbour in the tree, without waiting for it.

        What a neighbour has no room for yet stays here, and leaves in later calls of ``send``,
        ``receive``, ``flush`` and ``sleep``. The messages to one neighbour arrive in order.

        Args:
            to: the parent or a child.
            message: of any size.
        """

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have come, each with its sender, without waiting."""

    def flush(self, *, down: bool = False) -> None:
        """Return when all that was sent has left; to be called before waiting for anything else.

        A large message leaves when its receiver calls ``receive``, ``flush`` or ``sleep``.

        Args:
            down: whether only what goes to children counts.

        Raises:
            RankLostError: a rank is lost, or the wait has lasted too long.
        """

    def sleep(self, timeout_s: float, *, watch: bool = True, spin: bool = True) -> bool:
        """Return when something may have come, or somebody rang, or the time is over.

        Args:
            timeout_s: longest sleep in seconds.
            watch: whether somebody waits for this: the others are looked at ten times a second,
                and the network often. Without it, a message of another node may lie for 20 ms.
            spin: whether the first microseconds may be spent awake, where ranks have a core each.

        Returns:
            False if the time is over; True otherwise, now and then without a reason.

        Raises:
            RankLostError: ``watch``, and a rank is lost, or the sleep has lasted too long.
        """

    def ring(self) -> None:
        """Wake ``sleep`` of this process, now or the next one."""

    def close(self) -> None:
        """Give back what the mailboxes hold. Collective; what nobody has received is lost."""
