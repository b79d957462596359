"""Folders of runs, and the ways to look at them."""
