"""Windows: a document longer than the model is cut into overlapping pieces, each behind the question, without losing
which characters a token stands for.

Ranges and spans are half open, like slices; `first_token` and `last_token` are both inside.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_WHITESPACE = np.array([chr(code).isspace() for code in range(0x3002)])


@dataclass(frozen=True)
class TokenisedContext:
    """A context's tokens without special ones, and the characters each of them stands for.

    `text[starts[i] : ends[j]]` is the text of tokens i to j without white space around it. A token of white space only
    starts behind itself and ends before itself (starts >= ends), so a span never begins or ends with it.
    """

    input_ids: list[int] | np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.input_ids) == len(self.starts) == len(self.ends):
            raise ValueError(
                f"{len(self.input_ids)} tokens, {len(self.starts)} starts and {len(self.ends)} ends: "
                "a context needs one start and one end per token"
            )

    def __len__(self) -> int:
        return len(self.input_ids)


def tokenise_context(tokenizer: Any, text: str) -> TokenisedContext:
    """All tokens of a context, however long; tokenise once and cut windows for every question from it."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer and can't say which characters a token stands for: "
            "load it with AutoTokenizer from a folder that has a tokenizer.json"
        )
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        padding=False,
        verbose=False,
    )
    offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    starts, ends = _tight_offsets(text, offsets[:, 0], offsets[:, 1])
    return TokenisedContext(np.array(encoding["input_ids"], dtype=np.int64), starts, ends)


