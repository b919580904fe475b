"""Generated contracts: right answers, honest distractors, no leakage between splits, files whole or absent."""

import json
import re
from collections import Counter

import pytest

from finetune import contracts as module
from finetune.contract_clauses import KINDS
from finetune.contract_values import SPLITS, values_of_split
from finetune.contracts import SIZES, generate_contracts, main, write_dataset

SORTS = sorted({kind.value for kind in KINDS} | {"company"})


@pytest.fixture(scope="module")
def contracts():
    return list(generate_contracts(size="medium", split="train", count=60))


def test_same_arguments_same_contracts():
    once, again = (list(generate_contracts(size="small", split="train", count=3, seed=5)) for _ in range(2))
    other = list(generate_contracts(size="small", split="train", count=3, seed=6))
    assert once == again
    assert not {contract.text for contract in once} & {contract.text for contract in other}
    # More of them begin with the same ones.
    assert list(generate_contracts(size="small", split="train", count=4, seed=5))[:3] == once


def test_answers_stand_where_they_are_said_to_stand(contracts):
    for contract in contracts:
        for question in contract.questions:
            for answer, start in zip(question.answers, question.answer_starts, strict=True):
                assert contract.text[start : start + len(answer)] == answer


def test_an_answer_comes_from_the_one_clause_in_force_that_was_asked_for(contracts):
    """Read back from the text alone: kind by its wording, party by its name, superseded by its mark."""
    for contract in contracts:
        for question in contract.questions:
            kind, party = read_question(question.question)
            found = [value for clause in contract.text.split("\n") for value in read_clause(clause, kind, party)]
            assert found == question.answers, question


def as_pattern(template: str, **known: str) -> str:
    for name, text in known.items():
        template = re.sub(rf"\{{{name}\}}", text, template)
    pattern = re.escape(template).replace(r"\{value\}", "(.+?)").replace(r"\{other\}", "the [A-Z][a-z]+")
    return pattern.replace(r"\{party\}", "(the [A-Z][a-z]+)")


def read_question(text: str):
    for kind in KINDS:
        for template in kind.questions:
            if match := re.fullmatch(as_pattern(template), text, re.IGNORECASE):
                return kind, (match.groups() or ("",))[0]
    raise AssertionError(f"no kind of clause is asked for by {text!r}")


def read_clause(text: str, kind, party: str) -> list[str]:
    if re.search("no longer applies|Superseded on|struck out|never signed|Repealed", text):
        return []
    for template in kind.clauses:
        if match := re.search(rf"^\d+\. [^.]+\. (?i:{as_pattern(template, party=party)})(?: [A-Z]|$)", text):
            return [match[1]]
    return []


def test_a_third_of_the_questions_have_no_answer_and_near_misses_are_among_them(contracts):
    questions = [(contract, question) for contract in contracts for question in contract.questions]
    empty = [(contract, question) for contract, question in questions if not question.answers]
    assert 0.25 < len(empty) / len(questions) < 0.4
    tempting = sum(
        f". {read_question(question.question)[0].heading}. " in contract.text for contract, question in empty
    )
    assert tempting / len(empty) > 0.5


def test_nothing_but_the_question_tells_the_answer(contracts):
    """Every kind is asked for with and without success, and one contract's questions have different answers."""
    asked = Counter((read_question(q.question)[0].name, bool(q.answers)) for c in contracts for q in c.questions)
    assert {name for name, _ in asked} == {kind.name for kind in KINDS}
    assert sum(asked[kind.name, False] > 0 for kind in KINDS) == len(KINDS)
    for contract in contracts:
        answers = [answer for question in contract.questions for answer in question.answers]
        assert len(set(answers)) >= len(answers) - 1 >= 4
    marked = sum(contract.text.count("Superseded on") for contract in contracts)
    assert marked > len(contracts)


def test_evidence_lies_all_over_the_document(contracts):
    places = [q.answer_starts[0] / len(c.text) for c in contracts for q in c.questions if q.answers]
    quarters = Counter(int(place * 4) for place in places)
    assert min(quarters.values()) > len(places) / 8


@pytest.mark.parametrize("sort", SORTS)
def test_no_value_is_in_two_splits(sort):
    per_split = [set(values_of_split(sort, split)) for split in SPLITS]
    assert sum(map(len, per_split)) == len(set.union(*per_split))
    assert min(map(len, per_split)) >= 10


def test_no_answer_of_one_split_is_an_answer_of_another():
    answers = {
        split: {
            answer
            for contract in generate_contracts(size="medium", split=split, count=20)
            for question in contract.questions
            for answer in question.answers
        }
        for split in SPLITS
    }
    assert all(len(found) > 50 for found in answers.values())
    assert not answers["train"] & answers["test"]
    assert not answers["train"] & answers["validation"]
    assert not answers["validation"] & answers["test"]


def test_summaries_tell_facts_from_the_whole_length(contracts):
    for contract in contracts[:20]:
        values = re.findall(r"\d[\d,.]* (?:euros|days|months|hours|percent)", contract.summary)
        assert contract.summary.count(".") >= 5
        places = [contract.text.index(value) / len(contract.text) for value in values]
        assert len(places) < 3 or max(places) - min(places) > 0.2


def test_sizes_grow_and_unknown_ones_are_refused():
    words = [len(next(generate_contracts(size=size, split="test", count=1)).text.split()) for size in SIZES]
    assert words[0] < 600 < 1_500 < words[1] < 2_000 < 4_000 < words[2]
    with pytest.raises(ValueError, match="size='huge' is not one of small, medium, large"):
        next(generate_contracts(size="huge", split="train", count=1))
    with pytest.raises(ValueError, match="split='dev' is not one of train, validation, test"):
        next(generate_contracts(size="small", split="dev", count=1))


def test_dataset_is_squad_and_json_lines(tmp_path, capsys):
    main([str(tmp_path / "data"), "--size", "small", "--train", "3", "--validation", "1", "--test", "2"])
    assert "train.json: 3 contracts, 18 questions" in capsys.readouterr().out
    for split, count in (("train", 3), ("validation", 1), ("test", 2)):
        squad = json.loads((tmp_path / "data" / f"{split}.json").read_text(encoding="utf-8"))
        assert len(squad["data"]) == count
        for article in squad["data"]:
            (paragraph,) = article["paragraphs"]
            for question in paragraph["qas"]:
                assert question["is_impossible"] == (not question["answers"])
                for answer in question["answers"]:
                    assert paragraph["context"].startswith(answer["text"], answer["answer_start"])
        lines = (tmp_path / "data" / f"{split}-summaries.jsonl").read_text(encoding="utf-8").splitlines()
        assert [set(json.loads(line)) for line in lines] == [{"id", "document", "summary"}] * count


def test_dataset_is_whole_or_absent(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "_as_squad", fail)
    with pytest.raises(OSError, match="disk full"):
        write_dataset(tmp_path / "data", size="small", train=1, validation=1, test=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        write_dataset(tmp_path / "data", size="small", train=1, validation=1, test=1)
