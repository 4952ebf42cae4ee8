"""``Negotiator``, which collects announcements and makes the same decisions on every rank."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.core.errors import CommError
from hpctrain.core.units import MAX_MESSAGES, format_ranks
from hpctrain.negotiation import messages
from hpctrain.negotiation.messages import Entry, OperationBatch, Part, Report, bits_of
from hpctrain.negotiation.pending_table import NUM_SLOTS, OWN, PendingTable, ResponseCache
from hpctrain.negotiation.request import Kind, Repeated, Signature

if TYPE_CHECKING:
    from hpctrain.comm.control_channel.mailbox import Tree


class RelayedQuestion(Protocol):
    """Question to all ranks; any picklable object with these members."""

    @property
    def kind(self) -> str:
        """Kind of the question. The root sends the next question of a kind after ``finish``."""

    def merged(self, other: Any) -> Any:
        """Return one question that asks this question and ``other``, which has the same kind."""

    def without(self, other: Any) -> Any:
        """Return the part of this question that ``other`` does not ask, or None if it asks all."""


class QuestionRelay:
    """Sends questions of any rank to all ranks, and the answers of all ranks to the root.

    A question is, for example, whether a rank has submitted an operation that other ranks wait
    for. Questions pass through the root, which determines their order, so the order is the same on
    all ranks. Often all ranks ask the same question within a second. So a rank sends a question of
    some kind to its parent, and then sends no other question of this kind until it receives the
    next question of this kind from the root. Meanwhile, the rank merges the questions of this kind
    that its children send. Answers may be any picklable objects. Any thread may append to
    ``asked``; everything else is not thread-safe.
    """

    def __init__(self) -> None:
        self.asked = deque[RelayedQuestion]()
        """Questions of this rank and the ranks below that are not sent yet."""
        self.answers: list[object] = []
        """Answers to send to the parent."""
        self.questions: list[RelayedQuestion] = []
        """Questions from the root."""
        self.received: list[object] = []
        """Answers of the children."""
        self._in_flight: dict[str, RelayedQuestion] = {}
        """By kind, the question in flight, which was sent to the root, or by the root."""
        self._held: dict[str, RelayedQuestion] = {}
        """By kind, the merged questions that are sent after the question in flight."""

    def take_asked(self) -> list[RelayedQuestion]:
        """Remove and return the questions to send to the root, or, on the root, to all ranks."""
        for _ in range(len(self.asked)):  # other threads may append
            question = self.asked.popleft()
            held = self._held.get(question.kind)
            self._held[question.kind] = question if held is None else held.merged(question)
        ready = self._held.keys() - self._in_flight.keys()
        sent = {kind: self._held.pop(kind) for kind in sorted(ready)}
        self._in_flight |= sent
        return [*sent.values()]

    def take_received(self) -> list[object]:
        """Remove and return the answers of the children."""
        received, self.received = self.received, []
        return received

    def take_questions(self) -> list[RelayedQuestion]:
        """Remove and return the questions from the root."""
        questions, self.questions = self.questions, []
        return questions

    def receive(self, questions: Sequence[RelayedQuestion]) -> None:
        """Store questions from the root."""
        self.questions += questions
        for question in questions:
            self.finish(question)

    def finish(self, question: RelayedQuestion) -> None:
        """Allow the next question of this kind. The root calls this after it has the answers."""
        self._in_flight.pop(question.kind, None)
        held = self._held.pop(question.kind, None)
        rest = None if held is None else held.without(question)
        if rest is not None:
            self.asked.appendleft(rest)


class Negotiator:
    """Negotiates the order of operations along a tree of ranks, without communicating itself.

    A rank reports an operation to its parent once the rank and all ranks below have announced the
    operation. Operations that are complete at the root are ready; the root sends its decision down
    the tree. Operations that were decided before have numbers (``ResponseCache``), so that one bit
    vector announces any of these operations: for 1000 ranks and 100 operations, 1998 messages of
    18 bytes. A rank that has joined counts as having announced every operation.

    Messages between two ranks must arrive in the order in which they were sent. Not thread-safe.

    Args:
        tree: parent and children of this rank.
        num_slots: maximum number of operations with numbers.
    """

    def __init__(self, tree: "Tree", *, num_slots: int = NUM_SLOTS) -> None:
        self._tree = tree
        self.is_root = tree.parent is None
        self._sources = {child: place for place, child in enumerate(tree.children, OWN + 1)}
        self.cache = ResponseCache(num_slots)
        """The numbers of operations."""
        self.relay = QuestionRelay()
        """Questions to all ranks, and answers to the parent."""
        self._pending = PendingTable(tree.rank, len(tree.children), self.cache)
        self._announced: dict[str, int] = {}
        """By name, the number or -1 of each undecided operation, in the order of announcement."""
        self._own_slots: list[int] = []  # numbers announced but not yet in the table
        self._is_changed = False
        self._out: list[tuple[int, bytes]] = []
        self._batches: list[OperationBatch] = []
        self._joins: list[int] = []
        """On the root, all ranks that have joined; on other ranks, the joins not yet reported."""
        self._is_join_reported = False
        self._is_introduced = False

    # -- this rank --------------------------------------------------------------------------

    def announce(self, name: str, signature: Signature) -> None:
        """Announce that this rank has submitted an operation. Local.

        An earlier operation of this name must already be decided.

        Raises:
            CommError: this rank has joined.
        """
        tally = self._pending
        if tally.joined[OWN]:
            raise CommError(
                f"a rank that has joined must not submit operations until all have joined, but "
                f'rank {self._tree.rank} submitted "{name}"; submit it before join() or after '
                f"join() has returned"
            )
        assert name not in self._announced
        self._is_changed = True
        slot = self.cache.number(name, signature)
        if slot is not None:
            self._announced[name] = slot
            self._own_slots.append(slot)
        else:
            self._announced[name] = -1
            tally.add_name(OWN, name, [(signature, None)])

    def announce_many(self, repeated: Sequence[Repeated | None]) -> bool:
        """Announce operations if all of them have numbers; return False otherwise."""
        known = None if self._pending.joined[OWN] else self.cache.numbers_of(repeated)
        if known is None:
            return False
        self._is_changed = True
        self._announced.update(known.slots)
        self._pending.add_bits(OWN, known.bits)
        return True

    def join(self) -> None:
        """Treat every operation as announced by this rank, until all ranks have joined."""
        if not self._pending.joined[OWN]:
            self._is_changed = True
            self._joins.append(self._tree.rank)
            self._pending.join(OWN)

    def decided(self) -> list[OperationBatch]:
        """Return the batches that were decided since the last call."""
        batches, self._batches = self._batches, []
        return batches

    @property
    def takes_part(self) -> bool:
        """Whether this rank waits for a decision, has a decision to execute, or has joined."""
        return bool(self._announced or self._batches) or self._pending.joined[OWN]

    # -- messages ---------------------------------------------------------------------------

    def receive(self, source: int, message: bytes) -> None:
        """Process a message of a neighbour in the tree."""
        kind = message[0]
        if kind == messages.BITS:
            self._is_changed = True
            self._pending.add_bits(self._sources[source], messages.unpack_bits(message))
        elif kind == messages.REPORT:
            self._read(source, Report(*messages.unpack(message)))
        else:
            self._send_down(message)
            if kind == messages.DECISION:
                self._apply(*messages.unpack(message))
            elif kind == messages.QUESTIONS:
                self.relay.receive(messages.unpack(message))
            else:
                self._apply_slots(message, messages.unpack_slots(message))

    def outbox(self, *, decide: bool = True) -> list[tuple[int, bytes]]:
        """Return the messages to send now, with their receivers; on the root, decide first."""
        if self._own_slots:
            self._pending.add_bits(OWN, bits_of(self._own_slots))
            self._own_slots = []
        relay = self.relay
        if self.is_root:
            if decide and self._is_changed:
                self._decide()
            if relay.asked:  # after the decision: a question may fail undecided operations
                questions = relay.take_asked()
                if questions:
                    self._send_down(messages.pack(messages.QUESTIONS, questions))
                    relay.questions += questions
        elif self._is_changed or relay.asked or relay.answers:
            self._report()
        out, self._out = self._out, []
        return out

    def _send_down(self, message: bytes) -> None:
        for child in self._tree.children:
            self._out.append((child, message))

    # -- upwards ----------------------------------------------------------------------------

    def _read(self, child: int, report: Report) -> None:
        self._is_changed = True
        source = self._sources[child]
        self._pending.add_bits(source, report.bits)
        if report.ranks:
            self._pending.ranks[source] = report.ranks
        for name, parts in report.names:
            self._pending.add_name(source, name, parts)
        self._joins += report.joins
        if report.all_joined:
            self._pending.join(source)
        self.relay.asked += report.questions
        self.relay.received += report.answers

    def _report(self) -> None:
        """Report to the parent the operations that all ranks of this subtree have announced."""
        parent, relay = self._tree.parent, self.relay
        assert parent is not None
        self._is_changed = False
        bits, names = self._pending.take()
        all_joined = False not in self._pending.joined and not self._is_join_reported
        asked, answers = relay.take_asked(), relay.answers
        if not (names or all_joined or self._joins or asked or answers):
            if bits:
                self._out.append((parent, messages.pack_bits(bits)))
            return
        ranks: tuple[int, ...] = ()
        if (names or all_joined) and not self._is_introduced:
            ranks = tuple(rank for some in self._pending.ranks for rank in some)
            self._is_introduced = True
        relay.answers = []
        report = Report(bits, names, ranks, self._joins, all_joined, asked, answers)
        self._out.append((parent, messages.pack(messages.REPORT, tuple(report))))
        self._is_join_reported |= all_joined
        self._joins = []

    # -- the root ---------------------------------------------------------------------------

    def _decide(self) -> None:
        """Send all ready operations down the tree, in the order of the root's announcements."""
        all_joined = self._joins and False not in self._pending.joined
        join_over = self._joins[-1] if all_joined else None
        self._is_changed = False
        bits, named = self._pending.take()
        if not (bits or named or join_over is not None):
            return
        names = dict(named)
        if not names and join_over is None:
            ready = set(messages.slots_of(bits))
            slots = [slot for slot in self._announced.values() if slot in ready]
            message = messages.pack_slots(slots)
            self._send_down(message)
            self._apply_slots(message, slots)
            return
        items: list[Entry | int] = []
        for name, slot in self._announced.items():
            if name in names:
                items.append(self._item(name, names.pop(name)))
            elif slot >= 0 and bits >> slot & 1:
                items.append(slot)
        items += [self._item(name, parts) for name, parts in names.items()]
        self._send_down(messages.pack(messages.DECISION, (items, join_over)))
        self._apply(items, join_over)

    def _item(self, name: str, parts: list[Part]) -> Entry | int:
        signature, everywhere = parts[0]
        error = None
        if everywhere is not None:
            if len(parts) > 1:
                error = disagreement(name, [(some, ranks or []) for some, ranks in parts])
            else:
                error = missing_root(name, signature, everywhere)
        slot = None if error else self.cache.number(name, signature)
        return Entry(name, signature, error) if slot is None else slot

    # -- downwards --------------------------------------------------------------------------

    def _apply_slots(self, message: bytes, slots: list[int]) -> None:
        """Apply a decision on operations with numbers."""
        batch = self.cache.batch(message, slots)
        for entry in batch.entries:
            del self._announced[entry.name]
        self._pending.clear(batch.bits, ())
        self._batches.append(batch)

    def _apply(self, items: "Sequence[Entry | int]", join_over: int | None) -> None:
        """Apply a decision: remove the decided operations and assign numbers to new names."""
        known, numbers = self.cache.entries, self.cache.numbers
        entries = [known[item] if isinstance(item, int) else item for item in items]
        names = [entry.name for entry in entries]
        for name in names:
            self._announced.pop(name, None)
        self._pending.clear(bits_of([numbers[name] for name in names if name in numbers]), names)
        self._batches.append(OperationBatch(tuple(entries), join_over))
        if join_over is not None:
            self._joins, self._is_join_reported = [], False
            self._pending.unjoin()
        for item in items:
            if isinstance(item, Entry) and item.error is None:
                self.cache.put(item.name, item.signature)


