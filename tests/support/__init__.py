"""Helpers that several test rooms share; importable through tests/conftest.py."""
