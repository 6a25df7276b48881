"""The Trainer of transformers, compressed: a small GPT-2 learns to repeat a pattern.

torchrun --nproc-per-node 2 examples/trainers/with_transformers.py
"""

import torch
from gradferry.integrations.transformers import attach
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    torch.manual_seed(0)
    starts = torch.randint(64, (512, 1))
    tokens = (starts + 3 * torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2)

    arguments = TrainingArguments(
        "runs",
        use_cpu=True,
        num_train_epochs=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    callback = attach(trainer, "q4")
    trained = trainer.train()

    if trainer.is_world_process_zero():
        ratio = callback.state.stats()["ratio"]
        print(f"loss {trained.training_loss:.3f}, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
