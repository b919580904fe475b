"""Cards: writes the model card of a finished fine-tuning run from card_template.md."""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hybrid_longformer import HybridLongformerConfig

from .files import whole_file

TEMPLATE = Path(__file__).with_name("card_template.md")
CARD_NAME = "README.md"
HYBRID = "Hybrid Longformer (local + global + random attention)"
# Of hybrid models; others have their type alone.
TAGS = [HybridLongformerConfig.model_type, "long-document", "sparse-attention"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a card says about a task.

    Args:
        name: for people.
        pipeline: the Hub's tag.
        purpose: completes "a model that …".
        usage: Python that goes on with `model` and `tokenizer`.
        limit: what no model of this task can do.
    """

    name: str
    pipeline: str
    purpose: str
    usage: str
    limit: str


TASKS = {
    "qa": Task(
        name="extractive question answering",
        pipeline="question-answering",
        purpose="finds the answer to a question in a long document",
        usage="""\
inputs = tokenizer("Who signs?", "The whole document.", truncation="only_second", return_tensors="pt")
outputs = model(**inputs)
start, end = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))""",
        limit="Answers are passages of the document, word for word; nothing is concluded or added up.",
    ),
    "summarise": Task(
        name="summarisation",
        pipeline="summarization",
        purpose="writes summaries of long documents",
        usage="""\
inputs = tokenizer("The whole document.", truncation=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))""",
        limit="Summaries can say what the document does not: check them before relying on them.",
    ),
    "mlm": Task(
        name="masked-language modelling",
        pipeline="fill-mask",
        purpose="fills in masked tokens, as a start for fine-tuning on long documents",
        usage="""\
inputs = tokenizer(f"A long {tokenizer.mask_token}.", return_tensors="pt")
masked = inputs["input_ids"][0] == tokenizer.mask_token_id
print(tokenizer.decode(model(**inputs).logits[0, masked].argmax(-1)))""",
        limit="Made to be fine-tuned; by itself it only fills in tokens.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything a card says of one run.

    Args:
        title: of the model.
        base_model: what training started from: a Hub id or a folder, of which only the name is told.
        dataset_name: a Hub id, a folder or a file, of which only the name is told.
        licence: the Hub's id of a licence, any other name of one, or None if it is not known.
        metrics: by name, as measured at the end.
        settings: of the training, by name.
        command: the command line, in words; of paths in it only their names are told.
        model_type: as in the model's configuration.
        auto_class: the transformers class to load the model with.
        max_length: tokens the model was trained to read.
        global_attention: which tokens are global, in words, or None for a model that has no such tokens.
        curve_picture: a file name in the model's folder.
    """

    title: str
    base_model: str
    task: Literal["qa", "summarise", "mlm"]
    dataset_name: str
    licence: str | None
    metrics: Mapping[str, float]
    settings: Mapping[str, Any]
    command: list[str]
    model_type: str
    auto_class: str
    max_length: int
    global_attention: str | None
    curve_picture: str

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r} must be one of {', '.join(TASKS)}")
        if not re.fullmatch(r"AutoModel\w*", self.auto_class):
            raise ValueError(f"auto_class={self.auto_class!r} must be an Auto class, such as AutoModelForMaskedLM")
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be at least 1: the tokens the model reads")
        if not self.command:
            raise ValueError("command is empty: give the command line of the run, such as [sys.executable, *sys.argv]")

    @property
    def is_hybrid(self) -> bool:
        return self.model_type == HybridLongformerConfig.model_type


def write_card(folder: Path, *, facts: CardFacts) -> Path:
    """Writes the card into a model's folder, in place of one that is there, and returns its path."""
    card = Path(folder) / CARD_NAME
    with whole_file(card) as part:
        part.write_text(make_card(facts), encoding="utf-8")
    return card


def make_card(facts: CardFacts) -> str:
    """The whole card: metadata and text."""
    card = ModelCard.from_template(_metadata(facts), template_path=str(TEMPLATE), **template_values(facts))
    return str(card).rstrip() + "\n"


def template_values(facts: CardFacts) -> dict[str, Any]:
    """What fills the template's places, the metadata apart."""
    task = TASKS[facts.task]
    command = shlex.join(_public_word(word) for word in facts.command)
    longest_run = max((len(run) for run in re.findall("`+", command)), default=0)
    return {
        "title": _one_line(facts.title),
        "kind": HYBRID if facts.is_hybrid else f"model of type {facts.model_type}",
        "is_hybrid": facts.is_hybrid,
        "purpose": task.purpose,
        "base_model": _cell(_public_name(facts.base_model)),
        "task": task.name,
        "dataset": _cell(_public_name(facts.dataset_name)),
        "max_length": f"{facts.max_length:,}",
        "global_attention": None if facts.global_attention is None else _cell(facts.global_attention),
        "licence": _cell(facts.licence or "not stated; ask the authors of the model it started from"),
        "loading": _loading(facts, task),
        "metrics": [(_cell(name), f"{value:.4g}") for name, value in facts.metrics.items()],
        "settings": [(_cell(name), _cell(value)) for name, value in facts.settings.items()],
        "curve_picture": facts.curve_picture,
        "command": command,
        "fence": "`" * max(3, longest_run + 1),
        "limits": [task.limit, _length_limit(facts.max_length)],
    }


def _metadata(facts: CardFacts) -> ModelCardData:
    pipeline = TASKS[facts.task].pipeline
    dataset = _public_name(facts.dataset_name)
    # The Hub reads the results as JSON, which has no NaN; the text shows them all.
    finite = {name: float(value) for name, value in facts.metrics.items() if math.isfinite(value)}
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=name,
            metric_name=name,
            metric_value=value,
        )
        for name, value in finite.items()
    ]
    return ModelCardData(
        model_name=_one_line(facts.title),
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=TAGS if facts.is_hybrid else [facts.model_type],
        license=facts.licence if re.fullmatch(r"[a-z0-9.-]+", facts.licence or "") else None,
        base_model=facts.base_model if _is_hub_id(facts.base_model) else None,
        datasets=[facts.dataset_name] if _is_hub_id(facts.dataset_name) else None,
        eval_results=results or None,
    )


def _loading(facts: CardFacts, task: Task) -> str:
    source = '"path/or/hub-id"' + (", trust_remote_code=True" if facts.is_hybrid else "")
    return f"""\
from transformers import {facts.auto_class}, AutoTokenizer

model = {facts.auto_class}.from_pretrained({source})
tokenizer = AutoTokenizer.from_pretrained({source})
{task.usage}"""


def _length_limit(max_length: int) -> str:
    return f"What lies beyond {max_length:,} tokens is not read: cut longer documents into overlapping windows."


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".") and not Path(name).exists()


def _public_name(name: str) -> str:
    """A Hub id as it is; of a path only its last part, since a card should not tell where somebody keeps files."""
    return name if _is_hub_id(name) else Path(name).name or name


def _public_word(word: str) -> str:
    """A word of a command line, told like a name, be it behind `--option=`."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return option + equals + _public_name(value)


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def _cell(value: Any) -> str:
    """One line that does not end its cell of a table."""
    return _one_line("not set" if value is None else value).replace("|", "\\|")
