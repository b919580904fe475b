"""Model cards: what is written about a run is complete and valid, and so is every card in model_cards/."""

import re
from pathlib import Path

import jinja2
import jinja2.meta
import pytest
import transformers
from huggingface_hub import ModelCard

from finetune.cards import TAGS, TASKS, TEMPLATE, CardFacts, make_card, template_values, write_card

ROOT = Path(__file__).parent.parent
AUTO_CLASSES = {
    "qa": "AutoModelForQuestionAnswering",
    "summarise": "AutoModelForSeq2SeqLM",
    "mlm": "AutoModelForMaskedLM",
}


def make_facts(task: str = "qa", **changes) -> CardFacts:
    facts = {
        "title": "hybrid-qa",
        "base_model": "somebody/roberta",
        "task": task,
        "dataset_name": "somebody/contracts",
        "licence": "apache-2.0",
        "metrics": {"f1": 0.91234, "exact_match": 0.8},
        "settings": {"learning_rate": 3e-05, "warmup": None, "windows": [512, 512]},
        "command": ["accelerate", "launch", "-m", "finetune.qa", "--output", "my model"],
        "model_type": "hybrid_longformer",
        "auto_class": AUTO_CLASSES.get(task, "AutoModel"),
        "max_length": 4096,
        "global_attention": "the question",
        "curve_picture": "curve.png",
    }
    return CardFacts(**(facts | changes))


def problems_of(text: str) -> list[str]:
    """What is wrong with a card; nothing, if it can be published."""
    found = []
    data = ModelCard(text).data
    found += ["library_name"] if data.library_name != "transformers" else []
    found += ["tags"] if not set(TAGS) <= set(data.tags or []) else []
    found += ["pipeline_tag"] if data.pipeline_tag not in {task.pipeline for task in TASKS.values()} else []
    found += ["placeholder"] if re.search(r"\{\{|\}\}|\{%|%\}|\bTODO\b|\bNone\b|Undefined", text) else []
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    found += ["no python"] if not blocks else []
    for block in blocks:
        try:
            compile(block, "card", "exec")
        except SyntaxError:
            found.append("python")
    calls = re.findall(r"\.from_pretrained\([^)]*\)", text)
    found += ["trust_remote_code"] if not calls or any("trust_remote_code=True" not in call for call in calls) else []
    found += ["no title"] if not re.search(r"^# \S", text, flags=re.MULTILINE) else []
    return found


@pytest.mark.parametrize("task", TASKS)
def test_written_card_is_valid(task: str, tmp_path: Path) -> None:
    path = write_card(tmp_path, facts=make_facts(task))
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]
    assert problems_of(path.read_text(encoding="utf-8")) == []
    card = ModelCard.load(path)
    assert card.data.pipeline_tag == TASKS[task].pipeline
    assert card.data.license == "apache-2.0" and card.data.base_model == "somebody/roberta"
    assert card.data.datasets == ["somebody/contracts"]
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results == {"f1": 0.91234, "exact_match": 0.8}
    assert {result.task_type for result in card.data.eval_results} == {TASKS[task].pipeline}
    assert f"from transformers import {AUTO_CLASSES[task]}, AutoTokenizer" in card.text
    assert hasattr(transformers, AUTO_CLASSES[task])


def test_text_says_everything() -> None:
    text = make_card(make_facts())
    for part in (
        "# hybrid-qa\n",
        "| started from | somebody/roberta |",
        "| data set | somebody/contracts |",
        "| longest input | 4,096 tokens |",
        "| global attention | the question |",
        "| f1 | 0.9123 |",
        "| learning_rate | 3e-05 |",
        "| windows | [512, 512] |",
        "| warmup | not set |",
        "accelerate launch -m finetune.qa --output 'my model'\n",
        "![Training curve](curve.png)",
        "- Answers are passages of the document",
        "- What lies beyond 4,096 tokens",
    ):
        assert part in text


def test_template_asks_for_what_is_given_and_nothing_else() -> None:
    asked = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(TEMPLATE.read_text(encoding="utf-8")))
    assert asked == {"card_data", *template_values(make_facts())}


