"""What a recipe may say: every field with its type, default and sentence; a page and a JSON schema made of it."""
