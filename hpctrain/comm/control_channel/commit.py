"""Two-phase commit between the ranks of a node: each prepares by a word, its rank 0 decides.

A rank that is prepared has written all that the others need, and waits for the decision. Rank 0
commits once all have prepared the same transaction, by one word for everybody; else it aborts, by
a word for each. So a commit costs one word up and one down, and no rank waits for another
afterwards. Between nodes their ranks 0 vote first (``Votes``): they all commit, or all abort.

Source: Gray 1978, "Notes on data base operating systems", for the protocol; without a log: a rank
that died is found by those that wait.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpctrain.comm.node.segments import LINE_BYTES, Fence

if TYPE_CHECKING:
    from hpctrain.comm.control_channel.mailbox import Tree
    from hpctrain.comm.control_channel.votes import Ballot, Votes

WORDS = LINE_BYTES // 8  # words of a rank: a cache line, since it is read while others are written
_NUMBER_BITS = 20
_IDLE, _BUSY, _ABORTED = 0, -1, -2

Call = Callable[[], object]


class TwoPhaseCommit:
    """This rank's part; one thread at a time.

    The word of a rank says what it has prepared and after how many commits, which is the same
    number on all ranks; so a word of the past means nothing. It is stored by that rank, or by rank
    0 while the rank waits. In the place of its own, rank 0 counts the commits.
    """

    def __init__(
        self,
        words: memoryview,
        tree: "Tree",
        bells: Sequence[Call],
        fence: Fence,
        votes: "Votes | None" = None,
    ) -> None:
        """Take ``WORDS`` zeros of 64 bits for each rank, which all ranks of the node map.

        ``bells`` wake the ranks: rank 0, and whom it has woken, those below them in the ``tree``,
        which is that of the node. A ``fence`` keeps loads and stores in order where the processor
        does not. Rank 0 needs ``votes`` where there are more nodes.
        """
        self.votes = votes
        self._ballot: Callable[[], Ballot] | None = None
        self.has_voted = False  # with others, for what is prepared
        self._words, self._mine = words, WORDS * tree.rank
        self._others = words[WORDS::WORDS]  # one look at all: some 30 ns a rank
        self._num_others = len(bells) - 1
        self._is_root = tree.parent is None
        self._is_told_by_mail = tree.parent == 0
        self._ring_root, self._bells = bells[0], bells
        self._ring_below = [bells[child] for child in tree.children]
        self._fence = fence
        self._num_commits = 0
        self._word = _IDLE
        self._is_busy = False

    @property
    def can_withdraw(self) -> bool:
        """Whether this rank may leave alone what it has prepared, by ``set_busy``."""
        return self._is_root and not self.has_voted

    def prepare(self, number: int, ballot: "Callable[[], Ballot] | None" = None) -> None:
        """Say that this rank is ready for transaction ``number``: its data are written.

        Until ``look`` knows more the rank does nothing that the others take part in. Rank 0 calls
        ``ballot`` for what the node votes with, once all its ranks are ready.
        """
        self._ballot = ballot
        self._word = word = self._num_commits << _NUMBER_BITS | number + 1
        self._is_busy = False
        if not self._is_root:
            if self._fence is not None:
                self._fence()  # the data first; before them, the loads of those of the others
            self._words[self._mine] = word
            self._ring_root()

    def look(self) -> bool | None:
        """Return True once what this rank has prepared is committed, False if it never will be.

        After a commit the data of all ranks may be read, until each prepares the next but one.
        """
        if not self._is_root:
            if self._words[0] != self._num_commits:
                self._has_committed()
                return True
            return None if self._words[self._mine] == self._word else False
        if self.has_voted:
            return self._outcome()
        others = self._others.tolist()
        if others.count(self._word) == self._num_others:
            if self._fence is not None:
                self._fence()  # the words before the data
            return self._commit() if self.votes is None else self._vote(self.votes)
        first = self._num_commits << _NUMBER_BITS
        for word in others:
            if word < 0 or (word >= first and word not in (_IDLE, self._word)):
                return False
        return None

    def set_busy(self, *, busy: bool) -> None:
        """Say whether this rank waits for others by mail: until it does not, nothing is committed.

        To be called before the mail is sent, before others can know that it is over, and whenever
        rank 0 was woken meanwhile: it aborts what would wait for it in vain.
        """
        if self._is_root:
            if busy:
                self._abort()
            if self.votes is not None and not self.has_voted:
                self.votes.look(refuse=busy)
        elif busy is not self._is_busy:
            self._is_busy = busy
            self._words[self._mine] = _BUSY if busy else _IDLE
            if busy and not self._is_told_by_mail:
                self._ring_root()

    def _vote(self, votes: "Votes") -> bool | None:
        """Vote, once no earlier vote is under way, which this node has refused."""
        if votes.is_open and votes.outcome() is None:
            return None
        number = (self._word & (1 << _NUMBER_BITS) - 1) - 1
        self.has_voted = True
        if self._ballot is None:
            votes.begin(number)
        else:
            votes.begin(number, self._ballot())
        return self._outcome()

    def _outcome(self) -> bool | None:
        assert self.votes is not None
        verdict = self.votes.outcome()
        if verdict is not None:
            self.has_voted = False
            if verdict:
                return self._commit()
            self._abort()
        return verdict

    def _commit(self) -> bool:
        if self._fence is not None:
            self._fence()
        self._words[0] = self._num_commits + 1
        self._has_committed()
        return True

    def _abort(self) -> None:
        first = max(self._num_commits << _NUMBER_BITS, 1)
        for rank, word in enumerate(self._others.tolist(), 1):
            if word >= first:
                self._words[WORDS * rank] = _ABORTED
                self._bells[rank]()

    def _has_committed(self) -> None:
        self._num_commits += 1
        if self._fence is not None:
            self._fence()
        for ring in self._ring_below:
            ring()
