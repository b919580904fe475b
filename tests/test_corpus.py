"""Help topics: prose, apart in their splits, and a file that masked-LM adaptation reads."""

import itertools

import pytest

from finetune.contract_values import SPLITS
from finetune.corpus import help_topics, main
from finetune.documents import read_file


def test_help_topics_are_prose_and_their_splits_are_apart():
    whole = [topic.id for topic in help_topics()]
    parts = [[topic.id for topic in help_topics(split=split)] for split in SPLITS]
    assert sorted(whole) == sorted(itertools.chain(*parts))
    assert len(whole) > 50 and all(parts)
    longest = max(help_topics(), key=lambda topic: len(topic.text))
    assert len(longest.text) > 10_000
    assert {topic.id for topic in help_topics(at_least=10_000)} < set(whole)
    with pytest.raises(ValueError, match="split='dev'"):
        next(help_topics(split="dev"))


def test_help_topics_as_a_file_for_masked_lm_adaptation(tmp_path, capsys):
    main(["--split", "validation", "--at-least", "1000", "--output", str(tmp_path / "topics.jsonl")])
    topics = list(help_topics(split="validation", at_least=1000))
    assert f"{len(topics)} topics" in capsys.readouterr().out
    rows = list(read_file(tmp_path / "topics.jsonl"))
    assert [(row["id"], row["text"]) for row in rows] == [(topic.id, topic.text) for topic in topics]