def test_writing_again_changes_nothing_and_replaces_other_cards(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("somebody's")
    first = write_card(tmp_path, facts=make_facts()).read_bytes()
    assert b"somebody's" not in first
    assert write_card(tmp_path, facts=make_facts()).read_bytes() == first
    # The library's own round trip keeps it too.
    ModelCard.load(tmp_path / "README.md").save(tmp_path / "again.md")
    assert (tmp_path / "again.md").read_bytes() == first


def test_special_characters_survive() -> None:
    title = 'Ärzte: "50% | #1" & {{ x }}\n---\n- <é> 文書'
    metrics = {"f1: [all] #x": 0.5, "日本": 0.25}
    command = ["python", "-m", "finetune.qa", "--question", 'What\'s "it"?', "--fence", "````"]
    text = make_card(make_facts(title=title, metrics=metrics, command=command, settings={"a|b": "c\nd|e"}))
    card = ModelCard(text)
    assert card.data.model_name == " ".join(title.split())
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == metrics
    assert f"# {' '.join(title.split())}\n" in card.text
    assert "| a\\|b | c d\\|e |" in card.text
    assert "`````bash\n" in card.text and """'What'"'"'s "it"?'""" in card.text
    assert card.data.tags == TAGS


def test_folders_and_files_are_told_by_name_only(tmp_path: Path) -> None:
    base, rows = str(tmp_path / "my-base"), str(tmp_path / "rows.jsonl")
    command = ["python", "-m", "finetune.qa", "--model", base, f"--train-file={rows}", "--push-to-hub", "me/contracts"]
    text = make_card(make_facts(base_model=base, dataset_name=rows, command=command))
    data = ModelCard(text).data
    assert str(tmp_path) not in text
    assert data.base_model is None and data.datasets is None
    assert "| started from | my-base |" in text and "| data set | rows.jsonl |" in text
    assert "\npython -m finetune.qa --model my-base --train-file=rows.jsonl --push-to-hub me/contracts\n" in text


def test_other_models_are_not_called_hybrid() -> None:
    text = make_card(make_facts(model_type="roberta", global_attention=None))
    assert ModelCard(text).data.tags == ["roberta"]
    assert "\nA model of type roberta that finds the answer" in text
    assert 'AutoTokenizer.from_pretrained("path/or/hub-id")\n' in text
    for wrong in ("ybrid_longformer", "Hybrid Longformer", "its own code", "trust_remote_code", "lobal"):
        assert wrong not in text


def test_relatives_have_global_tokens_too() -> None:
    text = make_card(make_facts(model_type="longformer"))
    assert "| global attention | the question |" in text and "`global_attention_mask`" in text
    assert "trust_remote_code" not in text


def test_what_is_not_known_is_said_so() -> None:
    text = make_card(make_facts(licence=None, metrics={}, settings={}))
    data = ModelCard(text).data
    assert data.license is None and data.eval_results is None
    assert "Not evaluated." in text and "| licence | not stated" in text
    assert problems_of(text) == []


def test_licences_without_an_id_and_broken_metrics_stay_out_of_the_metadata() -> None:
    text = make_card(make_facts(licence="Our Own Licence 1.0", metrics={"loss": float("nan"), "f1": 1.0}))
    data = ModelCard(text).data
    assert data.license is None and "| licence | Our Own Licence 1.0 |" in text
    assert [result.metric_type for result in data.eval_results] == ["f1"]
    assert "| loss | nan |" in text


@pytest.mark.parametrize(
    "wrong", [{"task": "translate"}, {"auto_class": "os.system"}, {"max_length": 0}, {"command": []}]
)
def test_refuses_facts_that_make_no_card(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        make_facts(**wrong)


@pytest.mark.parametrize(
    ("found", "replacement", "problem"),
    [
        ("library_name: transformers\n", "", "library_name"),
        ("- sparse-attention\n", "", "tags"),
        ("pipeline_tag: question-answering\n", "pipeline_tag: chess\n", "pipeline_tag"),
        ("# hybrid-qa\n", "# {{ title }}\n", "placeholder"),
        ("# hybrid-qa\n", "\n", "no title"),
        ("start, end = ", "start, end == = ", "python"),
        ("```python\n", "```\n", "no python"),
        (", trust_remote_code=True)\ntokenizer", ")\ntokenizer", "trust_remote_code"),
    ],
)
def test_the_check_finds_what_is_wrong(found: str, replacement: str, problem: str) -> None:
    text = make_card(make_facts())
    assert found in text
    assert problem in problems_of(text.replace(found, replacement, 1))


def test_cards_of_this_project_are_valid() -> None:
    cards = list((ROOT / "model_cards").glob("*.md"))
    assert len(cards) > 3
    assert {path.name: problems_of(path.read_text(encoding="utf-8")) for path in cards} == {
        path.name: [] for path in cards
    }
    # The template itself is no card: its places are empty.
    assert "placeholder" in problems_of(TEMPLATE.read_text(encoding="utf-8").replace("{{ card_data }}", "a: b"))