def tokenise_question(tokenizer: Any, question: str) -> np.ndarray:
    """A question's tokens without special ones. White space around a question says nothing and is left out."""
    encoding = tokenizer(question.strip(), add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return np.array(encoding["input_ids"], dtype=np.int64)


def _tight_offsets(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets without white space at either end, and with the characters that the tokenizer dropped.

    Normalisers drop accents, joiners and control characters. They belong to the token before them, or at the beginning
    of a word to the token behind, so that no character of an answer is lost.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    space = _WHITESPACE[np.minimum(codes, len(_WHITESPACE) - 1)]
    ends = np.where(starts < ends, _next_true(space | _covered(len(text), starts, ends))[ends], ends)
    blocked = space | _covered(len(text), starts, ends)
    starts = np.where(starts < ends, _end_of_previous_true(blocked)[starts], starts)
    return _next_true(~space)[starts], _end_of_previous_true(~space)[ends]


def _covered(length: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which characters some token stands for."""
    changes = np.bincount(starts, minlength=length + 1) - np.bincount(ends, minlength=length + 1)
    return np.cumsum(changes)[:length] > 0


def _next_true(flags: np.ndarray) -> np.ndarray:
    """For each place 0 … n the first place at or behind it whose flag is set, or n."""
    places = np.append(np.where(flags, np.arange(len(flags)), len(flags)), len(flags))
    return np.minimum.accumulate(places[::-1])[::-1]


def _end_of_previous_true(flags: np.ndarray) -> np.ndarray:
    """For each place 0 … n the place right behind the last set flag before it, or 0."""
    return np.maximum.accumulate(np.append(0, np.where(flags, np.arange(1, len(flags) + 1), 0)))


@dataclass(frozen=True, kw_only=True)
class PairLayout:
    """Where a tokenizer puts its special tokens around a question and a context: `before q between c behind`."""

    before: np.ndarray
    between: np.ndarray
    behind: np.ndarray
    # Token types of before, question, between, context, behind; None for models without token types.
    types: tuple[np.ndarray, int, np.ndarray, int, np.ndarray] | None = field(default=None)

    @classmethod
    def of(cls, tokenizer: Any) -> "PairLayout":
        """The layout that `tokenizer(question, context)` has."""
        encoding = tokenizer("question", "context", truncation=False, padding=False)
        sequence = np.array([-1 if number is None else number for number in encoding.sequence_ids()])
        question, context = np.flatnonzero(sequence == 0), np.flatnonzero(sequence == 1)
        if not len(question) or not len(context) or question[-1] > context[0]:
            raise ValueError(
                f"{type(tokenizer).__name__} gives {encoding['input_ids']} for a question and a context, in which they "
                "can't be told apart: use a tokenizer that joins pairs with special tokens and knows Latin letters"
            )
        pieces = np.s_[: question[0]], np.s_[question[-1] + 1 : context[0]], np.s_[context[-1] + 1 :]
        ids = np.array(encoding["input_ids"], dtype=np.int64)
        before, between, behind = (ids[piece] for piece in pieces)
        types = None
        if "token_type_ids" in tokenizer.model_input_names:
            kinds = np.array(encoding["token_type_ids"], dtype=np.int64)
            first, second, third = (kinds[piece] for piece in pieces)
            types = (first, int(kinds[question[0]]), second, int(kinds[context[0]]), third)
        return cls(before=before, between=between, behind=behind, types=types)

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)

    def null_position(self, num_question_tokens: int, num_context_tokens: int) -> int:
        """The first special token, which stands for "no answer here"; 0 if there is none."""
        if len(self.before):
            return 0
        if len(self.between):
            return num_question_tokens
        return num_question_tokens + num_context_tokens if len(self.behind) else 0

    def assemble(self, question_ids: Sequence[int] | np.ndarray, context_ids: Sequence[int] | np.ndarray) -> dict:
        """One input of the model, as `tokenizer(question, context)` makes it.

        Returns:
            input_ids; token_type_ids if the model takes them; context_offset, where the context begins; question_span,
            the half-open range of the question.
        """
        question, context = np.asarray(question_ids, dtype=np.int64), np.asarray(context_ids, dtype=np.int64)
        question_end = len(self.before) + len(question)
        assembled: dict[str, Any] = {
            "input_ids": np.concatenate([self.before, question, self.between, context, self.behind]),
            "context_offset": question_end + len(self.between),
            "question_span": (len(self.before), question_end),
        }
        if self.types is not None:
            before, of_question, between, of_context, behind = self.types
            assembled["token_type_ids"] = np.concatenate(
                [before, np.full(len(question), of_question), between, np.full(len(context), of_context), behind]
            )
        return assembled


def cut_windows(num_tokens: int, *, room: int, stride: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most `room` tokens that cover all tokens; neighbours share `stride` tokens.

    An empty document has one empty window, so that it too gets an answer.
    """
    if num_tokens < 0 or room < 1 or stride < 0:
        raise ValueError(
            f"num_tokens={num_tokens}, room={room}, stride={stride}: windows need room for at least one token, and "
            "neither a document nor an overlap can be negative; raise max_length or shorten the question"
        )
    if stride >= room:
        raise ValueError(
            f"windows with room for {room} tokens that share stride={stride} never get ahead: "
            "choose a smaller stride, a larger max_length or a smaller max_question_tokens"
        )
    if num_tokens <= room:
        return [(0, num_tokens)]
    step = room - stride
    num_windows = 1 + -(-(num_tokens - room) // step)
    return [(number * step, min(number * step + room, num_tokens)) for number in range(num_windows)]


def answer_tokens(context: TokenisedContext, answer_start: int, answer_text: str) -> tuple[int, int] | None:
    """First and last token of the answer, both inside, or None if no token stands for its characters.

    White space around the answer is ignored. Where the answer begins or ends inside a token, the whole token counts.
    """
    visible = answer_text.strip()
    if answer_start < 0 or not visible:
        return None
    start = answer_start + len(answer_text) - len(answer_text.lstrip())
    end = start + len(visible)
    touched = np.flatnonzero((context.starts < end) & (context.ends > start) & (context.starts < context.ends))
    return (int(touched[0]), int(touched[-1])) if len(touched) else None


def question_windows(
    question_ids: Sequence[int] | np.ndarray,
    context: TokenisedContext,
    *,
    layout: PairLayout,
    max_length: int,
    stride: int,
    max_question_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """All windows of a document behind one question, for answering.

    Each has what `PairLayout.assemble` gives and first_token, last_token (numbers in the context, both inside;
    last_token = first_token - 1 in an empty window), null_position (the token that stands for "no answer") and
    question_truncated.
    """
    question = np.asarray(question_ids, dtype=np.int64)
    kept = question[:max_question_tokens]
    room = max_length - layout.num_special - len(kept)
    if room < 1:
        raise ValueError(
            f"a question of {len(kept)} tokens and {layout.num_special} special ones leave no room for the document in "
            f"max_length={max_length}: raise max_length, or set max_question_tokens to truncate questions"
        )
    ids = np.asarray(context.input_ids, dtype=np.int64)
    return [
        {
            **layout.assemble(kept, ids[first:stop]),
            "first_token": first,
            "last_token": stop - 1,
            "null_position": layout.null_position(len(kept), stop - first),
            "question_truncated": len(kept) < len(question),
        }
        for first, stop in cut_windows(len(ids), room=room, stride=stride)
    ]


def training_windows(
    question_ids: Sequence[int] | np.ndarray,
    context: TokenisedContext,
    answers: Mapping[str, Sequence[Any]],
    *,
    layout: PairLayout,
    max_length: int,
    stride: int,
    max_question_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """All windows of a document behind one question, with the answer's place in each.

    Args:
        answers: `{"text": [...], "answer_start": [...]}` as in SQuAD; empty lists if the question has no answer.

    Returns:
        `question_windows` with start_positions, end_positions (of the first listed answer that is wholly inside, else
        the null position) and has_answer.
    """
    windows = question_windows(
        question_ids,
        context,
        layout=layout,
        max_length=max_length,
        stride=stride,
        max_question_tokens=max_question_tokens,
    )
    pairs = zip(answers["answer_start"], answers["text"], strict=True)
    places = [place for start, text in pairs if (place := answer_tokens(context, start, text)) is not None]
    for window in windows:
        inside = [place for place in places if window["first_token"] <= place[0] and place[1] <= window["last_token"]]
        shift = window["context_offset"] - window["first_token"]
        window["has_answer"] = bool(inside)
        window["start_positions"] = inside[0][0] + shift if inside else window["null_position"]
        window["end_positions"] = inside[0][1] + shift if inside else window["null_position"]
    return windows


def question_rng(seed: int, question_id: str) -> np.random.Generator:
    """Random numbers that depend on the seed and the question alone, not on the order or the process."""
    digest = hashlib.sha256(f"{seed}\n{question_id}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def choose_training_windows(
    windows: Sequence[dict[str, Any]], *, negatives_per_question: float | None, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """All windows with an answer and a sample of the others, in the order of the document.

    Args:
        windows: of one question.
        negatives_per_question: how many windows without an answer to keep; 0.5 keeps one for every second question on
            average, None keeps all.
        rng: from `question_rng(seed, question_id)`.
    """
    if negatives_per_question is None:
        return list(windows)
    if negatives_per_question < 0:
        raise ValueError(
            f"negatives_per_question={negatives_per_question} is negative: give 0 or more, or None for all"
        )
    whole, part = divmod(negatives_per_question, 1)
    wanted = int(whole) + int(rng.random() < part)
    negatives = [number for number, window in enumerate(windows) if not window["has_answer"]]
    chosen = set(rng.permutation(negatives)[:wanted].tolist())
    return [window for number, window in enumerate(windows) if window["has_answer"] or number in chosen]
