"""Questions of any rank to all ranks, and their answers, along the tree of ranks."""

from collections import deque


class QuestionRelay:
    """Forward questions to the root, from the root to all ranks, and answers to the root.

    The root determines the order of the questions, which is the same on all ranks. Questions and
    answers are any picklable objects. Any thread may append to ``asked``; all else is not
    thread-safe.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.asked = deque[object]()
        """Questions of this rank and the ranks below that are not sent yet."""
        self.answers: list[tuple[int, object]] = []
        """Answers of this rank and the ranks below, with the rank; on the root of all ranks."""
        self.questions: list[object] = []
        """Questions from the root."""

    def answer(self, answer: object) -> None:
        """Add the answer of this rank."""
        self.answers.append((self._rank, answer))

    def take_asked(self) -> list[object]:
        """Return the questions to send, each once."""
        return [self.asked.popleft() for _ in range(len(self.asked))]  # other threads may append

    def take_answers(self) -> list[tuple[int, object]]:
        """Return the answers, each once."""
        answers, self.answers = self.answers, []
        return answers

    def take_questions(self) -> list[object]:
        """Return the questions from the root, each once."""
        questions, self.questions = self.questions, []
        return questions
