"""Generators: vLLM engines that many callers share and whose weights change while requests are in flight."""
