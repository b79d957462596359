"""Data from outside, read and checked once: plain values and files that are whole or absent."""
