"""LoRA fine-tuning of a small causal language model with transformers' Trainer, as a worker of a
run; without a run, as with `python train.py`, it trains alone.

The model is made from a config, so that nothing is downloaded. It learns to count: each sequence
goes on by a stride of its own.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from dlctl.integrations.transformers import DlctlTrainer

WORDS, LENGTH = 32, 16


class Counting(Dataset):
    """Sequences of `LENGTH` words, each the one before plus a stride, modulo `WORDS`."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(0, WORDS, (samples, 1), generator=generator)
        stride = torch.randint(1, 5, (samples, 1), generator=generator)
        self.words = (first + stride * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def small_model() -> torch.nn.Module:
    """A Llama with LoRA in all of its linear layers, and trained embeddings."""
    set_seed(0)  # Each worker has the same frozen weights.
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    output = parser.parse_args().output
    model = small_model()
    trainer = DlctlTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            num_train_epochs=3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=Counting(2048, seed=1),
        eval_dataset=Counting(256, seed=2),
    )
    trainer.train()
    trainer.save_model(output)  # By worker 0: the adapter and its config, by save_pretrained.


if __name__ == "__main__":
    main()
