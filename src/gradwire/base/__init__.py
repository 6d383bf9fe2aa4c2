"""Errors, files, flags and other parts without a subject, shared by all floors."""
