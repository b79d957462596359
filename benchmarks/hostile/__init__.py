"""What `benchmarks.reliability` tries, one file for each kind of harm."""
