"""Asks a saved question-answering checkpoint about a document, and shows the answer where it stands.

python -m finetune.answer runs/qa/model --document contract.txt --question "Who may terminate?" --trust-remote-code

With --trust-remote-code the checkpoint's own code is run, as whoever downloads it would do; without, this package's.
"""

import argparse
import inspect
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from transformers.utils import cached_file

from .answers import AnswerCollector, Prediction
from .batches import global_mask
from .files import read_json
from .loading import load_pretrained
from .windows import PairLayout, question_windows, tokenise_context, tokenise_question

SETTINGS_FILE = "task_settings.json"
DEFAULTS = {"stride": 256, "max_question_tokens": 128, "max_answer_tokens": 64, "threshold": 0.0}
CHARACTERS_AROUND = 240
BOLD, PLAIN = "\033[1;32m", "\033[0m"


class Answerer:
    """A checkpoint that answers questions about documents of any length.

    Args:
        folder: of the checkpoint, or its Hub id.
        trust_remote_code: run the checkpoint's own code.
    """

    def __init__(self, folder: str, *, trust_remote_code: bool = False):
        if not trust_remote_code:
            import hybrid_longformer  # noqa: F401 - makes transformers know the model
        self.model = load_pretrained(
            AutoModelForQuestionAnswering,
            folder,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            use_safetensors=True,
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self.layout = PairLayout.of(self.tokenizer)
        self.settings = {**DEFAULTS, "max_length": self.tokenizer.model_max_length, **saved_settings(folder)}
        takes_mask = "global_attention_mask" in inspect.signature(self.model.forward).parameters
        self.places_globals = takes_mask and "global_attention" in self.settings

    @torch.no_grad()
    def __call__(self, question: str, document: str) -> Prediction:
        settings = self.settings
        context = tokenise_context(self.tokenizer, document)
        windows = question_windows(
            tokenise_question(self.tokenizer, question),
            context,
            layout=self.layout,
            max_length=settings["max_length"],
            stride=settings["stride"],
            max_question_tokens=settings["max_question_tokens"],
        )
        collector = AnswerCollector(n_best=5, max_answer_tokens=settings["max_answer_tokens"])
        for window in windows:
            inputs = {"input_ids": torch.as_tensor(window["input_ids"])[None]}
            if "token_type_ids" in window:
                inputs["token_type_ids"] = torch.as_tensor(window["token_type_ids"])[None]
            if self.places_globals:
                span = (0, window["question_span"][1])
                mask = global_mask(len(window["input_ids"]), settings["global_attention"], question=span)
                inputs["global_attention_mask"] = torch.tensor([mask])
            outputs = self.model(**inputs)
            collector.add([{**window, "question_id": "asked"}], outputs.start_logits, outputs.end_logits)
        return collector.finish("asked", context=context, text=document, threshold=settings["threshold"])


def saved_settings(folder: str) -> dict[str, Any]:
    """What the run that made the checkpoint has found best; nothing for checkpoints from elsewhere."""
    path = cached_file(folder, SETTINGS_FILE, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else read_json(Path(path))


def show(prediction: Prediction, document: str, *, colour: bool) -> str:
    """The answer with the text around it, the answer itself marked."""
    if prediction.start is None or prediction.end is None:
        return f"no answer in this document (probability {prediction.probability:.0%})"
    before = document[max(0, prediction.start - CHARACTERS_AROUND) : prediction.start]
    behind = document[prediction.end : prediction.end + CHARACTERS_AROUND]
    left, right = (BOLD, PLAIN) if colour else (">>", "<<")
    shown = textwrap.fill(" ".join(f"{before}{left}{prediction.text}{right}{behind}".split()), width=100)
    place = f"characters {prediction.start:,} to {prediction.end:,} of {len(document):,}"
    return (
        f"{prediction.text}   (probability {prediction.probability:.0%}, {place})\n\n"
        f"{textwrap.indent('… ' + shown + ' …', '    ')}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m finetune.answer", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub id of a question-answering checkpoint")
    parser.add_argument("--document", type=Path, required=True, help="text file")
    parser.add_argument("--question", required=True)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own code")
    args = parser.parse_args(argv)
    try:
        document = args.document.read_text(encoding="utf-8")
        answerer = Answerer(args.model, trust_remote_code=args.trust_remote_code)
        prediction = answerer(args.question, document)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.question}\n{show(prediction, document, colour=sys.stdout.isatty())}")
    print(f"\n(model code: {type(answerer.model).__module__})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
