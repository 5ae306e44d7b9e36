"""The mutation check: each guard of an invariant broken on purpose, and a test that must notice (reference.md, 10).

``python3 -m tests.mutants`` tries them all; tests/unit/project/test_mutants.py keeps the list sound and tries a few.
"""
