"""Conformance checks and fixtures for authors of plug-ins and for tests."""
