"""Reading data sets: every usual form gives the same questions, and what can't be read is refused by name."""

import csv
import gzip
import json

import pytest
from datasets import Dataset

from finetune.arguments import RunArguments
from finetune.documents import NOT_FOUND, QuestionColumns, as_question, check_columns, read_file, read_rows, take

from .finetuning import squad_article

ARTICLES = [squad_article(number) for number in range(3)]


def flat_rows(answers_form: str) -> list[dict]:
    rows = []
    for article in ARTICLES:
        paragraph = article["paragraphs"][0]
        for asked in paragraph["qas"]:
            texts, starts = ([answer[key] for answer in asked["answers"]] for key in ("text", "answer_start"))
            answers = {"text": texts, "answer_start": starts}
            answers = {"squad": answers, "list": asked["answers"], "texts": texts, "json": json.dumps(answers)}[
                answers_form
            ]
            rows.append(
                {"id": asked["id"], "question": asked["question"], "context": paragraph["context"], "answers": answers}
            )
    return rows


def write(path, form: str):
    if form == "nested":
        path.write_text(json.dumps({"version": "2", "data": ARTICLES}))
    elif form == "nested, many lines":
        path.write_text(json.dumps({"data": ARTICLES}, indent=2))
    elif form == "nested, gz":
        path = path.with_suffix(".json.gz")
        path.write_bytes(gzip.compress(json.dumps({"data": ARTICLES}).encode()))
    elif form == "flat under data":
        path.write_text(json.dumps({"data": flat_rows("squad")}))
    elif form == "list":
        path.write_text(json.dumps(flat_rows("squad")))
    elif form == "lines":
        path = path.with_suffix(".jsonl")
        path.write_text("\n".join(map(json.dumps, flat_rows("list"))))
    elif form == "lines, texts only":
        path.write_text("\n".join(map(json.dumps, flat_rows("texts"))))
    elif form == "csv":
        path = path.with_suffix(".csv")
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "question", "context", "answers"])
            writer.writeheader()
            writer.writerows(flat_rows("json"))
    elif form == "parquet":
        path = path.with_suffix(".parquet")
        Dataset.from_list(flat_rows("squad")).to_parquet(path)
    return path


FORMS = [
    "nested",
    "nested, many lines",
    "nested, gz",
    "flat under data",
    "list",
    "lines",
    "lines, texts only",
    "csv",
    "parquet",
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_questions(tmp_path, form):
    path = write(tmp_path / "data.json", form)
    rows = read_file(path)
    questions = [as_question(row, number, QuestionColumns()) for number, row in enumerate(rows)]
    assert len(questions) == 9
    for question, article in zip(questions[::3], ARTICLES, strict=True):
        asked = article["paragraphs"][0]["qas"][0]
        assert (question.id, question.text) == (asked["id"], asked["question"])
        assert question.answers == [asked["answers"][0]["text"]]
        assert question.context[question.starts[0] :].startswith(question.answers[0])
        if form != "lines, texts only":
            assert question.starts == [asked["answers"][0]["answer_start"]]
    assert [question.answers for question in questions[2::3]] == [[], [], []]


def test_one_line_of_json_lines_is_a_row(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"document": "a", "summary": "b"}\n')
    assert list(read_file(path)) == [{"document": "a", "summary": "b"}]


def test_a_wrong_start_is_mended_and_an_answer_that_is_nowhere_still_counts_as_right():
    row = {"question": "q", "context": "a b c", "answers": {"text": ["b", "x"], "answer_start": [0, 1]}}
    question = as_question(row, 4, QuestionColumns())
    assert (question.id, question.answers, question.starts) == ("4", ["b", "x"], [2, NOT_FOUND])
    assert question.is_learnable
    nowhere = as_question(row | {"answers": ["B"]}, 4, QuestionColumns())
    assert (nowhere.answers, nowhere.is_learnable) == (["B"], False)
    assert as_question(row | {"answers": None}, 4, QuestionColumns()).is_learnable


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        ("1999", ["1999"]),
        ("true", ["true"]),
        (1999, ["1999"]),
        ("[***] dollars", ["[***] dollars"]),
        ('["1999", "b"]', ["1999", "b"]),
        ({"text": "b", "answer_start": 5}, ["b"]),
        ('{"text": "b"}', ["b"]),
        ("", []),
        (None, []),
    ],
)
def test_answers_of_every_kind(answers, texts):
    row = {"question": "q", "context": "in 1999 b", "answers": answers}
    assert as_question(row, 0, QuestionColumns()).answers == texts


def test_answers_as_python_writes_them_are_refused():
    row = {"id": "7", "question": "q", "context": "c", "answers": "{'text': array(['c'], dtype=object)}"}
    with pytest.raises(ValueError, match=r"of row '7' is written as Python writes it.*json"):
        as_question(row, 0, QuestionColumns())


def test_an_empty_cell_is_an_empty_document():
    assert as_question({"question": "q", "context": None, "answers": "a"}, 0, QuestionColumns()).context == ""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("data.txt", "a", "ends in none of .json"),
        ("data.json", '{"a": \n 1', "neither one json object nor one per line"),
        ("data.json", '{"data": [{"paragraphs": [{"qas": []}]}]}', "paragraph 0 of article 0 has no context"),
        ("data.json", '{"data": 3}', "data.json: data must be a list of json objects, as in SQuAD, not 3"),
        ("data.json", '{"data": ["a"]}', 'data must be a list of json objects, as in SQuAD, not ."a".'),
        ("data.json", '{"data": [{"paragraphs": {"a": 1}}]}', "paragraphs of article 0 must be a list"),
        ("data.json", '{"data": [{"paragraphs": [{"context": "c", "qas": [1]}]}]}', "qas of article 0 must be a list"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        list(read_file(path))


def test_missing_files_columns_and_answers_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json is not a file"):
        read_file(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="no data to read for train: give --train-file"):
        read_rows(RunArguments(model="m", output="o"), "train")
    with pytest.raises(ValueError, match="has no column 'summary', only 'document'"):
        check_columns([{"document": "a"}], ["document", "summary"], "train data")
    with pytest.raises(ValueError, match="2 answer texts but 1 answer starts"):
        as_question(
            {"question": "q", "context": "c", "answers": {"text": ["c", "c"], "answer_start": [0]}},
            0,
            QuestionColumns(),
        )


def test_limits_take_the_first_rows_or_some_from_all_over():
    assert take(list(range(10)), 3, spread=False) == [0, 1, 2]
    assert take(list(range(10)), 3, spread=True) == [0, 3, 6]
    assert take(list(range(3)), 9, spread=True) == [0, 1, 2]
