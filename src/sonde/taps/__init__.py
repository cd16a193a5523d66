"""The only code that touches torch's hooks."""