_NUM_SHOWN = 3  # maximum number of differing tensors in a message

Given = Sequence[tuple[Signature, Sequence[int]]]  # each signature and the ranks that have it


def disagreement(name: str, given: Given) -> str:
    """Return an error message with the signature of operation ``name`` on each rank."""
    signatures, note = _differing([signature for signature, _ in given])
    texts = [signature.describe() for signature in signatures]
    if len(set(texts)) < len(texts):
        texts = [str(tuple(signature)) for signature in signatures]
    sides = [
        f"{text} on {format_ranks(ranks)}"
        for text, (_, ranks) in zip(texts, given, strict=True)
    ]  # fmt: skip
    if rest := [rank for _, ranks in given[MAX_MESSAGES:] for rank in ranks]:
        num_more = len(sides) - MAX_MESSAGES
        sides[MAX_MESSAGES:] = [f"{num_more} others on {format_ranks(rest)}"]
    got = f"{' and '.join(sides)}{note}"
    return (
        f'operation "{name}" must be the same on all ranks, got {got}; submit it with the '
        f"same kind, dtype, shape, op, factors, root rank and device on every rank, or give "
        f"different operations different names"
    )


def missing_root(name: str, signature: Signature, given: Sequence[int]) -> str | None:
    """Return an error message if the root of a broadcast has joined, else None."""
    if signature.kind is not Kind.BROADCAST or signature.root in given:
        return None
    return (
        f'the root of a broadcast must submit it, but the root of "{name}" is rank '
        f"{signature.root}, which has joined; call join() on that rank after its last broadcast, "
        f"or choose another root"
    )


def _differing(signatures: list[Signature]) -> tuple[list[Signature], str]:
    """Return the signatures, reduced to the tensors of a large group that differ, and a note."""
    counts = {len(signature.dtypes) for signature in signatures}
    total = max(counts)
    if total <= _NUM_SHOWN or len(counts) > 1:
        return signatures, ""
    kept = [
        index
        for index in range(total)
        if len({(s.dtypes[index], s.shapes[index], s.devices[index]) for s in signatures}) > 1
    ][:_NUM_SHOWN]
    shown = [
        signature._replace(
            dtypes=tuple(signature.dtypes[index] for index in kept),
            shapes=tuple(signature.shapes[index] for index in kept),
            devices=tuple(signature.devices[index] for index in kept),
        )
        for signature in signatures
    ]
    places = ", ".join(str(index + 1) for index in kept)
    return shown, f" (tensors {places} of a group of {total})" if kept else f" ({total} tensors)"
