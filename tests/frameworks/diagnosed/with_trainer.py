"""A tiny GPT-2 under transformers.Trainer, which logs, evaluates and saves."""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __init__(self, count, seconds=0.0):
        self.words = torch.randint(0, 50, (count, 32))
        self.seconds = seconds

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return {"input_ids": self.words[index], "labels": self.words[index]}


model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2))
arguments = TrainingArguments(
    "out",
    num_train_epochs=1000,
    per_device_train_batch_size=8,
    logging_steps=50,
    eval_strategy="steps",
    eval_steps=100,
    save_steps=200,
    save_total_limit=1,
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(
    model, arguments, train_dataset=Words(480, float(sys.argv[1])), eval_dataset=Words(32)
)
trainer.train()
