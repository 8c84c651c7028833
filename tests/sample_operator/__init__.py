"""Files of a sample operator, which one registry line adds to a copy of the project (tests/test_new_operator.py)."""
