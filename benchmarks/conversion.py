"""Conversion benchmark: real weights before and after conversion, on real passages and long documents.

    python -m benchmarks.conversion            # everything, some minutes on two cores
    python -m benchmarks.conversion --quick    # a first impression

Needs a RoBERTa encoder, SciSummNet and CUAD in a folder `shared` beside the project, or where the environment variable
HYBRID_LONGFORMER_SHARED says: models/<name>/, data/scisummnet/*.jsonl.gz and data/cuad/*.json.gz.
"""

import argparse
import gzip
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from hybrid_longformer import HybridLongformerModel, convert_checkpoint

SHARED = Path(os.environ.get("HYBRID_LONGFORMER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
MODEL = "granite-30m-roberta"
SOURCE_LENGTH, LONG_LENGTH = 512, 4096
# A summary sentence or passage with fewer words says too little to be found by.
FEWEST_WORDS = 12
BATCH_TOKENS = 4096

Row = dict[str, Any]


def read_papers(split: str) -> list[Row]:
    """SciSummNet's rows: id, document, summary."""
    with gzip.open(SHARED / "data" / "scisummnet" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def summary_queries(papers: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Summary sentences as queries, the papers' paragraphs as passages."""
    sentences = [s.strip() for paper in papers for s in re.split(r"(?<=[.!?])\s+", paper["summary"])]
    paragraphs = [p.strip() for paper in papers for p in paper["document"].split("\n")]
    return [_ for _ in sentences if _is_telling(_)], [_ for _ in paragraphs if _is_telling(_)]


def clause_queries(split: str) -> tuple[list[str], list[str]]:
    """CUAD's questions that have an answer, each with the contract's title, and the contracts' paragraphs."""
    with gzip.open(SHARED / "data" / "cuad" / f"{split}.json.gz", "rt", encoding="utf-8") as file:
        contracts = json.load(file)["data"]
    queries, passages = [], []
    for contract in contracts:
        for part in contract["paragraphs"]:
            passages += [p.strip() for p in part["context"].split("\n\n") if _is_telling(p)]
            queries += [f"{contract['title']}: {qa['question']}" for qa in part["qas"] if qa["answers"]]
    return queries, passages


def _is_telling(text: str) -> bool:
    return len(text.split()) >= FEWEST_WORDS


class Encoder:
    """CLS vectors of texts by one model; the first token of a hybrid model is global."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.is_hybrid = isinstance(model, HybridLongformerModel)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, max_length: int, name: str) -> Tensor:
        """(texts, E) vectors of length 1, in the order of the texts."""
        ids = self.tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        vectors: dict[int, Tensor] = {}
        with tqdm(total=len(ids), desc=name, leave=False, disable=None) as progress:
            for batch in _batches(order, ids):
                inputs = self.tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt")
                states = self.hidden_states(inputs["input_ids"], inputs["attention_mask"])
                vectors |= dict(zip(batch, F.normalize(states[:, 0], dim=-1), strict=True))
                progress.update(len(batch))
        return torch.stack([vectors[i] for i in range(len(ids))])

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        options = {}
        if self.is_hybrid:
            options["global_attention_mask"] = torch.zeros_like(input_ids)
            options["global_attention_mask"][:, 0] = 1
        return self.model(input_ids, attention_mask=attention_mask, **options).last_hidden_state


def _batches(order: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Texts of similar length together."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(ids[index]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.no_grad()
def measure_equality(source: Encoder, hybrid: Encoder, texts: Sequence[str], *, length: int, window: int) -> Row:
    """The largest difference of any hidden state over texts of exactly `length` tokens."""
    encoded = source.tokenizer("\n".join(texts))["input_ids"]
    rows = torch.tensor(encoded[: len(encoded) // length * length]).view(-1, length)[:8]
    mask = torch.ones_like(rows)
    difference = (source.hidden_states(rows, mask) - hybrid.hidden_states(rows, mask)).abs().max()
    return {"window": window, "tokens": length, "texts": len(rows), "largest_difference": float(difference)}


def measure_retrieval(
    encoders: dict[str, Encoder], queries: Sequence[str], passages: Sequence[str], *, data: str
) -> list[Row]:
    """How often each model ranks the same passage first as the first model, the source."""
    best = {}
    for name, encoder in encoders.items():
        found, among = (encoder.encode(texts, max_length=SOURCE_LENGTH, name=name) for texts in (queries, passages))
        best[name] = (found @ among.T).argmax(1)
    source, *others = encoders
    tokenizer = encoders[source].tokenizer
    lengths = [len(ids) for ids in tokenizer(list(passages), truncation=True, max_length=SOURCE_LENGTH)["input_ids"]]
    return [
        {
            "data": data,
            "model": name,
            "queries": len(queries),
            "passages": len(passages),
            "longer_than_257_tokens": sum(length > 257 for length in lengths),
            "same_top1": float((best[name] == best[source]).float().mean()),
        }
        for name in others
    ]


def measure_documents(
    encoder: Encoder, papers: Sequence[Row], other_summaries: Sequence[str], *, lengths: Sequence[int], name: str
) -> list[Row]:
    """How often a paper's vector is nearer to its own summary's than to any other's, reading so many tokens of it."""
    candidates = [paper["summary"] for paper in papers] + list(other_summaries)
    summaries = encoder.encode(candidates, max_length=SOURCE_LENGTH, name=f"{name}: summaries")
    rows = []
    for length in lengths:
        texts = [paper["document"] for paper in papers]
        documents = encoder.encode(texts, max_length=length, name=f"{name}: papers, {length} tokens")
        similarity = documents @ summaries.T
        own = similarity.diagonal()
        rank = (similarity > own[:, None]).sum(1) + 1
        rows.append(
            {
                "model": name,
                "tokens_read": length,
                "papers": len(papers),
                "summaries": len(candidates),
                "finite": bool(torch.isfinite(documents).all()),
                "own_summary_first": float((rank == 1).float().mean()),
                "mean_reciprocal_rank": float((1 / rank).mean()),
                "own_minus_others": float((own - (similarity.sum(1) - own) / (len(candidates) - 1)).mean()),
            }
        )
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return "\n".join(lines)


def convert(folder: Path, **options: Any) -> HybridLongformerModel:
    """A fresh conversion of the source, verified."""
    report = convert_checkpoint(SHARED / "models" / MODEL, folder, max_length=LONG_LENGTH, **options)
    print(f"converted with {options}: {report.verification_text()}", flush=True)
    return HybridLongformerModel.from_pretrained(folder, dtype=torch.float32)


class Contenders:
    """The source, and its conversions by window, each made when it is first needed."""

    def __init__(self, work: Path):
        self.work = work
        self.tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / MODEL)
        model = AutoModel.from_pretrained(SHARED / "models" / MODEL, dtype=torch.float32)
        self.source = Encoder(model, self.tokenizer)
        self._converted: dict[int, Encoder] = {}

    def converted(self, window: int) -> Encoder:
        if window not in self._converted:
            model = convert(self.work / str(window), attention_window=window)
            self._converted[window] = Encoder(model, self.tokenizer)
        return self._converted[window]


def run_equality(contenders: Contenders, arguments: argparse.Namespace) -> list[Row]:
    """1. Where the window makes attention full, outputs equal the source's"""
    texts = [paper["document"] for paper in read_papers("validation")[:8]]
    return [
        measure_equality(contenders.source, contenders.converted(window), texts, length=length, window=window)
        for window, length in ((512, 257), (1024, 512))
    ]


def run_retrieval(contenders: Contenders, arguments: argparse.Namespace) -> list[Row]:
    """2. Retrieval under 512 tokens, source against conversion"""
    encoders = {"source": contenders.source}
    encoders |= {f"converted, window {window}": contenders.converted(window) for window in (512, 1024)}
    rows = []
    for data, (queries, passages) in (
        ("SciSummNet, summary sentence to paragraph", summary_queries(read_papers("validation"))),
        ("CUAD, question to paragraph", clause_queries("validation")),
    ):
        chosen, among = _spread(queries, arguments.queries), _spread(passages, arguments.passages)
        rows += measure_retrieval(encoders, chosen, among, data=data)
    return rows


def run_documents(contenders: Contenders, arguments: argparse.Namespace) -> list[Row]:
    """3. Whole papers: is the paper's own summary the nearest?"""
    papers = read_papers("validation")[: arguments.papers]
    others = [paper["summary"] for paper in read_papers("train")[: arguments.other_summaries]]
    rows = measure_documents(contenders.source, papers, others, lengths=[SOURCE_LENGTH], name="source")
    converted, lengths = contenders.converted(512), [1024, LONG_LENGTH]
    return rows + measure_documents(converted, papers, others, lengths=lengths, name="converted, window 512")


PARTS = {"equality": run_equality, "retrieval": run_retrieval, "documents": run_documents}


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """So many texts from all over the list."""
    return list(texts[:: max(len(texts) // count, 1)][:count])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (all)")
    parser.add_argument("--quick", action="store_true", help="few papers, queries and passages")
    parser.add_argument("--papers", type=int, default=100, help="papers to compare with their summaries (%(default)s)")
    parser.add_argument("--queries", type=int, default=400, help="queries of each data set (%(default)s)")
    parser.add_argument("--passages", type=int, default=500, help="passages of each data set (%(default)s)")
    parser.add_argument(
        "--other-summaries", type=int, default=700, help="summaries of yet other papers to choose among (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="where the json goes")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.papers, arguments.queries, arguments.passages, arguments.other_summaries = 4, 20, 40, 20
    if not (SHARED / "models" / MODEL).is_dir():
        sys.exit(f"no weights in {SHARED / 'models' / MODEL}: set HYBRID_LONGFORMER_SHARED to the folder that has them")
    file = arguments.output / "conversion.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    command = " ".join(["python -m benchmarks.conversion", *(sys.argv[1:] if argv is None else argv)])
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        contenders = Contenders(Path(work))
        for name in arguments.parts:
            rows = PARTS[name](contenders, arguments)
            print(f"\n{PARTS[name].__doc__}\n\n{format_table(rows)}", flush=True)
            results[name] = {"command": command, **versions, "rows": rows}
            file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
