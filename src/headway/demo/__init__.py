"""Stock vLLM against Headway on one trace: servers side by side, runs interleaved, one table."""
