"""Traces: one reader a format, one record type, no engine."""

from headway.trace.formats import FORMATS, read
from headway.trace.readers.headway_jsonl import write
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.trace.selection import select

__all__ = ["FORMATS", "SCHEMA", "ReadReport", "Trace", "read", "select", "write"]
