"""Headway inside vLLM: starting it, plugging into it, reporting from it. Only this folder imports vllm."""
