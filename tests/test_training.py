"""Trainer, Accelerate and PEFT train the models as they train any other."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from hybrid_longformer import HybridLongformerForQuestionAnswering
from hybrid_longformer import HybridLongformerForTokenClassification as TokenClassifier
from tests.models import tiny_config

accelerate = pytest.importorskip("accelerate")

# Dropout would only make a task this small take longer to learn.
CONFIG = partial(tiny_config, attention_window=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def far_copy_examples(count: int, length: int = 60) -> list[dict]:
    """Token 3 or 4 stands at the far end; the first token's label says which. Only a global token can see that far."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(count):
        ids = torch.randint(5, 40, (length,), generator=generator)
        kind = int(torch.randint(0, 2, (1,), generator=generator))
        ids[-1] = 3 + kind
        labels = torch.full((length,), -100)
        labels[0] = kind
        is_global = torch.zeros(length, dtype=torch.long)
        is_global[0] = 1
        examples.append({"input_ids": ids, "global_attention_mask": is_global, "labels": labels})
    return examples


def train_with_accelerate(model, examples: list[dict], steps: int = 100) -> list[float]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples, batch_size=16))
    losses = []
    for _, batch in zip(range(steps), loader, strict=True):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_accelerate_learns_what_only_a_global_token_can_see() -> None:
    torch.manual_seed(0)
    examples = far_copy_examples(1600)
    with_global = train_with_accelerate(TokenClassifier(CONFIG(num_random_blocks=0)), examples)
    blind = [{**example, "global_attention_mask": torch.zeros(60, dtype=torch.long)} for example in examples]
    torch.manual_seed(0)
    without = train_with_accelerate(TokenClassifier(CONFIG(num_random_blocks=0)), blind)
    assert sum(with_global[-4:]) / 4 < 0.3
    assert sum(without[-4:]) / 4 > 0.6


def test_trainer_trains_and_keeps_the_global_column(tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=80,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        gradient_accumulation_steps=2,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(model=TokenClassifier(CONFIG()), args=arguments, train_dataset=far_copy_examples(1280))
    trainer._set_signature_columns_if_needed()
    assert "global_attention_mask" in trainer._signature_columns
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-4:]) / 4 < 0.3
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "modeling_hybrid_longformer.py").exists()


def test_lora_trains_and_merges() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = HybridLongformerForQuestionAnswering(tiny_config()).eval()
    targets = ["query", "key", "value", "query_global", "key_global", "value_global"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    ids = torch.randint(3, 40, (2, 100))
    inputs = {"input_ids": ids, "global_attention_mask": (torch.arange(100) < 4).long().expand(2, -1)}
    before = adapted(**inputs).start_logits
    loss = adapted(**inputs, start_positions=torch.tensor([3, 4]), end_positions=torch.tensor([5, 6])).loss
    loss.backward()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    merged = adapted.merge_and_unload()
    assert (merged(**inputs).start_logits - before).abs().max() <= 1e-5
