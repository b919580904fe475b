"""SQuAD's exact match and F1 for one answer, for any script, and the threshold below which a question is answered."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Scripts written without spaces: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han with its extensions.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9d\U00020000-\U0003ffff]"
)


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space, as SQuAD's script does it.

    Composed and decomposed accents are the same (NFC). Texts in scripts without spaces lose the punctuation of all
    scripts; others lose the ASCII punctuation only, as in SQuAD, so that scores compare with published ones.
    """
    text = unicodedata.normalize("NFC", text.lower()).translate(_ASCII_PUNCTUATION)
    if _UNSPACED.search(text):
        text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return " ".join(_ARTICLES.sub(" ", text).split())


def answer_words(text: str) -> list[str]:
    """The words that F1 counts: what stands between spaces, and in scripts without spaces every character.

    Vowel signs and tone marks stay with the character that they stand on.
    """
    words = normalise_answer(text).split()
    if not _UNSPACED.search(text):
        return words
    return [piece for word in words for piece in _split_unspaced(word)]


def _split_unspaced(word: str) -> list[str]:
    pieces: list[str] = []
    joins = False
    for character in word:
        unspaced = bool(_UNSPACED.match(character))
        mark = unicodedata.category(character).startswith("M")
        if pieces and (mark or (joins and not unspaced)):
            pieces[-1] += character
        else:
            pieces.append(character)
        joins = not unspaced if not mark else joins
    return pieces


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, else 0; without answers "" is right."""
    return max(float(normalise_answer(prediction) == normalise_answer(answer)) for answer in _counted(answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the words shared with the best fitting answer, 0 to 1; without answers "" is right."""
    words = answer_words(prediction)
    return max(_f1(words, answer_words(answer)) for answer in _counted(answers))


def _counted(answers: Sequence[str]) -> list[str]:
    """Answers of which something is left when normalised; without any, the empty one."""
    return [answer for answer in answers if normalise_answer(answer)] or [""]


def _f1(predicted: list[str], right: list[str]) -> float:
    if not predicted or not right:
        return float(predicted == right)
    shared = sum((Counter(predicted) & Counter(right)).values())
    return 2 * shared / (len(predicted) + len(right))


def best_threshold(
    differences: Sequence[float] | np.ndarray,
    if_answered: Sequence[float] | np.ndarray,
    if_not: Sequence[float] | np.ndarray,
) -> tuple[float, float]:
    """The threshold with the best mean score when every question with a difference above it goes unanswered.

    Args:
        differences: per question, how much more is said for "no answer" than for the best answer; inf where there is
            no answer to give.
        if_answered: per question, the score of the best answer.
        if_not: per question, the score of giving none.

    Returns:
        The threshold (a difference that occurs, or 1 below all of them if it is best to answer nothing; the lowest
        where several are equally good) and the mean score.
    """
    given = np.asarray(differences, dtype=np.float64)
    unanswered = np.asarray(if_not, dtype=np.float64)
    if not len(given):
        raise ValueError("there is no question to tune a threshold on: give at least one prediction")
    if np.isnan(given).any():
        raise ValueError("a score difference is not a number: look for NaN among the logits")
    finite = np.isfinite(given)
    distinct, group = np.unique(given[finite], return_inverse=True)
    gains = np.asarray(if_answered, dtype=np.float64) - unanswered
    totals = unanswered.sum() + np.append(0.0, np.cumsum(np.bincount(group, gains[finite], minlength=len(distinct))))
    # Sums in another order differ in the last digits, which must not choose between equal thresholds.
    best = int(np.flatnonzero(totals >= totals.max() - 1e-9 * len(given))[0])
    lowest = distinct[0] - 1.0 if len(distinct) else 0.0
    return float(distinct[best - 1] if best else lowest), float(totals[best] / len(given))
