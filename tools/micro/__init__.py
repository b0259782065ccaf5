"""How models/north-micro was made: its text, tokenizer, training and export. See tools/train_micro.py."""
