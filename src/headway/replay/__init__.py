"""Replay: an open-loop client, the run store, statistics and the comparison gate. Knows no engine."""
