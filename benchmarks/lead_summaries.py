"""The baseline that a summariser has to beat: a document's first words, scored by ROUGE.

python -m benchmarks.lead_summaries data/scisummnet/validation.jsonl.gz --words 150
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.documents import check_columns, read_file
from finetune.metrics import load_metric


def lead_scores(path: Path, *, words: int, document: str, summary: str) -> dict[str, float]:
    """ROUGE of every document's first `words` words against its summary."""
    rows = read_file(path)
    check_columns(rows, [document, summary], str(path))
    pairs = [(" ".join(row[document].split()[:words]), row[summary]) for row in rows]
    return load_metric("rouge").compute(
        predictions=[lead for lead, _ in pairs], references=[reference for _, reference in pairs]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lead_summaries", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--document-column", default="document")
    parser.add_argument("--summary-column", default="summary")
    args = parser.parse_args(argv)
    scores = lead_scores(args.file, words=args.words, document=args.document_column, summary=args.summary_column)
    print(f"first {args.words} words: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
