"""Proofs that a chat template renders turns as a model was trained on them."""
