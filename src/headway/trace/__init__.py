"""Traces: one reader a format, one record type, no engine."""
