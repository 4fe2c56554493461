"""Modules that every package may use. The list of modules is closed: tests/test_repository.py has it."""
