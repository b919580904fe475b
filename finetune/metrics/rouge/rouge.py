"""ROUGE-1, -2, -L and -Lsum of summaries, through rouge-score."""

import re

import datasets
import evaluate
from rouge_score import rouge_scorer

_DESCRIPTION = """\
ROUGE F-measures in percent, through rouge-score. What papers call ROUGE-L is usually rougeLsum, which compares sentence
by sentence; rougeL takes the summary as one sentence. rouge-score's own tokenizer knows the letters a to z and digits
only; where most letters of the right summaries are others, words are told apart by Unicode, and characters are words in
scripts without spaces.
"""
_INPUTS = """
Args:
    predictions: summaries.
    references: one right summary each, or a list of them, of which the best counts.
    use_stemmer: take words with the same stem for the same (English), as papers do.
    split_sentences: put every sentence of a summary without line ends on a line of its own for rougeLsum.
    tokenizer: function from a text to its words, if another is wanted.
Returns:
    rouge1, rouge2, rougeL, rougeLsum: means over all summaries.
Examples:
    >>> metric = evaluate.load("finetune/metrics/rouge")
    >>> metric.compute(predictions=["the red fox"], references=["the red hen"])["rouge2"]
    50.0
"""
_CITATION = """\
@inproceedings{lin-2004-rouge,
    title = "{ROUGE}: A Package for Automatic Evaluation of Summaries",
    author = "Lin, Chin-Yew",
    booktitle = "Text Summarization Branches Out",
    year = "2004"
}
"""
_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_SENTENCE_END = re.compile("(?<=[.!?])\\s+|(?<=[\u3002\uff01\uff1f])")


def sentence_lines(text):
    """One sentence per line; a text that has lines already is left as it is."""
    text = text.strip()
    return text if "\n" in text else "\n".join(filter(None, _SENTENCE_END.split(text)))


# Scripts written without spaces: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han with its extensions.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Vowel signs and accents that stand behind their letter belong to its word.
_SIGNS = "\u0300-\u036f\u0900-\u0dff"
_WORD = re.compile(f"[{_UNSPACED}]|(?:[{_SIGNS}]|[^\\W_{_UNSPACED}])+")


def unicode_words(text):
    """Words of any script, in lower case."""
    return _WORD.findall(text.lower())


def is_mostly_latin(texts):
    """Whether rouge-score's tokenizer sees at least half of the letters and digits."""
    characters = [character for text in texts for character in text if character.isalnum()]
    return 2 * sum(character.isascii() for character in characters) >= len(characters)


class _Words:
    """A function as the object that rouge-score wants."""

    def __init__(self, function):
        self.tokenize = function


class Rouge(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": text}),
                datasets.Features({"predictions": text, "references": datasets.List(text)}),
            ],
        )

    def _compute(self, predictions, references, use_stemmer=True, split_sentences=True, tokenizer=None):
        if tokenizer is None:
            right = [text for one in references for text in ([one] if isinstance(one, str) else one)]
            tokenizer = None if is_mostly_latin(right) else unicode_words
        words = _Words(tokenizer) if tokenizer is not None else None
        scorer = rouge_scorer.RougeScorer(list(_KINDS), use_stemmer=use_stemmer, tokenizer=words)
        prepare = sentence_lines if split_sentences else str
        totals = dict.fromkeys(_KINDS, 0.0)
        for prediction, right in zip(predictions, references, strict=True):
            several = [right] if isinstance(right, str) else right
            scores = scorer.score_multi([prepare(text) for text in several], prepare(prediction))
            for kind in _KINDS:
                totals[kind] += scores[kind].fmeasure
        return {kind: 100.0 * total / len(predictions) for kind, total in totals.items()}
