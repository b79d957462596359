"""The recipe of a run: its configuration tree, its fields, and the plug-ins that it names."""
