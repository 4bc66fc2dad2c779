"""One module a trace format: what its columns mean, and how its rows become those of a `Trace`."""
