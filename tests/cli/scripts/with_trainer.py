"""A Trainer of transformers, accumulating gradients."""

import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(config)
    rows = [{"input_ids": row, "labels": int(row[0] > 25)} for row in torch.randint(3, 50, (48, 6))]
    args = TrainingArguments(
        "out",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)  # it prints how long it took
    trainer.train()
    print([each.sum().item() for each in model.parameters()])
