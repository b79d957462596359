"""What a run leaves behind, and how a person looks at it."""
