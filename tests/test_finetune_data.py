"""Fine-tuning on data as users have them: without answers, without unanswerable questions, with gaps, in streams."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

from finetune.answer import Answerer
from finetune.answers import Answer, choose
from finetune.arguments import parse_arguments
from finetune.batches import eval_batches
from finetune.documents import Question
from finetune.engine import make_accelerator
from finetune.files import read_json
from finetune.mlm import MaskedLM
from finetune.qa import QA, best_answer_scores, unique_ids
from finetune.run import card_facts, run
from finetune.summarise import Summarise, cut_text, encode_rows, longest_output

from .finetuning import arguments, make_tokenizer

pytestmark = pytest.mark.usefixtures("own_accelerator")


def make_task(task_class, work: Path, name: str, *more: str):
    args = parse_arguments(task_class.arguments_class, [*arguments(work, name), "--output", "nowhere", *more])
    return task_class(args)


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_where_every_question_has_an_answer_one_is_always_given(work, tmp_path):
    rows = [
        {"id": str(number), "question": "What colour?", "context": "The fox is red.", "answers": ["red"]}
        for number in range(3)
    ]
    data = write_lines(tmp_path / "all.jsonl", rows)
    argv = [*arguments(work, "qa"), "--validation-file", str(data), "--max-steps", "2", "--eval-steps", "2"]
    assert run(QA, [*argv, "--output", str(tmp_path / "run")]) == 0
    assert read_json(tmp_path / "run" / "model" / "task_settings.json")["threshold"] is None
    predicted = read_json(tmp_path / "run" / "predictions" / "validation" / "predictions.json")
    assert len(predicted) == 3 and all(predicted.values())
    assert Answerer(str(tmp_path / "run" / "model"))("What colour?", "The fox is red.").text


def test_answers_that_stand_nowhere_are_not_learnt_as_no_answer(work, tmp_path, capsys):
    rows = [
        {"question": "What colour?", "context": "The fox is red.", "answers": [answer]} for answer in ("red", "Red")
    ]
    data = write_lines(tmp_path / "some.jsonl", rows)
    task = make_task(QA, work, "qa", "--train-file", str(data), "--validation-file", str(data))
    assert len(task.rows("train")) == 1
    assert "1 of 2 training questions are left out" in capsys.readouterr().err
    # When answers are judged, what is right stays right.
    assert [question.answers for question in task.rows("validation").questions] == [["red"], ["Red"]]
    streamed = make_task(QA, work, "qa", "--train-file", str(data), "--streaming", "--max-steps", "1")
    assert len(list(streamed.stream())) == 1


def test_answers_have_to_be_there(work, tmp_path, capsys):
    argv = [*arguments(work, "qa"), "--answers-column", "antworten", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 1
    assert "has no column 'antworten'" in capsys.readouterr().err


def test_scores_of_answers_that_the_threshold_keeps_back():
    unsure = choose([Answer("", None, None, 5.0, 0.9), Answer("red fox", 0, 7, 1.0, 0.1)])
    assert unsure.text == ""
    predictions = {"a": unsure, "b": unsure, "c": choose([Answer("", None, None, 0.0, 1.0)])}
    references = {"a": ["red"], "b": [], "c": ["blue"]}
    assert best_answer_scores(predictions, references) == {"HasAns_best_f1": pytest.approx(100 * (2 / 3 + 0) / 2)}
    assert best_answer_scores({"b": unsure}, {"b": []}) == {}


def test_equal_ids_are_told_apart():
    questions = [Question(id=name, text="", context="", answers=[], starts=[]) for name in ("a", "a", "b", "a")]
    assert unique_ids(questions) == ["a", "a#2", "b", "a#3"]


@pytest.mark.parametrize(("task_class", "name"), [(QA, "qa"), (Summarise, "summarise"), (MaskedLM, "mlm")])
def test_a_stream_is_cut_where_it_should_be(work, task_class, name):
    streaming = ["--streaming", "--max-steps", "1"]
    few = list(make_task(task_class, work, name, *streaming, "--max-train-samples", "1").stream())
    all_of_them = list(make_task(task_class, work, name, *streaming).stream())
    assert 0 < len(few) < len(all_of_them)


@pytest.mark.parametrize(
    ("task_class", "name", "column"),
    [(QA, "qa", "context"), (Summarise, "summarise", "summary"), (MaskedLM, "mlm", "text")],
)
def test_a_stream_without_a_column_is_refused(work, task_class, name, column):
    task = make_task(task_class, work, name, "--streaming", "--max-steps", "1", f"--{column}-column", "nothing")
    with pytest.raises(ValueError, match="training stream has no column 'nothing'"):
        task.stream()


def test_placements_of_global_tokens_are_kept_with_the_model(work, tmp_path):
    output = tmp_path / "run"
    argv = [*arguments(work, "qa"), "--max-steps", "2", "--global-attention", "every:8", "--output", str(output)]
    assert run(QA, argv) == 0
    nbest = read_json(output / "predictions" / "validation" / "nbest.json")
    article = read_json(work / "validation.json")["data"][0]["paragraphs"][0]
    answerer = Answerer(str(output / "model"))
    for asked in article["qas"]:
        prediction = answerer(asked["question"], article["context"])
        scores = [answer["score"] for answer in nbest[asked["id"]]]
        assert [answer.score for answer in prediction.nbest[:3]] == pytest.approx(scores[:3], abs=2e-5)


def test_finished_summarisers_generate_as_they_were_evaluated(work, tmp_path):
    argv = [*arguments(work, "summarise"), "--max-steps", "1", "--num-beams", "2", "--max-summary-tokens", "30"]
    assert run(Summarise, [*argv, "--output", str(tmp_path / "run")]) == 0
    saved = transformers.GenerationConfig.from_pretrained(tmp_path / "run" / "model")
    assert (saved.max_new_tokens, saved.num_beams, saved.no_repeat_ngram_size) == (30, 2, 3)


def test_gaps_in_summaries_and_long_queries():
    tokenizer = make_tokenizer()
    settings = {"document": "d", "summary": "s", "max_length": 40, "max_summary_tokens": 9, "max_query_tokens": 99}
    rows = {"d": [None, "The fox is red. " * 9], "s": ["Red.", "The fox."], "q": [None, "Which colour is it? " * 99]}
    encoded = encode_rows(rows, tokenizer=tokenizer, query="q", **settings)
    assert encoded["length"][1] == 40 and encoded["query_end"][1] == 21
    with pytest.raises(ValueError, match="1 rows have no s: leave them out"):
        encode_rows(rows | {"s": [None, "a"]}, tokenizer=tokenizer, query=None, **settings)
    text = "The fox is red."
    assert cut_text(tokenizer, text, 2) == text[: tokenizer(text, return_offsets_mapping=True)["offset_mapping"][2][1]]
    assert cut_text(tokenizer, text, 99) == text


def test_summaries_no_longer_than_the_decoder_writes(work, tmp_path, capsys):
    assert longest_output(transformers.LEDConfig(max_decoder_position_embeddings=64)) == 64
    assert longest_output(transformers.T5Config()) is None
    argv = [*arguments(work, "summarise"), "--max-summary-tokens", "5000", "--output", str(tmp_path / "run")]
    assert run(Summarise, argv) == 1
    assert "max_summary_tokens=5000 is more than the" in capsys.readouterr().err


def test_a_data_set_needs_no_validation_split(tmp_path):
    given = ["--model", "m", "--output", "o", "--dataset", "d"]
    assert parse_arguments(QA.arguments_class, [*given, "--validation-split", "none"]).validation_split is None
    (tmp_path / "run.yaml").write_text("model: m\noutput: o\ndataset: d\nvalidation_split: null\n")
    assert parse_arguments(QA.arguments_class, [str(tmp_path / "run.yaml")]).validation_split is None


def test_pickled_weights_are_refused(work, tmp_path, capsys):
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(work / "qa")
    model.config.save_pretrained(tmp_path / "old")
    make_tokenizer().save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    argv = [*arguments(work, "qa"), "--model", str(tmp_path / "old"), "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 1
    assert "safetensors" in capsys.readouterr().err


def test_accelerates_own_config_chooses_the_precision(work, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for more, expected in (([], "bf16"), (["--mixed-precision", "no"], "no")):
        args = parse_arguments(QA.arguments_class, [*arguments(work, "qa"), "--output", str(tmp_path), *more])
        assert make_accelerator(args, tmp_path).mixed_precision == expected
        AcceleratorState._reset_state(True)


def test_trainer_stops_in_time_without_anything_to_validate_on(work, tmp_path):
    argv = [word for word in arguments(work, "qa") if "validation" not in word]
    argv = [*argv, "--trainer", "--max-steps", "50", "--max-minutes", "0", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    assert read_json(tmp_path / "run" / "metrics.json")["steps"] == 1


def test_a_run_goes_on_with_steps_of_the_same_size(work, tmp_path, capsys):
    argv = [*arguments(work, "qa"), "--max-steps", "1", "--output", str(tmp_path / "run")]
    assert run(QA, argv) == 0
    assert run(QA, [*argv, "--batch-size", "2", "--max-steps", "3", "--resume"]) == 1
    assert "takes 4 rows per step, now it would be 2" in capsys.readouterr().err
    more = ["--batch-size", "2", "--gradient-accumulation", "2", "--max-steps", "2", "--resume"]
    assert run(QA, [*argv, *more]) == 0


def test_processes_of_a_sharded_model_have_as_many_batches_each(work, monkeypatch):
    """Seven rows one by one: the second process has three, so one batch less if it were not given another."""
    task = make_task(QA, work, "qa", "--eval-batch-size", "1")
    rows = task.rows("validation")
    lengths = rows.lengths[:7]
    monkeypatch.setattr("finetune.task.is_sharded", lambda accelerator: True)

    class Second:
        process_index, num_processes, is_main_process, device = 1, 2, False, "cpu"

    found = [numbers for numbers, _ in task.eval_batches(rows, lengths, Second(), "")]
    assert found == [*eval_batches(lengths, batch_size=1, rank=1, world_size=2), []]


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_a_new_language_model_head_begins_with_a_guess(work, tmp_path, scale):
    """Whatever the scale of the embeddings; a head that the checkpoint has is left as it is."""
    encoder = transformers.AutoModel.from_pretrained(work / "mlm")
    torch.nn.init.normal_(encoder.embeddings.word_embeddings.weight, std=scale)
    encoder.save_pretrained(tmp_path / "encoder", tokenizer=make_tokenizer())
    task = make_task(MaskedLM, work, "mlm", "--model", str(tmp_path / "encoder"))
    logits = task.load_model().eval()(torch.arange(5, 45)[None]).logits
    assert 0.5 < logits.std() < 2
    known = make_task(MaskedLM, work, "mlm").load_model()
    assert torch.equal(known.lm_head.layer_norm.weight, torch.ones_like(known.lm_head.layer_norm.weight))


def test_the_card_knows_what_kind_of_model_was_trained(work, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.RobertaConfig(vocab_size=400, max_position_embeddings=514, **sizes)
    transformers.RobertaForQuestionAnswering(config).save_pretrained(tmp_path / "roberta")
    make_tokenizer().save_pretrained(tmp_path / "roberta")
    known = []
    for model in (work / "qa", tmp_path / "roberta"):
        task = make_task(QA, work, "qa", "--model", str(model))
        task.load_model()
        facts = card_facts(task, {}, ["python"])
        known.append((facts.model_type, facts.global_attention))
    assert known == [("hybrid_longformer", "question"), ("roberta", None)]
