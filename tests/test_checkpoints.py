"""Checkpoints that carry their code: every Auto class opens them in a process that has never heard of this package."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import check_imports, get_relative_import_files

import hybrid_longformer
from hybrid_longformer import HybridLongformerConfig
from hybrid_longformer.configuration_hybrid_longformer import AUTO_MAP
from hybrid_longformer.saving import push_checkpoint
from tests.models import tiny_config

PACKAGE = Path(hybrid_longformer.__file__).parent
MODEL_CLASSES = {auto: path.rpartition(".")[2] for auto, path in AUTO_MAP.items() if auto != "AutoConfig"}


def save(class_name: str, folder: Path, **options):
    torch.manual_seed(0)
    model = getattr(hybrid_longformer, class_name)(tiny_config()).eval()
    model.save_pretrained(folder, **options)
    return model


def travelling_files() -> list[Path]:
    entry = PACKAGE / "modeling_hybrid_longformer.py"
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "hello"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


PROBE = """
def probe(model, auto_class):
    ids = torch.arange(3, 53)[None]
    with torch.no_grad():
        if auto_class == "AutoModelForMultipleChoice":
            output = model(ids[None]).logits
        elif auto_class == "AutoModelForSeq2SeqLM":
            output = model(ids, decoder_input_ids=ids[:, :4]).logits
        else:
            output = model(ids, global_attention_mask=ids % 25 // 24, return_dict=False)[0]
    return output.double().abs().sum().item()
"""

FRESH_PROCESS = """
import json, sys, importlib.util
import torch, transformers
assert importlib.util.find_spec("hybrid_longformer") is None, "the package must not be importable here"
results = {}
for folder, auto_class in json.loads(sys.argv[1]):
    model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
    results[folder + auto_class] = [type(model).__name__, probe(model, auto_class)]
    if auto_class == "AutoModelForQuestionAnswering":
        model.save_pretrained(folder + "-again")
print("RESULTS" + json.dumps(results))
"""


FRESH_TOKENIZER = """
import json, sys, importlib.util
import transformers
assert importlib.util.find_spec("hybrid_longformer") is None, "the package must not be importable here"
tokenizer = transformers.AutoTokenizer.from_pretrained(json.loads(sys.argv[1]), trust_remote_code=True)
print("RESULTS" + json.dumps(tokenizer("hello")["input_ids"]))
"""


def run_fresh(program: str, argument: Any, tmp_path: Path) -> tuple[Any, str]:
    """Runs in a folder of its own, with the module cache in it and the package's folder nowhere on the path.

    Returns what the program says its results are, and everything it printed before.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "HF_MODULES_CACHE": str(tmp_path / "m")}
    # An editable install reaches the package through a .pth file, which -S and an explicit path leave out.
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    code = f"import sys; sys.path.append({site_packages!r})\n{program}"
    command = [sys.executable, "-S", "-c", code, json.dumps(argument)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed, _, results = done.stdout.rpartition("RESULTS")
    return json.loads(results), printed


def probe(model, auto_class: str) -> float:
    """The same probe as in the fresh process, so that the numbers compare."""
    names: dict = {"torch": torch}
    exec(PROBE, names)
    return names["probe"](model, auto_class)


def test_every_auto_class_opens_a_checkpoint_without_the_package(tmp_path: Path) -> None:
    models = {auto: save(name, tmp_path / auto) for auto, name in MODEL_CLASSES.items()}
    pairs = [(str(tmp_path / auto), auto) for auto in MODEL_CLASSES]
    # The base model of a question-answering checkpoint and of a seq2seq one: the full auto_map is in every config.
    pairs += [(str(tmp_path / "AutoModelForQuestionAnswering"), "AutoModel")]
    pairs += [(str(tmp_path / "AutoModelForSeq2SeqLM"), "AutoModel")]
    results, _ = run_fresh(PROBE + FRESH_PROCESS, pairs, tmp_path)
    for auto, name in MODEL_CLASSES.items():
        class_name, total = results[str(tmp_path / auto) + auto]
        assert class_name == name
        assert total == pytest.approx(probe(models[auto], auto), abs=1e-3)
    # The encoder of a seq2seq checkpoint is its base model.
    inner = models["AutoModelForSeq2SeqLM"].hybrid_longformer
    _, total = results[str(tmp_path / "AutoModelForSeq2SeqLM") + "AutoModel"]
    assert total == pytest.approx(probe(inner, "AutoModel"), abs=1e-3)
    # What was loaded by its own code saves itself whole again.
    again = tmp_path / "AutoModelForQuestionAnswering-again"
    first = tmp_path / "AutoModelForQuestionAnswering"
    assert {path.name for path in again.iterdir()} == {path.name for path in first.iterdir()}
    assert json.loads((again / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_tokenizer_loads_without_the_package_and_without_a_question(tmp_path: Path) -> None:
    save("HybridLongformerForQuestionAnswering", tmp_path / "model", tokenizer=tiny_tokenizer())
    ids, printed = run_fresh(FRESH_TOKENIZER, str(tmp_path / "model"), tmp_path)
    assert ids == [4]
    assert "custom code" not in printed


def test_documents_give_the_tokenizer_the_flag_that_spares_the_question(tmp_path: Path) -> None:
    """Without trust_remote_code, AutoTokenizer asks on the terminal as soon as it sees the configuration."""
    save("HybridLongformerModel", tmp_path)
    root = PACKAGE.parent
    documents = [tmp_path / "README.md", root / "README.md", *(root / "docs").glob("*.md")]
    documents += (root / "model_cards").glob("*.md")
    calls = [re.findall(r"AutoTokenizer\.from_pretrained\([^)]*\)", path.read_text()) for path in documents]
    assert calls[0] and calls[1]
    for path, found in zip(documents, calls, strict=True):
        assert all("trust_remote_code=True" in call for call in found), path.name


def test_folder_holds_weights_code_config_card_and_tokenizer(tmp_path: Path) -> None:
    save("HybridLongformerForQuestionAnswering", tmp_path, tokenizer=tiny_tokenizer())
    names = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in travelling_files()} <= names
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\n") and "pipeline_tag: question-answering" in card and "trust_remote_code=True" in card


def test_existing_card_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    save("HybridLongformerModel", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_registered_with_the_auto_classes(tmp_path: Path) -> None:
    model = save("HybridLongformerModel", tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is HybridLongformerConfig
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert probe(loaded, "AutoModel") == pytest.approx(probe(model, "AutoModel"))
    for auto, name in MODEL_CLASSES.items():
        import transformers

        assert type(getattr(transformers, auto).from_config(tiny_config())).__name__ == name


@pytest.mark.parametrize("path", travelling_files(), ids=lambda path: path.name)
def test_travelling_file_keeps_the_hub_rules(path: Path) -> None:
    source = path.read_text()
    # The Hub's own check of a file: relative imports are found by this pattern, wherever they stand.
    relative = re.findall(r"^\s*from\s+(\.\S*)\s+import", source, flags=re.MULTILINE)
    assert not re.search(r"^\s*import\s+\.", source, flags=re.MULTILINE)
    for name in relative:
        assert re.fullmatch(r"\.\w+", name), f"{name}: only flat siblings travel"
        assert (PACKAGE / f"{name[1:]}.py").exists()
    tree = ast.parse(source)
    real = {f".{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
    assert set(relative) == real, "an import line inside a docstring would be taken for real"
    check_imports(path)
    allowed = {"torch", "transformers"} | set(sys.stdlib_module_names)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        outside = [name for name in names if name.partition(".")[0] not in allowed]
        assert not outside or _is_inside_try(tree, node), f"{outside} would become a requirement of every checkpoint"


def _is_inside_try(tree: ast.AST, target: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Try) and any(target is inner for part in node.body for inner in ast.walk(part))
        for node in ast.walk(tree)
    )


def test_no_unsafe_calls_in_the_package() -> None:
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            assert name not in {"eval", "exec", "__import__"}, f"{path.name}: {name}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                assert "pickle" not in names, path.name


class FakeApi:
    """Stands for the Hub: keeps what would be uploaded."""

    has_card = False
    uploads: list = []

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, private=None, exist_ok=False):
        return type("Repo", (), {"repo_id": f"me/{repo_id}"})()

    def file_exists(self, repo_id, name):
        return self.has_card

    def upload_folder(self, *, folder_path, ignore_patterns, **options):
        names = {path.name for path in Path(folder_path).iterdir()} - set(ignore_patterns or [])
        self.uploads.append((names, options))
        return options["repo_id"]


@pytest.mark.parametrize("has_card", [False, True])
def test_push_to_hub_uploads_the_whole_folder(has_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "has_card", has_card)
    monkeypatch.setattr(FakeApi, "uploads", [])
    model = hybrid_longformer.HybridLongformerForMaskedLM(tiny_config())
    assert model.push_to_hub("my-model", tokenizer=tiny_tokenizer(), private=True) == "me/my-model"
    ((names, options),) = FakeApi.uploads
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_hybrid_longformer.py"} <= names
    assert ("README.md" in names) is not has_card
    assert options["commit_message"] == "Upload HybridLongformerForMaskedLM"
    assert push_checkpoint.__module__.endswith("saving")
