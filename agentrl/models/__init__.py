"""Facts about the families of models in transformers: experts, logits, classes, recurrent state."""
