"""Where decisions meet an engine."""
